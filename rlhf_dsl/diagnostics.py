"""Diagnostics as values: what is wrong, where, and the way out.

    sink.error("E0202", expr.span, labels=[Label(left.span, "f32[b, t]")], left="f32[b, t]", right="f32[b, s]")
    raise fault("R0103", place=f"{path}:{line}", column="prompt")

The wording is that of `rlhf_dsl.codes`, filled in with the keyword arguments; `rlhf_dsl.render` prints it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Iterable, Optional

from rlhf_dsl.ast import Span
from rlhf_dsl.codes import CODES
from rlhf_dsl.source import Source


@dataclass(frozen=True)
class Label:
    """A further span with a note; `source` where it stands in another text than the diagnostic."""

    span: Span
    message: str = ""
    source: Optional[Source] = None


@dataclass(frozen=True)
class Diagnostic:
    """severity: "error" or "warning".

    span, source: the primary place in a program, or None for both
    place: where there is no program text: "data/prompts.jsonl:12", or "" for nowhere
    """

    code: str
    severity: str
    message: str
    span: Optional[Span] = None
    labels: tuple[Label, ...] = ()
    help: str = ""
    source: Optional[Source] = None
    place: str = ""

    @property
    def exit_code(self) -> int:
        return CODES[self.code].exit_code


def diagnostic(
    code: str, span: Optional[Span] = None, /, *, source: Optional[Source] = None, place: str = "",
    labels: Iterable[Label] = (), help: Optional[str] = None, **words,
) -> Diagnostic:
    """A diagnostic worded by the table; `help` replaces the table's own help, "" leaves it out."""
    entry = CODES[code]
    words = {name: str(word).lower() if isinstance(word, bool) else word for name, word in words.items()}  # `true`
    text = entry.help.format(**words) if help is None else help
    return Diagnostic(code, entry.severity, entry.message.format(**words), span, tuple(labels), text, source, place)


class DiagnosticError(Exception):
    """One or more diagnostics that end the work; `exit_code` is that of the first error unless given."""

    def __init__(self, diagnostics: Iterable[Diagnostic], exit_code: Optional[int] = None):
        self.diagnostics = tuple(diagnostics)
        errors = [d for d in self.diagnostics if d.severity == "error"]
        self.exit_code = exit_code if exit_code is not None else (errors or self.diagnostics)[0].exit_code
        super().__init__("; ".join(f"{d.code}: {d.message}" for d in errors or self.diagnostics))

    def __reduce__(self):
        return DiagnosticError, (self.diagnostics, self.exit_code)


def fault(
    code: str, span: Optional[Span] = None, /, *, exit_code: Optional[int] = None, source: Optional[Source] = None,
    place: str = "", labels: Iterable[Label] = (), help: Optional[str] = None, **words,
) -> DiagnosticError:
    """An exception with a single diagnostic, to be raised: `raise fault("R0101", place=path, model=name)`."""
    one = diagnostic(code, span, source=source, place=place, labels=labels, help=help, **words)
    return DiagnosticError([one], exit_code)


@dataclass
class Diagnostics:
    """Collects the diagnostics of one source, each once."""

    source: Optional[Source] = None
    items: list[Diagnostic] = field(default_factory=list)
    _known: set[Diagnostic] = field(default_factory=set, repr=False)

    def error(
        self, code: str, span: Optional[Span] = None, /, *, source: Optional[Source] = None, place: str = "",
        labels: Iterable[Label] = (), help: Optional[str] = None, **words,
    ) -> None:
        """Adds a diagnostic of the table (warnings too: the code says which it is); `source` defaults to the sink's."""
        origin = None if span is None else source or self.source
        self.add(diagnostic(code, span, source=origin, place=place, labels=labels, help=help, **words))

    warning = error

    def add(self, item: Diagnostic) -> None:
        if item not in self._known:
            self._known.add(item)
            self.items.append(item)

    @property
    def has_errors(self) -> bool:
        return any(d.severity == "error" for d in self.items)

    def sorted(self) -> tuple[Diagnostic, ...]:
        """In the order of their places in the text; those without a place come first."""
        return tuple(sorted(self.items, key=lambda d: d.span or Span(-1, -1)))

    def raise_errors(self, exit_code: Optional[int] = None) -> None:
        """Raises everything collected if there is an error among it."""
        if self.has_errors:
            raise DiagnosticError(self.sorted(), exit_code)


def closest(name: str, candidates: Iterable[str]) -> Optional[str]:
    """The candidate that `name` is most likely a misspelling of, or None."""
    found = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return found[0] if found and found[0] != name else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """A `help:` line: "did you mean `x`?", or the valid alternatives, or ""."""
    candidates = list(dict.fromkeys(candidates))
    found = closest(name, candidates)
    if found is not None:
        return f"did you mean `{found}`?"
    return f"there is: {listing(candidates)}" if candidates else ""


def listing(names: Iterable[str], last: str = "and") -> str:
    """`a`, `b` and `c`."""
    quoted = [f"`{n}`" for n in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} {last} {quoted[-1]}" if quoted else ""
