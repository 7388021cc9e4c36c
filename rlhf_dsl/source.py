"""The text of a program and where things stand in it."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rlhf_dsl.ast import Span

STDIN = "-"


@dataclass(frozen=True)
class Source:
    """A program's text under the name that messages use for it. Lines and columns count from 1, in characters."""

    path: str
    text: str

    @cached_property
    def line_starts(self) -> tuple[int, ...]:
        return (0, *(i + 1 for i, c in enumerate(self.text) if c == "\n"))

    def position(self, offset: int) -> tuple[int, int]:
        """(line, column) of a character offset."""
        line = bisect.bisect_right(self.line_starts, offset)
        return line, offset - self.line_starts[line - 1] + 1

    def line(self, number: int) -> str:
        """The text of a line without its newline; "" past the end."""
        if not 1 <= number <= len(self.line_starts):
            return ""
        start = self.line_starts[number - 1]
        end = self.text.find("\n", start)
        return self.text[start:] if end < 0 else self.text[start:end]

    def slice(self, span: Span) -> str:
        return self.text[span.start:span.end]

    @property
    def stem(self) -> str:
        return "stdin" if self.path == STDIN else Path(self.path).stem
