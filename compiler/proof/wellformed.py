"""Whether the tables of a plan are sound and its steps refer to things that exist: what a damaged file fails first."""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator

from compiler import codec
from compiler.execution import execution_fault
from compiler.layout import ModelLayout
from compiler.plan import LayoutSpec, Plan
from compiler.resharding.gathers import STRATEGIES
from compiler.resharding.transitions import ENGINES, engine_of
from compiler.shapes import FAMILIES, ModelShape
from compiler.steps import Named, UpdateLoop
from compiler.weights import misfit
from rlhf_dsl.builtins import PRIMITIVES, ROLES
from rlhf_dsl.typed import ELEMENTS

MOST_RANKS = 1 << 16
MOST_LAYERS, MOST_SIZE, MOST_ROWS = 1 << 12, 1 << 31, 1 << 40
SCHEDULES = ("constant", "linear", "cosine")
ACTIONS = {"save": (1, 1), "copy": (2, 2), "ema": (2, 3)}  # models, arguments
REQUIRED = {"const": ("value",), "data": ("column",), "state": ("name",), "next_state": ("name",), "reply": ("name",),
            "generate": ("name", "model"), "call": ("model", "operation"), "pyop": ("name",), "field": ("field",)}
REFERENCES = {"expr": "exprs", "prompts": "exprs", "response": "exprs", "objective": "exprs", "partial": "exprs",
              "model": "models", "policy": "models"}


def all_steps(plan: Plan) -> Iterator[tuple[str, Any]]:
    """(where, step) of every step, those inside update loops too."""
    sections = [("setup", plan.setup), ("steps", plan.steps), *((e.name, e.steps) for e in plan.evals)]
    for where, steps in sections:
        for i, step in enumerate(steps):
            yield f"{where}[{i}]", step
            if isinstance(step, UpdateLoop):
                yield from ((f"{where}[{i}].before[{j}]", s) for j, s in enumerate(step.before))
                yield from ((f"{where}[{i}].body[{j}]", s) for j, s in enumerate(step.body))


def shape_of(plan: Plan, model: str) -> ModelShape:
    """The shape of a model. Raises `codec.CodecError` if its fields do not make one."""
    return codec.decode(ModelShape, plan.models[model].shape, f"models.{model}.shape")


def table_faults(plan: Plan) -> Iterator[str]:
    """What is wrong with dims, models, layouts, data and expressions."""
    if not 1 <= plan.world <= MOST_RANKS:
        yield f"`world` is {plan.world}"
        return
    for name, dim in plan.dims.items():
        if not 1 <= dim.size <= MOST_ROWS or any(d not in plan.dims for d in dim.lead):
            yield f"dim `{name}` has no sound size or lead"
    yield from _model_faults(plan)
    yield from _expr_faults(plan)
    for name, init in plan.states.items():
        if not 0 <= init < len(plan.exprs):
            yield f"state `{name}` refers to no expression"
    for data in plan.data:
        if any(d not in plan.dims for c in data.columns for d in (data.root, *c.dims)):
            yield f"data over `{data.root}` has a dim that is not declared"


def _model_faults(plan: Plan) -> Iterator[str]:
    for name, model in plan.models.items():
        if model.role not in ROLES:
            yield f"model `{name}` has the unknown role `{model.role}`"
        shape = shape_of(plan, name)
        sizes = (shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn, shape.vocab,
                 shape.max_positions)
        odd = shape.norm_eps <= 0 or shape.rope_theta <= 0 or shape.window < 0 or shape.family not in FAMILIES
        if min(sizes) < 1 or max(sizes) > MOST_SIZE or shape.layers > MOST_LAYERS or shape.heads % shape.kv_heads or odd:
            yield f"model `{name}` has an impossible shape"
            return
        if model.optimizer and model.optimizer.lr.kind not in SCHEDULES:
            yield f"model `{name}` has the unknown schedule `{model.optimizer.lr.kind}`"
    for name, spec in plan.layouts.items():
        reason = _layout_fault(plan, name, spec)
        if reason:
            yield f"layout `{name}`: {reason}"


