"""Walking and printing of checked expressions, which are graphs with shared nodes."""

from __future__ import annotations

from typing import Callable, Iterator

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


def call_text(expr: Expr) -> str:
    """A model call or Python op as the formatter prints it: `actor.logprobs(y)`."""
    inside = ", ".join(brief(arg) for arg in expr.args)
    if expr.op != "call":
        return f"{expr.attr('name')}({inside})"
    temperature = expr.attr("temperature")
    option = "" if temperature is None else f", temperature={_number(temperature)}"
    return f"{expr.attr('model')}.{expr.attr('operation')}({inside}{option})"


_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
          "gt": ">", "ge": ">=", "and": "and", "or": "or"}


def brief(expr: Expr) -> str:
    """An expression in the syntax of the language, with the primitives' names; for reading, not for parsing."""
    if expr.op == "const":
        return _number(expr.attr("value"))
    if expr.op in ("data", "generate", "reply", "state"):
        return response_name(expr)
    if expr.op == "next_state":
        return f"next({expr.attr('name')})"
    if expr.op in ("call", "pyop"):
        return call_text(expr)
    if expr.op == "field":
        return f"{brief(expr.args[0])}.{expr.attr('field')}"
    if expr.op in _INFIX and len(expr.args) == 2:
        return f"({brief(expr.args[0])} {_INFIX[expr.op]} {brief(expr.args[1])})"
    if expr.op in ("neg", "not"):
        return f"({'-' if expr.op == 'neg' else 'not '}{brief(expr.args[0])})"
    over = expr.attr("over")
    return f"{expr.op}{'[' + ', '.join(over) + ']' if over else ''}({', '.join(map(brief, expr.args))})"


def _number(value) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, (float, str)) else str(value)


def call_temperature(call: Expr) -> float:
    """The temperature of a call's distribution: its own, else that of its response; 0 means unscaled, which is 1."""
    own = call.attr("temperature")
    sampled = call.args[0].attr("temperature") if call.args[0].op == "generate" else 1.0
    return float((sampled if own is None else own) or 1.0)


def is_root_reduction(expr: Expr, roots: frozenset[str]) -> bool:
    """A reduction over rows of data, whose value depends on all ranks' rows."""
    return expr.op in REDUCTIONS and any(dim in roots for dim in expr.attr("over", ()))
