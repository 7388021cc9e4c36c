"""The canonical form of programs. It depends on tree and comments alone, so that formatting twice changes nothing.

Neighbouring lines of one kind line up: `=`, ranges, and comments at the ends of lines. A comment inside a statement of
several lines moves above it.
"""

from __future__ import annotations

import collections
import itertools
from dataclasses import dataclass, replace
from typing import Iterable, Optional, Sequence

from rlhf_dsl import ast
from rlhf_dsl.ast import Span
from rlhf_dsl.diagnostics import Diagnostics
from rlhf_dsl.format_expr import INDENT, WIDTH, Printer, format_expr
from rlhf_dsl.format_rows import Row, rows
from rlhf_dsl.scan import scan
from rlhf_dsl.source import Source

__all__ = ["format_expr", "format_program"]

COMMENTS = 34  # the column of comments at the ends of lines


@dataclass(frozen=True)
class _Line:
    """A row or, with `row` None, a comment on a line of its own.

    blank: a blank line stands above
    comment: the whole comment, or what trails the row
    """

    level: int
    row: Optional[Row]
    comment: str = ""
    blank: bool = False


def format_program(program: ast.Program, source: Source) -> str:
    """The text of a program in canonical form. It parses to the same tree and keeps every comment of `source`."""
    lines = _with_comments(list(rows(program, source)), source)
    return "".join(_print_run(run, Printer(source)) for run in _runs(lines))


# ---- comments and blank lines ------------------------------------------------------------------

def _with_comments(statements: Sequence[Row], source: Source) -> list[_Line]:
    """All lines in order, each comment where it belongs, blank lines where they stay."""
    weave = _Weave(source)
    for row, following in itertools.zip_longest(statements, statements[1:]):
        weave.add(row, following)
    weave.add_own(weave.take(len(source.text)), None)
    lines = weave.lines
    return [replace(line, blank=_keeps_blank(before, line)) for before, line in zip([None, *lines], lines)]


class _Weave:
    """Puts rows and comments into one sequence, in the order of the text."""

    def __init__(self, source: Source):
        self.lines: list[_Line] = []
        self._source = source
        self._comments = collections.deque(scan(source.text, Diagnostics(source)).comments)
        self._end = 0  # of what the last line was made from

    def take(self, end: int) -> list[Span]:
        """The next comments, as far as they start before `end`."""
        taken = []
        while self._comments and self._comments[0].start < end:
            taken.append(self._comments.popleft())
        return taken

    def add(self, row: Row, following: Optional[Row]) -> None:
        """A row, the comments above it, those inside it (which move above it), and those behind it on its line."""
        self.add_own(self.take(row.span.start), row)
        blank = _blank(self._source, self._end, row.span.start)
        inside = self.take(row.span.end)
        for i, comment in enumerate(inside):
            self.lines.append(_Line(row.level, None, _text(comment, self._source), blank and i == 0))
        line_end = _line_end(self._source, row.span.end)
        behind = self.take(min(line_end, following.span.start) if following else line_end)
        text = " ".join(_text(comment, self._source) for comment in behind)
        self.lines.append(_Line(row.level, row, text, blank and not inside))
        self._end = behind[-1].end if behind else row.span.end

    def add_own(self, comments: Sequence[Span], following: Optional[Row]) -> None:
        """Comments on lines of their own."""
        for comment in comments:
            level = _comment_level(comment, self.lines, following, self._source)
            blank = _blank(self._source, self._end, comment.start)
            self.lines.append(_Line(level, None, _text(comment, self._source), blank))
            self._end = comment.end


def _text(comment: Span, source: Source) -> str:
    """`#like` becomes `# like`; `#!` and `##` stay."""
    text = source.slice(comment).rstrip()
    return f"# {text[1:]}" if text[1:2].isalnum() else text


