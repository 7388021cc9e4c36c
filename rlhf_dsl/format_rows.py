"""The lines of a program in canonical form, before they are lined up and broken."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Iterable, Iterator, Optional, Union

from rlhf_dsl import ast
from rlhf_dsl.ast import Span
from rlhf_dsl.format_expr import Printer, names
from rlhf_dsl.scan import first_string
from rlhf_dsl.source import Source

Parts = tuple[Union[str, ast.Expr], ...]


@dataclass(frozen=True)
class Row:
    """One statement.

    head, equals, tail, extra: `param beta`, `=`, `0.05`, `in (0, 1)`; what has no `=` stands in head and tail
    group: neighbours of equal groups line up; None lines up with nothing
    opens: a block follows
    separate: at column 1 a blank line stands on either side
    """

    span: Span
    level: int = 0
    head: str = ""
    equals: str = ""
    tail: Parts = ()
    extra: str = ""
    group: Optional[str] = None
    opens: bool = False
    separate: bool = False


def rows(program: ast.Program, source: Source) -> Iterator[Row]:
    """All statements in order, the docstring first."""
    printer = Printer(source)
    if program.doc:
        yield _doc(source, 0, 0)
    for item in program.items:
        if isinstance(item, ast.Section):
            yield _section_head(item, printer)
            yield from (replace(_row(statement, printer), level=1) for statement in item.body)
        elif isinstance(item, ast.Fn):
            yield from _fn(item, source)
        else:
            yield _row(item, printer)


def _doc(source: Source, start: int, level: int) -> Row:
    """The docstring at or after an offset, in three quotes, its text as it is."""
    span = first_string(source.text, start)
    text = source.slice(span)
    if not text.startswith('"""'):
        text = '"""' + re.sub(r'(?<!\\)"', r'\"', text[1:-1]) + '"""'
    return Row(span, level, tail=(text,), separate=True)


def _section_head(section: ast.Section, printer: Printer) -> Row:
    keywords = f"({', '.join(map(printer.keyword, section.keywords))})" if section.keywords else ""
    return Row(section.head_span, head=f"{section.kind}{keywords}:", opens=True, separate=True)


def _fn(fn: ast.Fn, source: Source) -> Iterator[Row]:
    formals = ", ".join(_with_dims(formal) for formal in fn.formals)
    last = fn.formals[-1] if fn.formals else fn.name
    head_span = Span(fn.span.start, source.text.index(":", last.span.end))
    yield Row(head_span, head=f"fn {fn.name.id}({formals}):", opens=True, separate=True)
    if fn.doc:
        yield _doc(source, head_span.end, 1)
    for bind in fn.body:
        yield replace(_row(bind, Printer(source)), level=1)
    start = source.text.rindex("return", fn.span.start, fn.returns[0].span.start)
    yield Row(Span(start, fn.span.end), 1, "return ", tail=_listed(fn.returns))


def _with_dims(node: Union[ast.Target, ast.Formal, ast.Column]) -> str:
    return node.name.id if node.dims is None else f"{node.name.id}[{names(node.dims)}]"


def _listed(exprs: Iterable[ast.Expr]) -> Parts:
    """Expressions with commas between them."""
    return tuple(part for expr in exprs for part in (", ", expr))[1:]


def _keywords(keywords: Iterable[ast.Keyword]) -> Parts:
    return tuple(part for k in keywords for part in (f", {k.name}=", k.value))


@singledispatch
def _row(node, printer: Printer) -> Row:
    raise TypeError(f"not a statement: {node!r}")


@_row.register
def _(node: ast.Dim, printer: Printer) -> Row:
    return Row(node.span, 0, f"dim {node.name.id}", "<=" if node.ragged else "=", (node.size,), group="dim")


@_row.register
def _(node: ast.Param, printer: Printer) -> Row:
    extra = ""
    if node.range is not None:
        low, high = printer.flat(node.range.low), printer.flat(node.range.high)
        extra = f"in {'(' if node.range.low_open else '['}{low}, {high}{')' if node.range.high_open else ']'}"
    return Row(node.span, 0, f"param {node.name.id}", "=", (node.default,), extra, group="param")


@_row.register
def _(node: ast.State, printer: Printer) -> Row:
    return Row(node.span, 0, f"state {node.name.id}", "=", (node.init, " then ", node.next), group="state")


@_row.register
def _(node: ast.Data, printer: Printer) -> Row:
    columns = (_with_dims(c) + (f": {c.elem}" if c.elem else "") for c in node.columns)
    after = f" after {node.after.id}" if node.after else ""
    return Row(node.span, 0, f"data {', '.join(columns)}{after}", "=", (node.source,))


@_row.register
def _(node: ast.Model, printer: Printer) -> Row:
    tail: Parts = (f"{node.role.id}(", node.source, ")")
    if node.optimizer is not None:
        tail += (" trained by ", node.optimizer)
    return Row(node.span, 0, f"model {node.name.id}", "=", tail, group="model")


@_row.register
def _(node: ast.Import, printer: Printer) -> Row:
    return Row(node.span, 0, f"from {node.module} import {names(node.names)}")


@_row.register
def _(node: ast.Bind, printer: Printer) -> Row:
    return Row(node.span, 0, ", ".join(map(_with_dims, node.targets)), "=", (node.value,), group="bind")


@_row.register
def _(node: ast.Metric, printer: Printer) -> Row:
    return Row(node.span, 0, f"metric {node.name.id}", "=", (node.value,), group="metric")


@_row.register
def _(node: ast.Setting, printer: Printer) -> Row:
    return Row(node.span, 0, node.name.id, "=", (node.value,), group="setting")


@_row.register
def _(node: ast.Keep, printer: Printer) -> Row:
    return Row(node.span, 0, "keep if ", tail=(node.condition, *_keywords(node.keywords)))


@_row.register
def _(node: ast.Train, printer: Printer) -> Row:
    return Row(node.span, 0, f"train {node.model.id} to {node.direction} ", tail=(node.objective,))


@_row.register
def _(node: ast.Constraint, printer: Printer) -> Row:
    settings = (*_listed(node.items), *_keywords(node.keywords))
    if not node.items:
        settings = (settings[0].removeprefix(", "), *settings[1:])
    return Row(node.span, 0, f"{'.'.join(part.id for part in node.target)}: ", tail=settings)


@_row.register
def _(node: ast.Every, printer: Printer) -> Row:
    return Row(node.span, 0, f"every {printer.flat(node.period)}: ", tail=_listed(node.actions))
