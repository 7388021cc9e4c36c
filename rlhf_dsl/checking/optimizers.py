"""`adamw(lr=cosine(1e-4, warmup=10))`: optimizers and learning-rate schedules."""

from __future__ import annotations

from typing import Any, Callable, Optional

from rlhf_dsl import ast
from rlhf_dsl.checking import constants
from rlhf_dsl.checking.calls import known_keywords
from rlhf_dsl.checking.constants import is_count, is_number
from rlhf_dsl.checking.context import Context
from rlhf_dsl.checking.infer import infer
from rlhf_dsl.diagnostics import did_you_mean
from rlhf_dsl.typed import Optimizer, Schedule

SCHEDULES = ("constant", "linear", "cosine")
SCHEDULE_OPTIONS = ("warmup", "steps", "low")

Rule = tuple[str, Callable[[Any], bool]]
_NOT_NEGATIVE: Rule = ("a number of at least 0", lambda v: is_number(v) and v >= 0)
_POSITIVE: Rule = ("a number above 0", lambda v: is_number(v) and v > 0)
_COUNT: Rule = ("a whole number of at least 0", lambda v: is_count(v) and v >= 0)
_BETAS: Rule = ("a list of two numbers in [0, 1)",
                lambda v: isinstance(v, tuple) and len(v) == 2 and all(is_number(x) and 0 <= x < 1 for x in v))
ADAMW: dict[str, Rule] = {
    "lr": _NOT_NEGATIVE, "betas": _BETAS, "eps": _POSITIVE, "weight_decay": _NOT_NEGATIVE, "max_grad_norm": _POSITIVE,
}
SCHEDULE: dict[str, Rule] = {"warmup": _COUNT, "steps": _COUNT, "low": _NOT_NEGATIVE}


def optimizer(cx: Context, node: ast.Call) -> Optional[Optimizer]:
    """What `trained by` says, or None with a report."""
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name != "adamw":
        cx.error("E0410", node.func.span, name=name or "this", help=did_you_mean(name, ["adamw"]))
        return None
    if node.args or not any(k.name == "lr" for k in node.keywords):
        cx.error("E0411", node.span)
        return None
    if not known_keywords(cx, node, "adamw", tuple(ADAMW)):
        return None
    values = {k.name: _schedule(cx, k.value) if k.name == "lr" else _value(cx, k.value, k.name, ADAMW[k.name])
              for k in node.keywords}
    return None if any(v is None for v in values.values()) else Optimizer(**values)


def _schedule(cx: Context, node: ast.Expr) -> Optional[Schedule]:
    """A number, or `constant`, `linear`, `cosine` of a number."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        lr = _value(cx, node, "lr", ADAMW["lr"])
        return None if lr is None else Schedule("constant", lr)
    kind = node.func.id
    if kind not in SCHEDULES:
        cx.error("E0412", node.func.span, name=kind, help=did_you_mean(kind, SCHEDULES))
        return None
    if len(node.args) != 1:
        cx.error("E0109", node.span, name=kind, expected="1 argument", given=len(node.args),
                 help=f"it is `{kind}(lr, warmup=, steps=, low=)`")
        return None
    allowed = SCHEDULE_OPTIONS if kind != "constant" else ("warmup",)
    if not known_keywords(cx, node, kind, allowed):
        return None
    lr = _value(cx, node.args[0], "lr", ADAMW["lr"])
    options = {k.name: _value(cx, k.value, k.name, SCHEDULE[k.name]) for k in node.keywords}
    return None if lr is None or None in options.values() else Schedule(kind, lr, **options)


def _value(cx: Context, node: ast.Expr, name: str, rule: Rule) -> Any:
    if isinstance(node, ast.List):
        value: Any = tuple(constants.constant(cx, item, infer(cx, item)) for item in node.items)
    else:
        value = constants.constant(cx, node, infer(cx, node))
    if value is None or isinstance(value, tuple) and None in value:
        return None
    wanted, test = rule
    if not test(value):
        cx.error("E0413", node.span, option=name, rule=wanted, value=value)
        return None
    if isinstance(value, tuple):
        return tuple(map(float, value))
    return value if rule is _COUNT else float(value)