def _layout_fault(plan: Plan, name: str, spec: LayoutSpec) -> str:
    model, _, stage = name.rpartition(".")
    if model not in plan.models or stage not in ("train", "forward", "generate"):
        return "it belongs to no model and stage"
    if min(spec.ranks, spec.tp, spec.pp, spec.dp) < 1 or spec.tp * spec.pp * spec.dp != spec.ranks:
        return f"tp {spec.tp} * pp {spec.pp} * dp {spec.dp} is not its number of ranks, {spec.ranks}"
    if spec.cache_bytes < 0 or spec.cache_bytes and stage != "generate":
        return f"it has {spec.cache_bytes} bytes for keys and values"
    if spec.first < 0 or spec.first + spec.ranks > plan.world:
        return f"it has ranks outside the world of {plan.world}"
    if spec.within:
        outer = plan.layouts.get(spec.within)
        is_own = outer is not None and not outer.within and spec.within.rpartition(".")[0] == model
        if not is_own or (outer.first, outer.ranks) != (spec.first, spec.ranks) or spec.pp > 1:
            return f"it does not lie within `{spec.within}`"
        if spec.strategy not in STRATEGIES:
            return f"there is no strategy `{spec.strategy}`"
    if spec.engine and spec.engine not in ENGINES[stage]:
        return f"there is no engine `{spec.engine}` for it"
    fault = execution_fault(spec, stage)
    if fault:
        return fault
    layout = ModelLayout(tuple(range(spec.ranks)), spec.tp, spec.pp, spec.dp, spec.chunks)
    return misfit(shape_of(plan, model), layout, engine_of(plan.layouts, name))


def _expr_faults(plan: Plan) -> Iterator[str]:
    for i, row in enumerate(plan.exprs):
        if row.op not in PRIMITIVES:
            yield f"exprs[{i}] is the unknown primitive `{row.op}`"
        elif any(not 0 <= arg < i for arg in row.args):
            yield f"exprs[{i}] reads an expression that does not stand above it"
        elif row.elem not in ELEMENTS or any(d not in plan.dims for d in row.dims):
            yield f"exprs[{i}] has no sound type"
        elif any(key not in row.attrs for key in REQUIRED.get(row.op, ())):
            yield f"exprs[{i}], a `{row.op}`, lacks one of {', '.join(REQUIRED[row.op])}"
        elif PRIMITIVES[row.op].kind == "reduction" and not _is_over(plan, row.attrs.get("over")):
            yield f"exprs[{i}], a `{row.op}`, does not say over which dims"
        elif row.op in ("call", "generate", "field", "length") and not row.args:
            yield f"exprs[{i}], a `{row.op}`, has no argument"


def _is_over(plan: Plan, over: Any) -> bool:
    return isinstance(over, tuple) and all(isinstance(d, str) and d in plan.dims for d in over)


def reference_faults(plan: Plan) -> Iterator[str]:
    """Names and ids in steps that lead nowhere; the tables are sound."""
    for where, step in all_steps(plan):
        for field in dataclasses.fields(step):
            value = getattr(step, field.name)
            if field.name in REFERENCES and not _is_known(plan, field.name, value):
                yield f"{where}.{field.name} refers to nothing"
            named = [v for v in value if isinstance(v, Named)] if isinstance(value, tuple) else []
            if any(not 0 <= v.expr < len(plan.exprs) for v in named):
                yield f"{where}.{field.name} refers to an expression that is not there"
        for place in _places(step):
            if place not in plan.layouts and (place != "home" or step.op != "transfer"):
                yield f"{where} names the unknown layout `{place}`"
        yield from _own_faults(plan, where, step)


def _is_known(plan: Plan, field: str, value: Any) -> bool:
    return 0 <= value < len(plan.exprs) if REFERENCES[field] == "exprs" else value in plan.models


def _places(step: Any) -> tuple[str, ...]:
    return tuple(getattr(step, name) for name in ("layout", "src", "dst") if hasattr(step, name))


def _own_faults(plan: Plan, where: str, step: Any) -> Iterator[str]:
    """What single kinds of steps must satisfy."""
    if step.op == "load" and step.name not in {d.root for d in plan.data}:
        yield f"{where} loads `{step.name}`, which is no data's root dim"
    if step.op == "next_state" and step.name not in plan.states:
        yield f"{where} sets the unknown state `{step.name}`"
    if step.op in ("generate", "forward", "train") and step.layout in plan.layouts:
        if step.layout.rpartition(".")[0] != step.model:
            yield f"{where} runs `{step.model}` in the layout of another model"
    if step.op == "reshard" and (step.src not in plan.layouts or step.dst not in plan.layouts
                                 or any(p.rpartition(".")[0] != step.model for p in (step.src, step.dst))):
        yield f"{where} moves weights between layouts of other models"
    if step.op == "transfer" and (step.src == "home") == (step.dst == "home"):
        yield f"{where} is not between home and a layout"
    if step.op == "update" and (step.epochs < 1 or step.minibatches < 1 or any(d not in plan.dims for d in step.roots)):
        yield f"{where} has no sound loop"
    if step.op == "train" and any(d not in plan.dims for d in step.unit):
        yield f"{where} has an unknown dim in its unit"
    if step.op == "action":
        models, arguments = ACTIONS.get(step.kind, (0, 0))
        if step.every < 1 or not models:
            yield f"{where} is never due"
        elif len(step.args) != arguments or any(model not in plan.models for model in step.args[:models]):
            yield f"{where} is not of models of the plan"


