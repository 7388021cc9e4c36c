"""Prints diagnostics for people (with the source lines they are about) and for programs (JSON).

    error[E0202]: dimensions do not match: `f32[b, t]` and `f32[b, s]`
       ┌─ remax.rlflow:18:10
       │
    18 │     kl = actor.logprobs(y) - ref.logprobs(y0)
       │          -----------------   ---------------- f32[b, s]
       │          │
       │          f32[b, t]
       │
       = help: each side has a dimension the other lacks; reduce one
"""

from __future__ import annotations

import itertools
import unicodedata
from dataclasses import dataclass
from typing import Any, Iterable, Optional, Sequence

from rlhf_dsl.ast import Span
from rlhf_dsl.diagnostics import Diagnostic, Label
from rlhf_dsl.source import Source

MAX_WIDTH = 140  # columns of a source line that are shown; longer ones are cut around the first mark
TAB = 4
STYLES = {"error": "1;31", "warning": "1;33", "gutter": "34", "label": "36", "bold": "1"}


def render(diagnostics: Iterable[Diagnostic], color: bool = False) -> str:
    """All diagnostics, a blank line between two, a newline at the end."""
    return "\n".join(_render_one(d, _Paint(color)) for d in diagnostics)


def to_json(item: Diagnostic) -> dict[str, Any]:
    """The diagnostic as JSON types; `range` is absent without a place in a program."""
    found: dict[str, Any] = {"code": item.code, "severity": item.severity, "message": item.message}
    if item.source is not None and item.span is not None:
        found |= {"path": item.source.path, "range": _range(item.source, item.span)}
    elif item.place:
        found["path"] = item.place
    found["labels"] = [_label_json(item, label) for label in item.labels]
    found["help"] = item.help
    return found


def _label_json(item: Diagnostic, label: Label) -> dict[str, Any]:
    source = label.source or item.source
    place = {"path": source.path, "range": _range(source, label.span)} if source else {}
    return {"message": label.message, **place}


def _range(source: Source, span: Span) -> dict[str, Any]:
    places = {"start": source.position(span.start), "end": source.position(span.end)}
    return {key: {"line": line, "column": column} for key, (line, column) in places.items()}


@dataclass(frozen=True)
class _Paint:
    color: bool

    def __call__(self, style: str, text: str) -> str:
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self.color and text else text


@dataclass(frozen=True)
class _Mark:
    """Columns [start, end) of one printed line, in cells, with a note."""

    start: int
    end: int
    message: str
    style: str
    char: str


@dataclass(frozen=True)
class _Block:
    """What is shown of one text: `place` stands in its head; marks are (span, note, primary)."""

    source: Source
    place: Span
    marks: tuple[tuple[Span, str, bool], ...]

    @property
    def numbers(self) -> list[int]:
        return sorted({self.source.position(span.start)[0] for span, _, _ in self.marks})


def _render_one(item: Diagnostic, paint: _Paint) -> str:
    blocks = _blocks(item)
    width = len(str(max((n for block in blocks for n in block.numbers), default=1)))
    gutter = " " * width
    lines = [paint(item.severity, f"{item.severity}[{item.code}]") + paint("bold", f": {_visible(item.message)}")]
    for block in blocks:
        lines += _block_lines(block, item.severity, width, paint)
    if item.place:
        lines.append(paint("gutter", f"{gutter} ┌─") + f" {_visible(item.place)}")
    if item.help and (blocks or item.place):
        lines.append(paint("gutter", f"{gutter} │"))
    if item.help:
        first, *rest = item.help.split("\n")
        lines.append(paint("gutter", f"{gutter} =") + paint("bold", " help:") + f" {_visible(first)}")
        lines += [f"{gutter}         {_visible(more)}" for more in rest]
    return "\n".join(lines) + "\n"


def _blocks(item: Diagnostic) -> list[_Block]:
    """The primary's text first. Labels inside the primary span stand for it: then only they are underlined."""
    if item.source is None or item.span is None:
        return []
    by_source: dict[Source, list[tuple[Span, str, bool]]] = {item.source: []}
    for label in item.labels:
        by_source.setdefault(label.source or item.source, []).append((label.span, label.message, False))
    own = by_source.pop(item.source)
    divided = any(item.span.start <= span.start and span.end <= item.span.end for span, _, _ in own)
    first = _Block(item.source, item.span, tuple(own if divided else [(item.span, "", True), *own]))
    return [first, *(_Block(source, marks[0][0], tuple(marks)) for source, marks in by_source.items())]


