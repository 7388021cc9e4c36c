"""Which trainings go on from a forward of the rollout, instead of computing it a second time.

With one epoch of one mini-batch a model that a rollout reads (`v_old = critic.values(y)`) computes in its update what it
has computed before: the same outputs on the same rows with the same weights. Then the rollout's forward keeps its
activations, for all micro-batches, and the update does the backward pass alone. That takes memory from the one to the
other; a plan does it where there is room and an iteration is estimated to be no longer. `recompute(full)` forbids it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator, Optional

from compiler.cluster import Cluster
from compiler.cost import CostModel, iteration_seconds
from compiler.cost.caches import with_caches
from compiler.exprs import call_temperature
from compiler.groups import groups_of
from compiler.offloading import Offloading, shares_memory
from compiler.plan import Plan
from compiler.steps import Forward, TrainStep, UpdateLoop
from rlhf_dsl.typed import Interner

MOVING = ("reload", "offload", "optimizer", "train", "action")  # what must not happen to the model in between
SAMPLING = ("reshard", "generate")  # nor these, where the memory of its weights becomes that of the sampler's

REENCODED = "score"  # whoever scores may read a response in its own tokens


def with_retained(plan: Plan, cluster: Cluster) -> Plan:
    """`plan`, in which trainings go on from forwards of the rollout where that fits and is not slower."""
    for name in [train.name for _, train in _trainings(plan)]:
        changed = _retaining(plan, name)
        if changed is None:
            continue
        if not cluster.is_local:
            changed = with_caches(changed, cluster)
        # as long will do: of models side by side the quicker saves nothing before the slower does
        if _fits(changed, cluster) and _seconds(changed, cluster) <= _seconds(plan, cluster):
            plan = changed
    return plan


def _trainings(plan: Plan) -> Iterator[tuple[UpdateLoop, TrainStep]]:
    for loop in (s for s in plan.steps if isinstance(s, UpdateLoop)):
        yield from ((loop, step) for step in loop.body if isinstance(step, TrainStep))


def _retaining(plan: Plan, name: str) -> Optional[Plan]:
    """`plan`, in which the training of this name goes on from a forward; None, where there is none."""
    loop, train = next(found for found in _trainings(plan) if found[1].name == name)
    forwards = (step for step in plan.steps if isinstance(step, Forward))
    forward = next((f for f in forwards if retained_fault(plan, loop, train, f) is None), None)
    if forward is None:
        return None
    body = (dataclasses.replace(step, retained=forward.name) if step is train else step for step in loop.body)
    changed = dataclasses.replace(loop, body=tuple(body))
    return dataclasses.replace(plan, steps=tuple(changed if step is loop else step for step in plan.steps))


def _fits(plan: Plan, cluster: Cluster) -> bool:
    costs = CostModel(plan, cluster)
    return all(costs.peak(group.members) <= costs.machine(group.members[0]).usable for group in groups_of(plan))


def _seconds(plan: Plan, cluster: Cluster) -> float:
    return iteration_seconds(CostModel(plan, cluster))


# ---- when it may be --------------------------------------------------------------------------------

def retained_fault(plan: Plan, loop: UpdateLoop, train: TrainStep, forward: Forward) -> Optional[str]:
    """Why the activations of `forward`, a step of the rollout, are not those of `train`, a step of `loop`; None: they are."""
    if (loop.epochs, loop.minibatches) != (1, 1):
        return "its update has more than one mini-batch"
    if any(step.op == "keep" for step in plan.steps):
        return "rows may leave in between"
    if forward.layout != train.layout or plan.layouts[train.layout].pp > 1:
        return "the engine is another, or has stages"
    if train.recompute or train.layout in Offloading(plan).layouts:
        return "its memory is wanted for others"
    if not _is_same_pass(plan, train, forward):
        return "it computes something else"
    if any(_moves(plan, step, train) for step in _between(plan, loop, train, forward)):
        return "the weights are others"
    return None


def _is_same_pass(plan: Plan, train: TrainStep, forward: Forward) -> bool:
    """The same micro-batches of the same rows, and outputs that both read at the same tokens."""
    exprs = plan.expr_table(Interner())
    response, samples = exprs[forward.response], _samples(plan, exprs[forward.response].type.dims)
    if (train.unit, train.micro_batch, train.tokens) != (samples, forward.micro_batch, forward.tokens):
        return False
    asked = {exprs[call.expr].attr("operation") for call in forward.calls} - {REENCODED}
    calls = [exprs[call.expr] for call in train.calls]
    return all(call.args[0] is response and call.attr("operation") in asked
               and call_temperature(call) == forward.temperature for call in calls)


def _samples(plan: Plan, dims: tuple[str, ...]) -> tuple[str, ...]:
    """The dims that tell the samples of a response apart."""
    return tuple(d for d in dims if not plan.dims[d].ragged)


def _between(plan: Plan, loop: UpdateLoop, train: TrainStep, forward: Forward) -> Iterator[Any]:
    """Steps from one to the other. A forward below the update makes all steps of the iteration, as it comes too late."""
    steps = list(plan.steps)
    first, last = (next(i for i, step in enumerate(steps) if step is one) for one in (forward, loop))
    if first > last:
        yield from loop.body
        return
    for step in steps[first + 1:last]:
        yield from (*step.before, *step.body) if isinstance(step, UpdateLoop) else (step,)
    yield from loop.before
    yield from loop.body[:next(i for i, step in enumerate(loop.body) if step is train)]


def _moves(plan: Plan, step: Any, train: TrainStep) -> bool:
    if step.op == "action":
        return train.model in step.args
    if step.op in SAMPLING and step.model == train.model:
        return shares_memory(plan, train.layout, step.dst if step.op == "reshard" else step.layout)
    return step.op in MOVING and step.model == train.model
