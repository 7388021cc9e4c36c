"""`run:`: how long, from which seed, and what happens every so many iterations."""

from __future__ import annotations

from typing import Any, Optional

from rlhf_dsl import ast
from rlhf_dsl.checking import constants
from rlhf_dsl.checking.context import Context
from rlhf_dsl.checking.infer import infer
from rlhf_dsl.checking.names import lookup
from rlhf_dsl.checking.overrides import override
from rlhf_dsl.checking.settings import AT_LEAST_0, AT_LEAST_1, ZERO_OR_ONE, keyword_settings, known, once, setting
from rlhf_dsl.diagnostics import Label, did_you_mean
from rlhf_dsl.typed import Action, Run

SETTINGS = {"steps": AT_LEAST_1, "epochs": AT_LEAST_1, "seed": AT_LEAST_0, "lag": ZERO_OR_ONE}
# action -> what it takes
ACTIONS = {"save": ("model",), "copy": ("model", "model"), "ema": ("model", "model", "decay")}


def run(cx: Context, section: Optional[ast.Section]) -> Run:
    """The section's settings, and those of the command line over them."""
    body = section.body if section else ()
    if section is not None:
        keyword_settings(cx, "run", section.keywords, {})
    found, places = _written(cx, body)
    found.update(_overridden(cx, found))
    if "steps" in found and "epochs" in found:
        place = places.get("epochs") or places.get("steps")
        cx.error("E0508", place, name="epochs", other="steps")
    actions = [a for line in body if isinstance(line, ast.Every) for a in _actions(cx, line)]
    return Run(**{k: v for k, v in found.items() if v is not None}, actions=tuple(actions))


def _written(cx: Context, body) -> tuple[dict[str, Any], dict[str, ast.Span]]:
    found: dict[str, Any] = {}
    places: dict[str, ast.Span] = {}
    for line in body:
        if not isinstance(line, ast.Setting):
            continue
        name = line.name.id
        if known(cx, "run", name, line.name.span, SETTINGS) and once(cx, name, line.name.span, found):
            found[name] = setting(cx, name, line.value, SETTINGS[name])
            places[name] = line.span
    return found, places


def _overridden(cx: Context, written: dict[str, Any]) -> dict[str, Any]:
    """`-s run.steps=10`; it takes the place of `epochs` too, and the other way round."""
    found: dict[str, Any] = {}
    for name, (wanted, test) in SETTINGS.items():
        key = f"run.{name}"
        value = override(cx, key, 0, None) if key in cx.tables.overrides else None
        if value is None:
            continue
        if not test(value):
            cx.tables.sink.error("E0507", name=key, rule=wanted, value=value, place=f"-s {key}={value}")
            continue
        found[name] = value
    for name, other in (("steps", "epochs"), ("epochs", "steps")):
        if name in found and other not in found:
            written.pop(other, None)
    return found


def _actions(cx: Context, line: ast.Every) -> list[Action]:
    every = setting(cx, "every", line.period, AT_LEAST_1)
    made = [_action(cx, call) for call in line.actions]
    return [Action(every, kind, args, call.span) for call, (kind, args) in zip(line.actions, made) if args and every]


def _action(cx: Context, call: ast.Call) -> tuple[str, Optional[tuple]]:
    kind = call.func.id if isinstance(call.func, ast.Name) else ""
    if kind not in ACTIONS:
        cx.error("E0509", call.func.span, name=kind, help=did_you_mean(kind, ACTIONS))
        return kind, None
    takes = ACTIONS[kind]
    if call.keywords or call.subscript or len(call.args) != len(takes):
        cx.error("E0109", call.span, name=kind, expected=f"{len(takes)} argument{'s' * (len(takes) != 1)}",
                 given=len(call.args), help=f"it is `{kind}({', '.join(takes)})`")
        return kind, None
    args = [_decay(cx, arg) if wanted == "decay" else _model(cx, arg) for wanted, arg in zip(takes, call.args)]
    if None in args or not _same_role(cx, call, args):
        return kind, None
    return kind, tuple(args)


def _model(cx: Context, node: ast.Expr) -> Optional[str]:
    if not isinstance(node, ast.Name):
        cx.error("E0105", node.span, name="this", kind="an expression", wanted="a model")
        return None
    found = lookup(cx, node, "model")
    return None if found is None else found.name


def _decay(cx: Context, node: ast.Expr) -> Optional[float]:
    value = constants.constant(cx, node, infer(cx, node))
    if value is not None and not (constants.is_number(value) and 0 <= value <= 1):
        cx.error("E0507", node.span, name="decay", rule="a number in [0, 1]", value=value)
        return None
    return value


def _same_role(cx: Context, call: ast.Call, args: list) -> bool:
    """Weights are copied between models of one role only."""
    models = [cx.tables.models.get(a) for a in args if isinstance(a, str)]
    if None in models or len({m.role for m in models}) == 1:
        return None not in models
    labels = [Label(node.span, f"a {m.role}") for node, m in zip(call.args, models)]
    cx.error("E0309", call.span, labels, first=models[0].name, second=models[1].name)
    return False