def _block_lines(block: _Block, severity: str, width: int, paint: _Paint) -> list[str]:
    """Where, a blank, then each line with its marks."""
    line, column = block.source.position(block.place.start)
    empty = paint("gutter", f"{' ' * width} │")
    lines = [paint("gutter", f"{' ' * width} ┌─") + f" {_visible(block.source.path)}:{line}:{column}", empty]
    previous: Optional[int] = None
    for number in block.numbers:
        if previous is not None and number > previous + 1:
            lines.append(paint("gutter", f"{' ' * width} ·"))
        previous = number
        here = [mark for mark in block.marks if block.source.position(mark[0].start)[0] == number]
        text, drawn = _line(block.source, number, here, severity)
        lines.append(f"{paint('gutter', f'{number:>{width}} │')} {text}".rstrip())
        lines += [f"{empty} {row}" for row in _mark_rows(drawn, paint)]
    return lines


def _line(source: Source, number: int, marks, severity: str) -> tuple[str, list[_Mark]]:
    """The printed text of a line and its marks in cells of that text."""
    text = source.line(number)
    start = source.line_starts[number - 1]
    cells = [_cell(c) for c in text]
    edges = [0, *itertools.accumulate(_width(c) for c in cells)]
    drawn = []
    for span, message, primary in marks:
        first = min(span.start - start, len(text))
        last = min(max(span.end - start, first + 1), max(len(text), first + 1))
        left = edges[first]
        right = edges[last] if last < len(edges) else left + 1
        style, char = (severity, "^") if primary else ("label", "-")
        drawn.append(_Mark(left, max(right, left + 1), _visible(message), style, char))
    return _crop("".join(cells), drawn)


def _crop(text: str, marks: list[_Mark]) -> tuple[str, list[_Mark]]:
    """Cuts a long line to a window around its first mark."""
    if len(text) <= MAX_WIDTH:
        return text, marks
    low = max(0, min(m.start for m in marks) - MAX_WIDTH // 3)
    shift = low - 1 if low else 0  # one cell for the ellipsis
    window = ("…" if low else "") + text[low:low + MAX_WIDTH] + ("…" if low + MAX_WIDTH < len(text) else "")
    limit = len(window)
    moved = [
        _Mark(min(m.start - shift, limit), max(min(m.end - shift, limit), min(m.start - shift, limit) + 1),
              m.message, m.style, m.char) for m in marks
    ]
    return window, moved


def _mark_rows(marks: Sequence[_Mark], paint: _Paint) -> list[str]:
    """The underlines; the note of the last mark beside its underline, the others hang below, from the right."""
    marks = sorted(marks, key=lambda m: (m.start, m.end, m.char != "^"))
    row: dict[int, tuple[str, str]] = {}
    for mark in sorted(marks, key=lambda m: m.char == "^"):  # the primary is drawn over the others
        row.update({i: (mark.char, mark.style) for i in range(mark.start, mark.end)})
    last = marks[-1]
    trails = all(m.end <= last.start for m in marks[:-1]) or len(marks) == 1
    rows = [_cells_row(row, paint) + (f" {paint(last.style, last.message)}" if trails and last.message else "")]
    hanging = [m for m in (marks[:-1] if trails else marks) if m.message]
    if hanging:
        rows.append(_pointers(hanging, paint))
    while hanging:
        mark = hanging.pop()
        before = [m for m in hanging if m.start < mark.start]
        padding = _pointers(before, paint)
        gap = mark.start - (before[-1].start + 1 if before else 0)
        rows.append(padding + " " * gap + paint(mark.style, mark.message))
    return rows


def _cells_row(row: dict[int, tuple[str, str]], paint: _Paint) -> str:
    cells = (row.get(i, (" ", "")) for i in range(max(row) + 1))
    runs = itertools.groupby(cells, key=lambda cell: cell[1])
    return "".join(
        paint(style, "".join(c for c, _ in run)) if style else "".join(c for c, _ in run) for style, run in runs
    )


def _pointers(marks: Sequence[_Mark], paint: _Paint) -> str:
    found, at = "", 0
    for mark in marks:
        if mark.start < at:
            continue
        found += " " * (mark.start - at) + paint(mark.style, "│")
        at = mark.start + 1
    return found


def _cell(char: str) -> str:
    """What is printed for a character of a source line: nothing may move the terminal's cursor."""
    if char == "\t":
        return " " * TAB
    return char if char.isprintable() else "�"


def _width(cell: str) -> int:
    if len(cell) > 1:
        return len(cell)
    if unicodedata.combining(cell):
        return 0
    return 2 if unicodedata.east_asian_width(cell) in "WF" else 1


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() else "�" for c in text)
