"""`data q[b], good[b, t] after q = jsonl("f.jsonl", "prompt", "good")`."""

from __future__ import annotations

import dataclasses
from typing import Iterable, Optional

from rlhf_dsl import ast
from rlhf_dsl.checking import constants
from rlhf_dsl.checking.context import Context, Response
from rlhf_dsl.checking.infer import infer
from rlhf_dsl.checking.responses import introduce
from rlhf_dsl.checking.scopes import Binding
from rlhf_dsl.diagnostics import Label, did_you_mean
from rlhf_dsl.typed import Column, Data, Type

SOURCES = ("jsonl", "parquet", "hf")
ENTRY_POINTS = "rlflow.data"
ELEMENTS = ("text", "bool", "f32")


def root_dims(program: ast.Program) -> dict[str, ast.Span]:
    """The first dim of each data declaration, top-level or in `eval:`, with its first place."""
    sections = [item for item in program.items if isinstance(item, ast.Section)]
    nodes = [*program.items, *(line for section in sections for line in section.body)]
    names = [n.columns[0].dims[0] for n in nodes if isinstance(n, ast.Data) and n.columns and n.columns[0].dims]
    return {name.id: name.span for name in reversed(names)}


def data(cx: Context, node: ast.Data) -> None:
    """Binds the columns and introduces their ragged dims."""
    root = cx.dim(node.columns[0].dims[0])
    if root is not None:
        _claim(cx, node, root)
    columns = [_column(cx, node, column, root) for column in node.columns]
    source = _source(cx, node)
    known = [c for c in columns if c is not None]
    after = _after(cx, node, known)
    if source is None:
        return
    kind, path, fields = source
    made = [dataclasses.replace(c, field=f, after=after if c.response else "") for c, f in zip(columns, fields) if c]
    cx.tables.columns.update({c.name: c for c in made})
    if root is not None and len(made) == len(columns):
        cx.tables.data.append(Data(root, kind, path, tuple(made), node.span))


def _claim(cx: Context, node: ast.Data, root: str) -> None:
    """A root dim counts the rows of one source."""
    place = node.columns[0].dims[0].span
    if cx.tables.dims[root].ragged:
        cx.error("E0216", place, name=node.columns[0].name.id, reason=f"its first dim `{root}` is ragged")
    other = next((d for d in cx.tables.data if d.root == root), None)
    if other is not None:
        cx.error("E0207", place, [Label(other.span, "its first source")], dim=root)


def _column(cx: Context, node: ast.Data, column: ast.Column, root: Optional[str]) -> Optional[Column]:
    name = column.name.id
    cx.define(Binding("column", name, column.name.span))
    dims = [cx.dim(d) for d in column.dims]
    if root is None or None in dims:
        return None
    reason = _wrong_dims(cx, dims, root)
    if reason:
        cx.error("E0216", column.span, name=name, reason=reason)
        return None
    elem = column.elem or "text"
    response = len(dims) == 2
    if elem not in ELEMENTS and not (response and elem == "tokens"):
        cx.error("E0222", column.span, name=name, elem=elem, help=did_you_mean(elem, ELEMENTS))
        return None
    if response and column.elem not in ("", "tokens"):
        reason = "a column with a ragged dim is a response, its elements are tokens"
        cx.error("E0216", column.span, name=name, reason=reason)
        return None
    made = Column(name, name, Type("tokens" if response else elem, tuple(dims)), response, "", "", column.span)
    cx.tables.columns[name] = made
    return _response(cx, made) if response else made


def _wrong_dims(cx: Context, dims: list[str], root: str) -> str:
    if dims[0] != root:
        return f"all columns of a source start with the same dim, here `{root}`"
    if len(dims) > 2 or len(dims) == 2 and not cx.tables.dims[dims[1]].ragged:
        return "it may have one root dim and one ragged dim"
    return ""


def _response(cx: Context, column: Column) -> Optional[Column]:
    ragged = column.type.dims[1]
    owner = cx.tables.responses.get(ragged)
    if owner is not None:
        cx.error("E0206", column.span, [Label(owner.span, f"`{ragged}` is the length of `{owner.name}`")], dim=ragged,
                 response=owner.name)
        return None
    expr = cx.tables.interner.expr("data", (), column.type, frozenset(), column.span, column=column.name)
    introduce(cx, Response(column.name, "data", "", expr, column.span), ragged, column.type.dims[:1])
    return column


def _after(cx: Context, node: ast.Data, columns: Iterable[Column]) -> str:
    """The prompt column of the responses of this line."""
    if node.after is None:
        return ""
    texts = [c.name for c in columns if c.type.elem == "text"]
    if node.after.id not in texts:
        cx.error("E0312", node.after.span, name=node.after.id, help=did_you_mean(node.after.id, texts))
        return ""
    if not any(c.response for c in columns):
        cx.error("E0313", node.after.span, name=node.after.id)
    cx.scope.names[node.after.id].used = True
    return node.after.id


def _source(cx: Context, node: ast.Data) -> Optional[tuple[str, str, list[str]]]:
    """(kind, path, field of each column) of `jsonl("f.jsonl", "prompt", "answer")`."""
    call = node.source
    kind = call.func.id if isinstance(call.func, ast.Name) else ""
    if kind not in SOURCES and kind not in _installed():
        cx.error("E0310", call.func.span, name=kind, help=did_you_mean(kind, [*SOURCES, *_installed()]))
        return None
    if call.keywords:
        cx.error("E0110", call.keywords[0].name_span, name=kind, keyword=call.keywords[0].name, help="it takes none")
        return None
    texts = [constants.constant(cx, arg, infer(cx, arg)) for arg in call.args]
    if None in texts:
        return None
    wrong = next((arg for arg, text in zip(call.args, texts) if not isinstance(text, str)), None)
    count = len(node.columns)
    if wrong is not None or len(texts) != count + 1:
        place = wrong.span if wrong is not None else call.span
        cx.error("E0311", place, [Label(node.columns[0].span.to(node.columns[-1].span), f"{count} declared")],
                 name=kind, count=count, plural="" if count == 1 else "s")
        return None
    return kind, texts[0], texts[1:]


def _installed() -> tuple[str, ...]:
    """Kinds of sources that installed packages give; their code is not loaded."""
    from importlib import metadata  # slow to import, and few programs come here

    return tuple(point.name for point in metadata.entry_points(group=ENTRY_POINTS))
