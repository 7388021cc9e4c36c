"""`name=value` where names and values are fixed: section heads, `run:`, `plan:`."""

from __future__ import annotations

from typing import Any, Callable

from rlhf_dsl import ast
from rlhf_dsl.checking import constants
from rlhf_dsl.checking.constants import is_count
from rlhf_dsl.checking.context import Context
from rlhf_dsl.checking.infer import infer
from rlhf_dsl.diagnostics import did_you_mean

Rule = tuple[str, Callable[[Any], bool]]
AT_LEAST_0: Rule = ("a whole number of at least 0", lambda v: is_count(v) and v >= 0)
AT_LEAST_1: Rule = ("a whole number of at least 1", lambda v: is_count(v) and v >= 1)
TRUE_OR_FALSE: Rule = ("true or false", lambda v: isinstance(v, bool))
ZERO_OR_ONE: Rule = ("0 or 1", lambda v: is_count(v) and v in (0, 1))


def setting(cx: Context, name: str, node: ast.Expr, rule: Rule) -> Any:
    """The constant value of a setting that obeys its rule, or None with a report."""
    value = constants.constant(cx, node, infer(cx, node))
    if value is None:
        return None
    wanted, test = rule
    if not test(value):
        cx.error("E0507", node.span, name=name, rule=wanted, value=value)
        return None
    return value


def keyword_settings(cx: Context, where: str, keywords, rules: dict[str, Rule]) -> dict[str, Any]:
    """The good ones of a list of keywords; reports the others."""
    found: dict[str, Any] = {}
    for keyword in keywords:
        name, span = keyword.name, keyword.name_span
        if known(cx, where, name, span, rules) and once(cx, name, span, found):
            found[name] = setting(cx, name, keyword.value, rules[name])
    return {name: value for name, value in found.items() if value is not None}


def known(cx: Context, where: str, name: str, span: ast.Span, rules) -> bool:
    if name not in rules:
        cx.error("E0506", span, where=where, name=name, help=did_you_mean(name, rules) or "it takes none")
    return name in rules


def once(cx: Context, name: str, span: ast.Span, found: dict) -> bool:
    if name in found:
        cx.error("E0508", span, name=name, other=name, help="give it once")
    return name not in found
