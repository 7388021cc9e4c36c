"""One entry of the table of diagnostics."""

from __future__ import annotations

from dataclasses import dataclass

EXIT_CODES = {"E": 1, "P": 3, "R": 4, "W": 0}


@dataclass(frozen=True)
class Code:
    """A kind of diagnostic: its wording here, its place and words where it is raised.

    message: a `str.format` template over the words given where it is raised; lower case, no full stop
    explanation: for `rlflowc help CODE`: what the rule is and why it is there
    help: the default way out, a template over the same words
    wrong, right: a shortest program that earns it, and its correction ("" where a program cannot show it)
    status: the exit code of the command line; -1 for that of the family
    """

    code: str
    message: str
    explanation: str
    help: str = ""
    wrong: str = ""
    right: str = ""
    status: int = -1

    @property
    def severity(self) -> str:
        return "warning" if self.code.startswith("W") else "error"

    @property
    def exit_code(self) -> int:
        return self.status if self.status >= 0 else EXIT_CODES[self.code[0]]
