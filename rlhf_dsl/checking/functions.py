"""Functions of the language are expanded where they are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Optional

from rlhf_dsl import ast
from rlhf_dsl.checking.broadcast import Operand
from rlhf_dsl.checking.context import Context, Frame
from rlhf_dsl.checking.scopes import Binding, Scope
from rlhf_dsl.diagnostics import Label, did_you_mean
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Expr

Infer = Callable[[Context, ast.Expr], Optional[Expr]]
InferAll = Callable[[Context, ast.Bind], None]


@dataclass(frozen=True)
class Function:
    """`scope`: where it is defined, which its body sees; `source`: the prelude's, None for the user's."""

    node: ast.Fn
    scope: Scope
    source: Optional[Source]


def expand(cx: Context, node: ast.Call, function: Function, infer: Infer, bind: InferAll) -> list[Optional[Expr]]:
    """The returned values of a call, one each `return` expression; None for each that has an error."""
    fn = function.node
    failed = [None] * len(fn.returns)
    if node.subscript is not None:
        cx.error("E0114", node.subscript.span, name=fn.name.id)
        return failed
    args = _arguments(cx, node, fn)
    if args is None:
        return failed
    if any(frame.name == fn.name.id for frame in cx.frames):
        cx.error("E0108", node.span, name=fn.name.id)
        return failed
    values = {name: (arg, infer(cx, arg)) for name, arg in args.items()}
    dims = _dim_vars(cx, fn, values)
    if dims is None:
        return failed
    # Equal calls give equal values; without this, functions that call each other twice take exponential time.
    key = (id(fn), tuple(id(expr) for _, expr in values.values()), tuple(dims.items()), cx.phase, cx.keep, cx.changed)
    if key not in cx.tables.expanded:
        made = cx.tables.next_id
        results = _expanded(cx, node, function, values, dims, infer, bind)
        if made != cx.tables.next_id or None in results:  # a Python op or a response in it: each call is one of its own
            return results
        cx.tables.expanded[key] = results
    return list(cx.tables.expanded[key])


def _expanded(cx: Context, node: ast.Call, function: Function, values: dict[str, tuple], dims: dict[str, str],
              infer: Infer, bind: InferAll) -> list[Optional[Expr]]:
    fn = function.node
    scope = Scope(parent=function.scope)
    for formal in fn.formals:
        name = formal.name.id
        scope.names[name] = Binding("value", name, formal.span, values[name][1])
    frame = Frame(fn.name.id, node.span, function.source)
    inner = cx.at(scope=scope, dim_vars=dims, frames=(*cx.frames, frame))
    for line in fn.body:
        bind(inner, line)
    return [infer(inner, value) for value in fn.returns]


def _arguments(cx: Context, node: ast.Call, fn: ast.Fn) -> Optional[dict[str, ast.Expr]]:
    """Each formal's argument, by position and keyword."""
    formals = [f.name.id for f in fn.formals]
    args = dict(zip(formals, node.args))
    for keyword in node.keywords:
        if keyword.name not in formals:
            help = did_you_mean(keyword.name, formals) or "it takes none"
            cx.error("E0110", keyword.name_span, name=fn.name.id, keyword=keyword.name, help=help)
            return None
        if keyword.name in args:
            cx.error("E0110", keyword.name_span, name=fn.name.id, keyword=keyword.name, help="give it once")
            return None
        args[keyword.name] = keyword.value
    given = len(node.args) + len(node.keywords)
    if given != len(formals):
        signature = f"{fn.name.id}({', '.join(formals)})"
        expected = f"{len(formals)} argument{'s' * (len(formals) != 1)}"
        cx.error("E0109", node.span, name=fn.name.id, expected=expected, given=given, help=f"it is `{signature}`")
        return None
    return args


def _dim_vars(cx: Context, fn: ast.Fn, values: dict[str, tuple]) -> Optional[dict[str, str]]:
    """What the dims of the formals stand for: the same name first, else the argument's only ragged dim."""
    means: dict[str, tuple[str, Operand]] = {}
    for formal in fn.formals:
        node, expr = values[formal.name.id]
        for name in formal.dims or () if expr is not None else ():
            found = _stands_for(cx, name.id, expr)
            if found is None:
                words = dict(name=fn.name.id, formal=formal.name.id, dim=name.id, type=expr.type)
                cx.error("E0217", node.span, [Label(node.span, str(expr.type))], **words)
                return None
            known, first = means.setdefault(name.id, (found, (node, expr)))
            if known != found:
                labels = [Label(first[0].span, str(first[1].type)), Label(node.span, str(expr.type))]
                cx.error("E0218", node.span, labels, name=fn.name.id, dim=name.id, first=known, second=found)
                return None
    return {name: found for name, (found, _) in means.items()}


def _stands_for(cx: Context, name: str, expr: Expr) -> Optional[str]:
    if name in expr.type.dims:
        return name
    ragged = cx.ragged(expr.type.dims)
    return ragged[0] if len(ragged) == 1 else None
