"""Whether whatever computes has its model on its ranks, and no two that are offloaded have theirs there at once."""

from __future__ import annotations

from typing import Any, Iterable, Iterator

from compiler.offloading import GENERATE, GRADIENTS, NEEDED, PARTS, WEIGHTS, Offloading, is_refilled
from compiler.plan import Plan

Steps = Iterable[Any]
Held = set[tuple[str, str]]  # (layout, part)


def residence_faults(plan: Plan) -> Iterator[str]:
    """Each list of steps begins and ends with nothing there; of an iteration's steps so do those of the next alone."""
    facts = Offloading(plan)
    ahead, now = ([s for s in plan.steps if bool(getattr(s, "ahead", 0)) is late] for late in (True, False))
    lists: list[tuple[str, Steps]] = [("setup", plan.setup), ("steps", plan.steps), ("steps ahead", ahead),
                                      ("last steps", now), *((e.name, e.steps) for e in plan.evals)]
    for where, steps in lists:
        residence = _Residence(facts, where)
        yield from (f"{where}, {reason}" for reason in residence.walk(steps))
        yield from (f"{where}: {one} stays on its ranks" for one in _names(residence.here))


class _Residence:
    """here: what is on the device; changed: what the host does not have as it is, of gradients what holds something."""

    def __init__(self, facts: Offloading, where: str) -> None:
        self.facts, self.where = facts, where
        self.here: Held = set()
        self.changed: Held = set()

    def walk(self, steps: Steps) -> Iterator[str]:
        checks = {"reload": self._reload, "offload": self._offload, "update": self._update, "keep": self._keep}
        for step in steps:
            check = self._computes if step.op in NEEDED else checks.get(step.op)
            yield from (f"`{step.name}`: {reason}" for reason in (check(step) if check else ()))

    def _computes(self, step: Any) -> Iterator[str]:
        needed = {(layout, part) for layout, parts in self.facts.needs(step).items() for part in parts}
        yield from (f"{one} lies in the host's memory" for one in _names(needed - self.here))
        rivals = self.facts.rivals(step.model)
        others = {one for one in self.here if _model(one[0]) in rivals}
        yield from (f"{one} is on the ranks that it works on" for one in _names(others))
        layout = f"{step.model}.train"
        if step.op == "reshard" and not is_refilled(self.facts.plan, step.dst):
            self.changed.add((step.dst, WEIGHTS))
        elif step.op == "train":
            self.changed.add((layout, GRADIENTS))
        elif step.op == "optimizer":
            self.changed |= {(layout, part) for part in PARTS}
            self.changed.discard((layout, GRADIENTS))

    def _reload(self, step: Any) -> Iterator[str]:
        yield from self._misplaced(step)
        moved = _moved(step)
        yield from (f"{one} is there" for one in _names(moved & self.here))
        self.here |= moved
        yield from self._wrong_bytes(step, {one for one in moved if self._is_kept(*one)})

    def _offload(self, step: Any) -> Iterator[str]:
        yield from self._misplaced(step)
        moved = _moved(step)
        yield from (f"{one} is not there" for one in _names(moved - self.here))
        self.here -= moved
        yield from self._wrong_bytes(step, moved & self.changed)
        self.changed -= {(layout, part) for layout, part in moved if part != GRADIENTS}

    def _is_kept(self, layout: str, part: str) -> bool:
        """Whether the host has content for what comes back; samplers are filled in the setup, or each time."""
        if part == GRADIENTS:
            return (layout, part) in self.changed
        return not (is_refilled(self.facts.plan, layout) or self.where == "setup" and layout.endswith(GENERATE))

    def _misplaced(self, step: Any) -> Iterator[str]:
        if step.layout not in self.facts.layouts or _model(step.layout) != step.model:
            yield f"nothing of {step.layout} comes and goes"
        known = PARTS if step.layout.endswith(".train") else (WEIGHTS,)
        if not step.parts or not set(step.parts) <= set(known) or len(set(step.parts)) < len(step.parts):
            yield f"it moves {', '.join(step.parts) or 'nothing'}"

    def _wrong_bytes(self, step: Any, moved: Held) -> Iterator[str]:
        size = sum(self.facts.size(layout, part) for layout, part in moved if layout in self.facts.layouts and part in PARTS)
        if step.bytes != size:
            yield f"it says {step.bytes} bytes, its layout says {size}"

    def _update(self, loop: Any) -> Iterator[str]:
        """A mini-batch leaves there what it found."""
        yield from self.walk(loop.before)
        found = set(self.here)
        yield from self.walk(loop.body)
        if self.here != found:
            yield f"a mini-batch finds {_told(found)}, and leaves {_told(self.here)}"

    def _keep(self, step: Any) -> Iterator[str]:
        if step.refill and self.here:
            yield f"the steps above run again, and {_told(self.here)} stays on its ranks"


def _moved(step: Any) -> Held:
    return {(step.layout, part) for part in step.parts}


def _names(held: Held) -> list[str]:
    """`actor.train's weights`"""
    return [f"{layout}'s {part}" for layout, part in sorted(held)]


def _told(held: Held) -> str:
    return ", ".join(_names(held)) or "nothing"


def _model(layout: str) -> str:
    return layout.rpartition(".")[0]
