"""Walking and printing of checked expressions, which are graphs with shared nodes."""

from __future__ import annotations

from types import MappingProxyType
from typing import Callable, Iterator, Mapping

from rlhf_dsl.typed import Expr

REDUCTIONS = frozenset(("sum", "mean", "std", "max", "min", "argmax", "rank", "quantile", "count", "any", "all"))


def walk(*roots: Expr, stop: Callable[[Expr], bool] = lambda e: False) -> Iterator[Expr]:
    """Every expression once, arguments first; does not descend into one where `stop` holds."""
    seen: set[int] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        expr, ready = stack.pop()
        if ready:
            yield expr
        elif id(expr) not in seen:
            seen.add(id(expr))
            stack.append((expr, True))
            stack.extend((arg, False) for arg in reversed(() if stop(expr) else expr.args))


def contains(root: Expr, test: Callable[[Expr], bool]) -> bool:
    return any(test(e) for e in walk(root))


def response_name(expr: Expr) -> str:
    """The name of a response: of `generate`, `reply` or a data column."""
    return expr.attr("column") or expr.attr("name") or expr.op


DEPTH = 12  # of printed expressions; shared parts would print over and over
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
          "gt": ">", "ge": ">=", "and": "and", "or": "or"}


def brief(expr: Expr, known: Mapping[Expr, str] = MappingProxyType({}), depth: int = DEPTH) -> str:
    """An expression in the syntax of the language, with the primitives' names; for reading, not for parsing.

    known: names to print for expressions inside; below `depth` levels "..." stands for the rest
    """
    def inner(arg: Expr) -> str:
        return known[arg] if arg in known else brief(arg, known, depth - 1)

    if depth == 0:
        return "..."
    if expr.op == "const":
        return _number(expr.attr("value"))
    if expr.op in ("data", "generate", "reply", "state"):
        return response_name(expr)
    if expr.op == "next_state":
        return f"next({expr.attr('name')})"
    if expr.op == "call":
        return _call(expr, inner)
    if expr.op == "pyop":
        return f"{expr.attr('name')}({', '.join(map(inner, expr.args))})"
    if expr.op == "field":
        return f"{inner(expr.args[0])}.{expr.attr('field')}"
    if expr.op in _INFIX and len(expr.args) == 2:
        return f"({inner(expr.args[0])} {_INFIX[expr.op]} {inner(expr.args[1])})"
    if expr.op in ("neg", "not"):
        return f"({'-' if expr.op == 'neg' else 'not '}{inner(expr.args[0])})"
    over = expr.attr("over")
    return f"{expr.op}{'[' + ', '.join(over) + ']' if over else ''}({', '.join(map(inner, expr.args))})"


def _call(expr: Expr, inner: Callable[[Expr], str]) -> str:
    """A model call as the formatter prints it: `actor.logprobs(y)`."""
    temperature = expr.attr("temperature")
    option = "" if temperature is None else f", temperature={_number(temperature)}"
    return f"{expr.attr('model')}.{expr.attr('operation')}({', '.join(map(inner, expr.args))}{option})"


def _number(value) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def call_temperature(call: Expr) -> float:
    """The temperature of a call's distribution: its own, else that of its response; 0 means unscaled, which is 1."""
    own = call.attr("temperature")
    sampled = call.args[0].attr("temperature") if call.args[0].op == "generate" else 1.0
    return float((sampled if own is None else own) or 1.0)


def is_root_reduction(expr: Expr, roots: frozenset[str]) -> bool:
    """A reduction over rows of data, whose value depends on all ranks' rows."""
    return expr.op in REDUCTIONS and any(dim in roots for dim in expr.attr("over", ()))
