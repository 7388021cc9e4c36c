"""Values known before the run: numbers, booleans, strings and arithmetic over them, params and dims."""

from __future__ import annotations

import math
import operator
from typing import Any, Optional

from rlhf_dsl import ast
from rlhf_dsl.checking.context import Context
from rlhf_dsl.typed import Expr

LARGEST_INTEGER = 2 ** 63 - 1


def _power(x: Any, y: Any) -> Any:
    """In floating point, so that `10 ** 10 ** 10` is an overflow and not a number of ten thousand million digits."""
    result = float(x) ** float(y)
    whole = isinstance(x, int) and isinstance(y, int) and y >= 0
    return x ** y if whole and abs(result) < LARGEST_INTEGER else result


_FUNCTIONS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "pow": _power,
    "neg": operator.neg, "exp": math.exp, "log": math.log, "sqrt": math.sqrt, "abs": abs,
    "minimum": min, "maximum": max, "clip": lambda x, low, high: min(max(x, low), high),
    "sign": lambda x: (x > 0) - (x < 0),
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "and": lambda x, y: x and y, "or": lambda x, y: x or y, "not": operator.not_,
    "where": lambda c, x, y: x if c else y,
    "stop": lambda x: x, "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
}


class NotConstant(Exception):
    """An expression whose value is not known before the run."""


def value(expr: Expr) -> Any:
    """The Python value of a constant expression. Raises NotConstant, also where it has none (a division by 0)."""
    if expr.op == "const":
        return expr.attr("value")
    if expr.op not in _FUNCTIONS:
        raise NotConstant
    try:
        result = _FUNCTIONS[expr.op](*map(value, expr.args))
    except (ArithmeticError, ValueError, TypeError) as error:
        raise NotConstant from error
    if isinstance(result, complex) or isinstance(result, float) and not math.isfinite(result):
        raise NotConstant
    if isinstance(result, int) and abs(result) > LARGEST_INTEGER:
        raise NotConstant
    return result


def constant(cx: Context, node: ast.Expr, expr: Optional[Expr]) -> Any:
    """The value of an inferred expression, or None with a report; None also where `expr` had an error."""
    if expr is None:
        return None
    try:
        return value(expr)
    except NotConstant:
        cx.error("E0504", node.span)
        return None


def is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)
