"""Reductions over named dims, and operations that walk along a ragged dim."""

from __future__ import annotations

from typing import Any, Optional

from rlhf_dsl import ast
from rlhf_dsl.checking.broadcast import NUMBERS, Operand, expect
from rlhf_dsl.checking.context import Context
from rlhf_dsl.diagnostics import Label, did_you_mean, listing
from rlhf_dsl.typed import Expr, Type, walk

ANSWERS = {"any": "bool", "all": "bool"}


def over_dims(cx: Context, subscript: ast.Subscript) -> Optional[tuple[str, ...]]:
    """The dims in brackets, or None with a report."""
    dims = [cx.dim(name) for name in subscript.dims]
    return None if None in dims else tuple(dims)


def reduce(cx: Context, op: str, operand: Operand, over: Optional[tuple[str, ...]], node: ast.Call,
           where: Optional[Operand] = None, quantile: Optional[Operand] = None, **attrs) -> Optional[Expr]:
    """`op[over](x, where=)`; `over` None reduces every dim."""
    _, x = operand
    elements = ("bool",) if op in ANSWERS else NUMBERS
    if not expect(cx, operand, *elements) or where and not expect(cx, where, "bool"):
        return None
    over = x.type.dims if over is None else cx.order(over)
    if not _reducible(cx, op, operand, over, node) or where and not _mask_fits(cx, operand, where):
        return None
    args = [e for _, e in filter(None, (operand, quantile, where))]
    dims = x.type.dims if op == "rank" else tuple(d for d in x.type.dims if d not in over)
    return cx.expr(op, args, Type(ANSWERS.get(op, "f32"), dims), node, over=over, **_place(cx, over), **attrs)


def _place(cx: Context, over: tuple[str, ...]) -> dict[str, Any]:
    """Over root dims it counts where a reduction stands: over the iteration's rows, or over a mini-batch's."""
    return {"keep": cx.keep, "phase": cx.phase if cx.roots(over) else ""}


def _reducible(cx: Context, op: str, operand: Operand, over: tuple[str, ...], node: ast.Call) -> bool:
    argument, x = operand
    absent = [d for d in over if d not in x.type.dims]
    if absent:
        place = node.subscript.span if node.subscript else node.span
        cx.error("E0203", place, [Label(argument.span, str(x.type))], dim=absent[0], type=x.type,
                 help=did_you_mean(absent[0], x.type.dims) if x.type.dims else None)
        return False
    remaining = [d for d in cx.ragged(x.type.dims) if d not in over]
    leading = [d for d in over if remaining and d in cx.tables.dims[remaining[0]].lead]
    if leading:
        cx.error("E0210", node.span, [Label(argument.span, str(x.type))], dim=leading[0], ragged=remaining[0], op=op)
        return False
    if op == "argmax" and len(over) != 1:
        help = " or ".join(f"`argmax[{d}](...)`" for d in x.type.dims) if over else "leave it out: this is one value"
        cx.error("E0212", node.span, name=op, wanted="one dim", found=listing(over) or "none", help=help)
        return False
    return True


def _mask_fits(cx: Context, operand: Operand, where: Operand) -> bool:
    extra = [d for d in where[1].type.dims if d not in operand[1].type.dims]
    if extra:
        labels = [Label(operand[0].span, str(operand[1].type)), Label(where[0].span, str(where[1].type))]
        cx.error("E0213", where[0].span, labels, dim=extra[0])
    return not extra


# ---- along a ragged dim ---------------------------------------------------------------------------

def along(cx: Context, op: str, operands: list[Operand], node: ast.Call) -> Optional[Expr]:
    """`next[t](x)`, `togo[t](x, d)`, `at_end[t](s)`, `length[t](y)`."""
    dim = _ragged_dim(cx, op, node)
    if dim is None:
        return None
    if op == "length":
        return _length(cx, operands[0], dim, node)
    if not all([expect(cx, operand, *NUMBERS) for operand in operands]):
        return None
    return _at_end(cx, operands[0], dim, node) if op == "at_end" else _walk(cx, op, operands, dim, node)


def _ragged_dim(cx: Context, op: str, node: ast.Call) -> Optional[str]:
    names = node.subscript.dims if node.subscript else ()
    if len(names) != 1:
        found = listing(n.id for n in names) or "none"
        cx.error("E0212", (node.subscript or node).span, name=op, wanted="one ragged dim", found=found)
        return None
    dim = cx.dim(names[0])
    if dim is None:
        return None
    if not cx.tables.dims[dim].ragged:
        cx.error("E0212", names[0].span, [Label(cx.tables.dims[dim].span, "fixed")], name=op, wanted="one ragged dim",
                 found=f"`{dim}`")
        return None
    return dim


def _walk(cx: Context, op: str, operands: list[Operand], dim: str, node: ast.Call) -> Optional[Expr]:
    argument, x = operands[0]
    if dim not in x.type.dims:
        cx.error("E0203", node.subscript.span, [Label(argument.span, str(x.type))], dim=dim, type=x.type)
        return None
    for other, d in operands[1:]:
        if not set(d.type.dims) <= set(x.type.dims):
            labels = [Label(argument.span, str(x.type)), Label(other.span, str(d.type))]
            extra = next(name for name in d.type.dims if name not in x.type.dims)
            cx.error("E0202", node.span, labels, left=x.type, right=d.type, dim=extra)
            return None
    return cx.expr(op, [e for _, e in operands], Type("f32", x.type.dims), node, over=(dim,))


def _at_end(cx: Context, operand: Operand, dim: str, node: ast.Call) -> Optional[Expr]:
    argument, s = operand
    response = cx.tables.responses.get(dim)
    if response is None:
        cx.error("E0219", node.subscript.span, dim=dim)
        return None
    lead = cx.tables.dims[dim].lead
    extra = [d for d in s.type.dims if d not in lead]
    if extra:
        labels = [Label(argument.span, str(s.type)), Label(response.span, f"`{dim}` varies over {', '.join(lead)}")]
        cx.error("E0220", argument.span, labels, dim=dim, extra=extra[0])
        return None
    args = [s] if response.expr in walk(s) else [s, _lengths(cx, response.expr, dim, node)]
    return cx.expr("at_end", args, Type("f32", (*lead, dim)), node, over=(dim,))


def _length(cx: Context, operand: Operand, dim: str, node: ast.Call) -> Optional[Expr]:
    argument, x = operand
    if dim not in x.type.dims:
        cx.error("E0203", node.subscript.span, [Label(argument.span, str(x.type))], dim=dim, type=x.type)
        return None
    return _lengths(cx, cx.tables.responses[dim].expr, dim, node)


def _lengths(cx: Context, response: Expr, dim: str, node: ast.Call) -> Expr:
    return cx.expr("length", [response], Type("f32", cx.tables.dims[dim].lead), node, over=(dim,))
