"""`plan:`: constraints for the compiler."""

from __future__ import annotations

import math
from typing import Any, Optional

from rlhf_dsl import ast
from rlhf_dsl.checking.context import Context
from rlhf_dsl.checking.names import lookup
from rlhf_dsl.checking.settings import AT_LEAST_1, TRUE_OR_FALSE, keyword_settings, setting
from rlhf_dsl.diagnostics import Label, did_you_mean
from rlhf_dsl.typed import Constraint

STAGES = ("train", "forward", "generate")
DEGREES = {"tp": AT_LEAST_1, "pp": AT_LEAST_1, "dp": AT_LEAST_1, "chunks": AT_LEAST_1}
ASSUMED = {"prompt": AT_LEAST_1, "response": AT_LEAST_1, "longest": AT_LEAST_1}
VALUES = {"micro_batch": AT_LEAST_1, "tokens": AT_LEAST_1, "devices": AT_LEAST_1, "sequence_parallel": TRUE_OR_FALSE}
ENGINES = ("megatron", "torch", "vllm")
STRATEGIES = ("zero_redundancy", "vanilla", "all_gather", "minimal")
CHOICES = {"engine": ENGINES, "reshard": STRATEGIES, "recompute": ("full", "none"),
           "optimizer": ("sharded", "replicated"), "precision": ("fp32", "bf16")}
ITEMS = ("parallel", *VALUES, *CHOICES, "colocate")
_SIGNATURES = {"parallel": "parallel(tp=, pp=, dp=, chunks=)", "colocate": "colocate(model)",
               **{name: f"{name}({' or '.join(known)})" for name, known in CHOICES.items()},
               **{name: f"{name}({'N' if rule is AT_LEAST_1 else rule[0]})" for name, rule in VALUES.items()}}


def plan(cx: Context, section: ast.Section) -> tuple[Constraint, ...]:
    """All constraints of the section."""
    keyword_settings(cx, "plan", section.keywords, {})
    lines = [_constraint(cx, line) for line in section.body if isinstance(line, ast.Constraint)]
    return tuple(line for line in lines if line is not None)


def _constraint(cx: Context, line: ast.Constraint) -> Optional[Constraint]:
    head = line.target[0]
    if head.id == "assume" and len(line.target) == 1 and cx.scope.find("assume") is None:
        return Constraint("", "", tuple(_assumed(cx, line).items()), line.span)
    found = lookup(cx, head, "model")
    stage = line.target[1].id if len(line.target) > 1 else ""
    if found is None or not _stage_fits(cx, line, found.name, stage):
        return None
    for keyword in line.keywords:
        cx.error("E0506", keyword.name_span, where="plan", name=keyword.name, help=did_you_mean(keyword.name, ITEMS))
    items: dict[str, Any] = {}
    for item in line.items:
        for name, value in _item(cx, item, found.name).items():
            if name in items:
                cx.error("E0508", item.span, name=name, other=name, help="give it once")
            items[name] = value
    if "reshard" in items and stage != "generate":
        way = f"{found.name}.generate"
        said = ".".join(filter(None, (found.name, stage)))
        cx.error("E0507", line.span, name="reshard", rule=f"said of `{way}`", value=said,
                 help=f"it is `{way}: reshard({items['reshard'].replace('-', '_')})`")
        return None
    return Constraint(found.name, stage, tuple(items.items()), line.span)


def _assumed(cx: Context, line: ast.Constraint) -> dict[str, int]:
    for item in line.items:
        help = "it is `assume: prompt=N, response=N, longest=N`"
        cx.error("E0506", item.span, where="assume", name=_item_name(item), help=help)
    found = keyword_settings(cx, "assume", line.keywords, ASSUMED)
    longest, mean = found.get("longest"), found.get("response", math.inf)
    if longest is None or longest >= mean or mean == math.inf and any(k.name == "response" for k in line.keywords):
        return found
    span = next(k.value.span for k in line.keywords if k.name == "longest")
    cx.error("E0507", span, name="longest", rule="at least `response` beside it", value=longest,
             help="it is `assume: response=N, longest=N`, the mean length and that of the longest response")
    return found


def _stage_fits(cx: Context, line: ast.Constraint, name: str, stage: str) -> bool:
    model = cx.tables.models.get(name)
    if not stage or model is None:
        return model is not None
    place = line.target[1].span
    if stage not in STAGES:
        cx.error("E0510", place, name=stage, help=did_you_mean(stage, STAGES))
        return False
    reason = ""
    if stage == "train" and model.optimizer is None:
        reason = "it is frozen"
    elif stage == "generate" and model.role != "policy":
        reason = f"it is a {model.role}"
    if reason:
        cx.error("E0511", place, [Label(model.span, reason)], model=name, stage=stage, reason=reason)
    return not reason


def _item_name(item: ast.Expr) -> str:
    func = item.func if isinstance(item, ast.Call) else item
    return func.id if isinstance(func, ast.Name) else "this"


def _item(cx: Context, item: ast.Expr, model: str) -> dict[str, Any]:
    name = _item_name(item)
    if name not in ITEMS or not isinstance(item, ast.Call):
        cx.error("E0506", item.span, where="plan", name=name,
                 help=f"it is `{_SIGNATURES[name]}`" if name in ITEMS else did_you_mean(name, ITEMS))
        return {}
    if name == "parallel" and not item.args:
        return keyword_settings(cx, name, item.keywords, DEGREES)
    if item.keywords or not item.args or name == "parallel" or len(item.args) > 1 and name != "colocate":
        cx.error("E0109", item.span, name=name, expected="other arguments", given=len(item.args) + len(item.keywords),
                 help=f"it is `{_SIGNATURES[name]}`")
        return {}
    if name in VALUES:
        value = setting(cx, name, item.args[0], VALUES[name])
        return {} if value is None else {name: value}
    return _choice(cx, name, item.args[0]) if name in CHOICES else _colocate(cx, item, model)


def _choice(cx: Context, item: str, node: ast.Expr) -> dict[str, Any]:
    known = CHOICES[item]
    name = node.id if isinstance(node, ast.Name) else node.value if isinstance(node, ast.String) else None
    if name not in known:
        cx.error("E0507", node.span, name=item, rule=" or ".join(f"`{k}`" for k in known), value=name or "this",
                 help=did_you_mean(str(name), known))
        return {}
    return {item: name.replace("_", "-")}


def _colocate(cx: Context, item: ast.Call, model: str) -> dict[str, Any]:
    names = []
    for node in item.args:
        if not isinstance(node, ast.Name):
            cx.error("E0105", node.span, name="this", kind="an expression", wanted="a model")
            continue
        found = lookup(cx, node, "model")
        if found is not None and found.name == model:
            cx.error("E0507", node.span, name="colocate", rule="another model", value=model)
        elif found is not None:
            names.append(found.name)
    return {"colocate": tuple(names)} if names else {}
