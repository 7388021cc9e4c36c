"""`train M to maximize E`."""

from __future__ import annotations

from typing import Optional

from rlhf_dsl import ast
from rlhf_dsl.builtins import ROLES
from rlhf_dsl.checking.context import Context
from rlhf_dsl.checking.infer import infer
from rlhf_dsl.checking.names import lookup
from rlhf_dsl.checking.separable import why_not
from rlhf_dsl.diagnostics import Label, listing
from rlhf_dsl.typed import Expr, Train


def trained_models(cx: Context, body) -> frozenset[str]:
    """The models that an update trains, known before its first line is read."""
    names = [s.model.id for s in body if isinstance(s, ast.Train)]
    return frozenset(n for n in names if n in cx.tables.models)


def train(cx: Context, node: ast.Train, before: dict[str, ast.Span]) -> Optional[Train]:
    """A `train` line; `before`: models of earlier lines of this update."""
    found = lookup(cx, node.model, "model")
    objective = infer(cx, node.objective)
    model = None if found is None else cx.tables.models.get(found.name)
    if model is None:
        return None
    if model.name in before:
        cx.error("E0402", node.model.span, [Label(before[model.name], "first trained here")], name=model.name)
        return None
    before[model.name] = node.model.span
    if model.optimizer is None:
        cx.error("E0401", node.model.span, [Label(model.span, "declared without an optimizer")], name=model.name)
        return None
    if objective is None or not _valid_objective(cx, node, objective):
        return None
    return Train(model.name, node.direction == "maximize", objective, node.span)


def _valid_objective(cx: Context, node: ast.Train, objective: Expr) -> bool:
    place = node.objective.span
    if objective.type.dims or objective.type.elem != "f32":
        cx.error("E0403", place, [Label(place, str(objective.type))], type=objective.type)
        return False
    if node.model.id not in objective.grad:
        reached = f"it differentiates into {listing(sorted(objective.grad))} only" if objective.grad else \
            "nothing in it is an output of a model at its current weights"
        output = next(op.name for op in ROLES[cx.tables.models[node.model.id].role].values() if op.per != "sample")
        cx.error("E0404", place, name=node.model.id, reached=reached, output=output)
        return False
    fault = why_not(objective, node.model.id, lambda dim: cx.tables.dims[dim].root)
    if fault is not None:
        statistic, reason = fault
        cx.error("E0409", place, [Label(statistic.span, f"a statistic of trained outputs: {reason}")])
    return fault is None