def _comment_level(comment: Span, before: Sequence[_Line], following: Optional[Row], source: Source) -> int:
    """A comment stands in a block if the block goes on below it, or if it is indented and the block ends above."""
    if following is not None and following.level > 0:
        return following.level
    last = next((line.row for line in reversed(before) if line.row is not None), None)
    in_block = last is not None and last.level > 0
    return int(in_block and source.position(comment.start)[1] > 1)


def _blank(source: Source, start: int, end: int) -> bool:
    """Is there a blank line between two offsets?"""
    return "\n\n" in source.text[start:end].replace(" ", "")


def _line_end(source: Source, offset: int) -> int:
    end = source.text.find("\n", offset)
    return len(source.text) if end < 0 else end


def _keeps_blank(before: Optional[_Line], line: _Line) -> bool:
    if before is None or (before.row is not None and before.row.opens):
        return False
    if line.level < before.level:
        return True
    if line.level > 0 or before.row is None or line.row is None:
        return line.blank
    return line.blank or before.row.separate or line.row.separate


# ---- columns -----------------------------------------------------------------------------------

def _runs(lines: Iterable[_Line]) -> list[list[_Line]]:
    """Lines that may line up with each other: no blank line, comment or head between them."""
    runs: list[list[_Line]] = []
    for line in lines:
        last = runs[-1][-1] if runs else None
        joins = last is not None and last.row is not None and line.row is not None and not line.blank
        if joins and last.level == line.level and not line.row.opens:
            runs[-1].append(line)
        else:
            runs.append([line])
    return runs


def _print_run(run: Sequence[_Line], printer: Printer) -> str:
    """The text of a run, its newlines, and the blank line above it."""
    if run[0].row is None:
        texts = [INDENT * run[0].level + run[0].comment]
    else:
        groups = itertools.groupby(run, key=lambda line: line.row.group or line.row.span)
        texts = [text for _, group in groups for text in _print_group([line.row for line in group], printer)]
        texts = _add_comments(texts, [line.comment for line in run])
    return ("\n" if run[0].blank else "") + "".join(f"{text}\n" for text in texts)


def _print_group(group: Sequence[Row], printer: Printer) -> list[str]:
    head = max((len(row.head) for row in group if row.equals), default=0)
    equals = max(len(row.equals) for row in group)
    starts = [INDENT * row.level + _start(row, head, equals) for row in group]
    bodies = [_tail(row, start, printer) for row, start in zip(group, starts)]
    ranged = [len(body) for row, body in zip(group, bodies) if row.extra]
    if len(ranged) > 1:
        bodies = [f"{body:<{max(ranged)}}  {row.extra}" if row.extra else body for row, body in zip(group, bodies)]
    elif ranged:
        bodies = [f"{body} {row.extra}" if row.extra else body for row, body in zip(group, bodies)]
    return [start + body for start, body in zip(starts, bodies)]


def _start(row: Row, head: int, equals: int) -> str:
    return f"{row.head:<{head}} {row.equals:>{equals}} " if row.equals else row.head


def _tail(row: Row, start: str, printer: Printer) -> str:
    flat = "".join(part if isinstance(part, str) else printer.flat(part) for part in row.tail)
    room = WIDTH - len(start) - (len(row.extra) + 2 if row.extra else 0)
    if len(flat) <= room or "\n" in flat:
        return flat
    text = start
    for part, following in itertools.zip_longest(row.tail, row.tail[1:]):
        column = len(text) - text.rfind("\n") - 1
        after = len(following) if isinstance(following, str) else 0
        indent = len(INDENT) * row.level
        text += part if isinstance(part, str) else printer.fit(part, column, indent, after)
    return text[len(start):]


def _add_comments(texts: Sequence[str], comments: Sequence[str]) -> list[str]:
    """Comments at the ends of lines, in one column: `COMMENTS`, or behind the longest line that has one."""
    widths = [len(text) - text.rfind("\n") - 1 for text in texts]
    column = max([COMMENTS, *(width + 2 for width, comment in zip(widths, comments) if comment)])
    return [
        text + " " * (column - width) + comment if comment else text
        for text, width, comment in zip(texts, widths, comments)
    ]
