"""Elementwise operations: elements, and broadcasting by the names of dims."""

from __future__ import annotations

from typing import Iterable, Optional

from rlhf_dsl import ast
from rlhf_dsl.checking.context import Context
from rlhf_dsl.diagnostics import Label
from rlhf_dsl.typed import Expr, Type

Operand = tuple[ast.Expr, Expr]
NUMBERS = ("f32", "bool")
_HELP = {
    "tokens": "a response is not a number: take a value of it, such as `actor.logprobs(y)` or `reward.score(y)`",
    "text": "text has no arithmetic: a Python op turns it into numbers",
}


def expect(cx: Context, operand: Operand, *elements: str) -> bool:
    """Whether the operand's element is one of `elements`; reports if not."""
    node, expr = operand
    if expr.type.elem in elements:
        return True
    wanted = "a condition (`bool`)" if elements == ("bool",) else "numbers"
    cx.error("E0211", node.span, wanted=wanted, found=expr.type,
             help=_HELP.get(expr.type.elem) or "compare it with a number, as in `x > 0`")
    return False


def broadcast(cx: Context, operands: Iterable[Operand], node: ast.Expr) -> Optional[tuple[str, ...]]:
    """The dims of an elementwise result: those of the operand whose dims contain all others'."""
    operands = list(operands)
    widest = max(operands, key=lambda o: len(o[1].type.dims))
    for other in operands:
        if not set(other[1].type.dims) <= set(widest[1].type.dims):
            first, second = sorted((widest, other), key=lambda o: o[0].span)
            _report(cx, first, second, node)
            return None
    return widest[1].type.dims


def _report(cx: Context, first: Operand, second: Operand, node: ast.Expr) -> None:
    left, right = first[1].type, second[1].type
    labels = [Label(first[0].span, str(left)), Label(second[0].span, str(right))]
    extra = [d for d in right.dims if d not in left.dims]
    cx.error("E0202", node.span, labels, left=left, right=right, dim=extra[-1])


def elementwise(cx: Context, op: str, operands: Iterable[Operand], node: ast.Expr, elem: str = "f32") -> Optional[Expr]:
    """`op` of numbers, element by element."""
    operands = list(operands)
    if not all([expect(cx, operand, *NUMBERS) for operand in operands]):
        return None
    dims = broadcast(cx, operands, node)
    return None if dims is None else cx.expr(op, [e for _, e in operands], Type(elem, dims), node)


def logical(cx: Context, op: str, operands: Iterable[Operand], node: ast.Expr) -> Optional[Expr]:
    """`and`, `or`, `not` of conditions."""
    operands = list(operands)
    if not all([expect(cx, operand, "bool") for operand in operands]):
        return None
    dims = broadcast(cx, operands, node)
    return None if dims is None else cx.expr(op, [e for _, e in operands], Type("bool", dims), node)


def choose(cx: Context, operands: list[Operand], node: ast.Expr) -> Optional[Expr]:
    """`where(c, x, y)`."""
    checks = [expect(cx, operands[0], "bool"), *(expect(cx, operand, *NUMBERS) for operand in operands[1:])]
    if not all(checks):
        return None
    dims = broadcast(cx, operands, node)
    elem = "bool" if all(e.type.elem == "bool" for _, e in operands) else "f32"
    return None if dims is None else cx.expr("where", [e for _, e in operands], Type(elem, dims), node)
