"""Whether trainings that go on from a forward of the rollout find in its activations what they would have computed."""

from __future__ import annotations

from typing import Iterator

from compiler.plan import Plan
from compiler.retained import retained_fault
from compiler.steps import Forward, TrainStep, UpdateLoop


def retention_faults(plan: Plan) -> Iterator[str]:
    """An engine keeps the activations of one forward at a time."""
    forwards = {step.name: step for step in plan.steps if isinstance(step, Forward)}
    kept: set[str] = set()
    for loop in (s for s in plan.steps if isinstance(s, UpdateLoop)):
        for train in (s for s in loop.body if isinstance(s, TrainStep) and s.retained):
            if train.retained not in forwards:
                yield f"`{train.name}` goes on from `{train.retained}`, which is no forward of the rollout"
                continue
            reason = retained_fault(plan, loop, train, forwards[train.retained])
            if reason:
                yield f"`{train.name}` goes on from `{train.retained}`, but {reason}"
            if train.layout in kept:
                yield f"{train.layout} would keep the activations of two forwards"
            kept.add(train.layout)
