"""Whether sections of a plan hold what they must, once and in order, and steps say the same as their expressions."""

from __future__ import annotations

from collections import Counter
from typing import Any, Iterable, Iterator

from compiler.plan import Plan
from compiler.proof.wellformed import all_steps
from compiler.steps import UpdateLoop

# In one list of steps; and what nothing else comes after.
ONCE = ("load", "reshard", "record", "keep", "next_state", "commit_states", "action", "statistics")
LAST = ("commit_states", "action")
COUNTS = ("micro_batch", "tokens", "refill", "total_bytes", "line")


def section_faults(plan: Plan) -> Iterator[str]:
    """The references of the plan lead somewhere."""
    for where, steps in _lists(plan):
        yield from _repeated(where, steps)
    yield from _iteration_faults(plan)
    yield from _name_faults(plan)
    keeps = max([sum(step.op == "keep" for step in steps) for _, steps in _lists(plan)])
    if any(row.attrs.get("keep", 0) > keeps for row in plan.exprs):
        yield "an expression is of rows that a `keep` left, which is not there"
    for where, step in all_steps(plan):
        for reason in _step_faults(plan, step):
            yield f"{where} `{step.name}` {reason}"


def _lists(plan: Plan) -> Iterator[tuple[str, Iterable[Any]]]:
    yield "setup", plan.setup
    yield "steps", plan.steps
    for loop in (s for s in plan.steps if isinstance(s, UpdateLoop)):
        yield f"{loop.name}.before", loop.before
        yield f"{loop.name}.body", loop.body
    yield from ((section.name, section.steps) for section in plan.evals)


def _repeated(where: str, steps: Iterable[Any]) -> Iterator[str]:
    """A step that stands twice; two moves of one model's weights would be one too many as well."""
    seen = Counter((step.name, getattr(step, "ahead", 0), step.op if step.op in ONCE else step) for step in steps)
    yield from (f"{where} has the step `{key[0]}` twice" for key, times in seen.items() if times > 1)


def _iteration_faults(plan: Plan) -> Iterator[str]:
    """Updates in order, states set once and committed after, actions at the end."""
    ops = [step.op for step in plan.steps if not getattr(step, "ahead", 0)]
    loops = [step for step in plan.steps if isinstance(step, UpdateLoop)]
    if [loop.index for loop in loops] != list(range(len(loops))):
        yield "the updates are not in their order"
    if sorted(step.name for step in plan.steps if step.op == "next_state") != sorted(plan.states):
        yield "not every state is set once in an iteration"
    if ops.count("commit_states") != bool(plan.states):
        yield "states are not committed once an iteration"
    first = next((i for i, op in enumerate(ops) if op in LAST), len(ops))
    if any(op not in LAST for op in ops[first:]):
        yield "something comes after the states are committed, or after an action"
    for where, steps in _lists(plan):
        keeps = [step.index for step in steps if step.op == "keep"]
        if keeps != list(range(1, len(keeps) + 1)):
            yield f"{where} has its keeps not in their order"


def _name_faults(plan: Plan) -> Iterator[str]:
    """A name means one expression, wherever it stands."""
    known: dict[str, int] = {}
    for where, step in all_steps(plan):
        named = [v for field in ("values", "calls", "exprs", "constants") for v in getattr(step, field, ())]
        for value in named:
            if known.setdefault(value.name, value.expr) != value.expr:
                yield f"{where} `{step.name}` calls exprs[{value.expr}] `{value.name}`, exprs[{known[value.name]}] has that name"


def _step_faults(plan: Plan, step: Any) -> Iterator[str]:
    exprs = plan.exprs
    if any(getattr(step, field, 0) < 0 for field in COUNTS):
        yield "has a number below 0"
    made = {"generate": "generate", "reply": "reply", "pyop": "pyop"}.get(step.op)
    if made and exprs[step.expr].op != made:
        yield f"makes no `{made}`"
    if step.op in ("record", "next_state") and (exprs[step.expr].dims or exprs[step.expr].elem not in ("f32", "bool")):
        yield "takes a value that is no scalar"
    row = exprs[step.expr] if step.op == "keep" else None
    if row is not None and (row.elem != "bool" or any(plan.dims[d].ragged for d in row.dims)):
        yield "takes a value that is no condition on rows"
    if step.op == "generate":
        made, row = exprs[step.expr].attrs.get("model"), exprs[step.expr]
        if made != step.model or row.args[:1] != (step.prompts,):
            yield "is of another model or other prompts than its expression"
    if step.op in ("forward", "train"):
        yield from _call_faults(plan, step)


def _call_faults(plan: Plan, step: Any) -> Iterator[str]:
    rows = [plan.exprs[call.expr] for call in step.calls]
    if not rows or any(row.op != "call" or row.attrs["model"] != step.model for row in rows):
        yield "has calls of another model"
    elif step.op == "forward" and any(row.args[0] != step.response for row in rows):
        yield "has calls on another response"
