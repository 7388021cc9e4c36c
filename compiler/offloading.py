"""What of a model lies in the host's memory while others work, and the steps of a plan that bring it and take it away.

A model that the plan offloads (`ModelSpec.offload`) has nothing on its ranks but while it works. Models that share ranks
take turns: before one of them computes, the others leave; what it needs comes before its first call and stays until
another one computes. So the memory of a group is that of what is never offloaded and of the largest of the others.

Three parts come and go, each when it is needed: weights, gradients, and the optimizer's states (with them the 32-bit
weights of a narrower model). Weights that have not changed are in the host's memory already, and gradients hold nothing
once a step is made, so neither is copied. In an update that trains one model of a group everything stays for all of its
mini-batches; where it trains several, they take turns in each mini-batch.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Any, Iterable, Iterator, Mapping

from compiler.groups import groups_of
from compiler.plan import Plan
from compiler.proof.wellformed import shape_of
from compiler.resharding.transitions import ITEMSIZE, engine_of, weight_layout
from compiler.steps import Offload, Reload, Step, UpdateLoop

WEIGHTS, GRADIENTS, OPTIMIZER = PARTS = ("weights", "gradients", "optimizer")
NEEDED = {"reshard": (WEIGHTS,), "generate": (WEIGHTS,), "forward": (WEIGHTS,), "train": (WEIGHTS, GRADIENTS),
          "optimizer": PARTS}  # by the kind of a step that computes; of weights, those at both ends of a move
GENERATE = ".generate"
ENDS = ("commit_states", "action")  # of an iteration: all that is offloaded has left


def changing(plan: Plan) -> frozenset[str]:
    """Models whose weights a run changes: trained ones, and those that a copy or a moving average writes to."""
    written = {s.args[1] for s in plan.steps if s.op == "action" and s.kind in ("copy", "ema")}
    return frozenset(name for name, spec in plan.models.items() if spec.optimizer) | written


def shares_memory(plan: Plan, src: str, dst: str) -> bool:
    """Whether weights of the two layouts take turns in one memory: those that change, in one precision, in engines that
    let them."""
    specs = plan.layouts
    alike = specs[dst].within == src and specs[dst].precision == specs[src].precision and not plan.run.lag
    return alike and dst.rpartition(".")[0] in changing(plan) and engine_of(specs, dst) == "torch"


@dataclasses.dataclass(frozen=True)
class Offloading:
    """What is offloaded in `plan`, whatever its steps say."""

    plan: Plan

    @cached_property
    def layouts(self) -> tuple[str, ...]:
        """Those whose memory comes and goes by steps.

        A layout that shares another one's memory goes with it. With `lag = 1` sampling may be under way at any time.
        """
        offloaded = [n for n in self.plan.layouts if self.plan.models[n.rpartition(".")[0]].offload]
        return tuple(name for name in offloaded if not (name.endswith(GENERATE) and self._stays(name)))

    def _stays(self, layout: str) -> bool:
        within = self.plan.layouts[layout].within
        return bool(self.plan.run.lag) or bool(within) and shares_memory(self.plan, within, layout)

    def needs(self, step: Any) -> dict[str, tuple[str, ...]]:
        """By layout, the parts that a step computes with, of those that come and go."""
        if step.op not in NEEDED:
            return {}
        places = [step.src, step.dst] if step.op == "reshard" else [getattr(step, "layout", f"{step.model}.train")]
        if step.op == "generate" and is_refilled(self.plan, step.layout):
            places.append(self.plan.layouts[step.layout].within)
        return {place: NEEDED[step.op] for place in places if place in self.layouts}

    def rivals(self, model: str) -> frozenset[str]:
        """The models that share ranks with `model` and take turns with it."""
        group = next((g.models for g in groups_of(self.plan) if model in g.models), ())
        return frozenset(group) - {model}

    def size(self, layout: str, part: str) -> int:
        """Bytes of a part on the rank that holds most of it, without an engine's padding."""
        elements, spec = self._elements[layout], self.plan.layouts[layout]
        if part == WEIGHTS:
            return elements * ITEMSIZE[spec.precision]
        if part == GRADIENTS:
            return 4 * elements
        numbers = 2 + (spec.precision != "fp32")
        return math.ceil(4 * numbers * elements / (spec.dp if spec.sharded_optimizer else 1))

    @cached_property
    def _elements(self) -> Mapping[str, int]:
        return {layout: self._most_elements(layout) for layout in self.layouts}

    def _most_elements(self, layout: str) -> int:
        model = layout.rpartition(".")[0]
        found = weight_layout(shape_of(self.plan, model), self.plan.models[model].role, self.plan.layouts, layout)
        return max(sum(map(math.prod, found.local_tensors(rank).values())) for rank in found.layout.replica(0))


def with_offloading(plan: Plan) -> Plan:
    """`plan`, its steps among those that bring and take away what is offloaded; itself, where nothing is."""
    facts = Offloading(plan)
    if not facts.layouts:
        return plan
    evals = tuple(dataclasses.replace(e, steps=_inserted(facts, e.steps)) for e in plan.evals)
    return dataclasses.replace(plan, setup=_inserted(facts, plan.setup), steps=_inserted(facts, plan.steps), evals=evals)


def _inserted(facts: Offloading, steps: Iterable[Step]) -> tuple[Step, ...]:
    turns = Turns(facts)
    return (*turns.through(steps), *turns.leave(turns.here))


class Turns:
    """Who has the memory, at a point of a list of steps that begins and ends with nothing there.

    here: by layout, the parts that are there, and the step that they came for or served last
    changed: parts that are not in the host's memory as they are; of gradients, those that hold something
    """

    def __init__(self, facts: Offloading) -> None:
        self.facts = facts
        self.here: dict[str, tuple[str, ...]] = {}
        self.changed: set[tuple[str, str]] = set()
        self._last: dict[str, Any] = {}

    def through(self, steps: Iterable[Step]) -> Iterator[Step]:
        for step in steps:
            yield from self._loop(step) if isinstance(step, UpdateLoop) else self._step(step)

    def _step(self, step: Any) -> Iterator[Step]:
        if step.op in ENDS or step.op == "keep" and step.refill:
            yield from self.leave(self.here)
        if step.op in NEEDED:
            rivals, ahead = self.facts.rivals(step.model), getattr(step, "ahead", 0)
            yield from self.leave(n for n in self.here if _model(n) in rivals or self._ahead(n) != ahead)
            yield from self._bring(self.facts.needs(step), step)
        yield step
        self._note(step)

    def _loop(self, loop: UpdateLoop) -> Iterator[Step]:
        """A model that computes alone among those of its group comes before the first mini-batch and stays."""
        yield from self.leave(self.here)
        working = {step.model for step in loop.body if step.op in NEEDED}
        stays = {model for model in working if not self.facts.rivals(model) & working}
        before = [*self.through(loop.before)]
        before += self.leave(n for n in self.here if _model(n) not in stays)
        needed: dict[str, dict[str, None]] = {}
        for step in (s for s in loop.body if s.op in NEEDED and s.model in stays):
            for layout, parts in self.facts.needs(step).items():
                needed.setdefault(layout, {}).update(dict.fromkeys(parts))
        before += self._bring({layout: tuple(parts) for layout, parts in needed.items()}, loop)
        body = [*self.through(loop.body)]
        body += self.leave(n for n in self.here if _model(n) not in stays)
        yield dataclasses.replace(loop, before=tuple(before), body=tuple(body))
        self._last.update(dict.fromkeys(self.here, loop))

    # ---- coming and going

    def _bring(self, needs: Mapping[str, Iterable[str]], step: Any) -> Iterator[Reload]:
        for layout, wanted in needs.items():
            held = self.here.get(layout, ())
            parts = tuple(part for part in wanted if part not in held)
            self.here[layout], self._last[layout] = (*held, *parts), step
            if parts:
                size = sum(self.facts.size(layout, part) for part in parts if self._is_kept(layout, part, step))
                yield Reload(f"{layout} for {step.name}", _model(layout), layout, parts, size, step.line,
                             getattr(step, "ahead", 0))

    def leave(self, layouts: Iterable[str]) -> Iterator[Offload]:
        for layout in tuple(layouts):
            parts, last = self.here.pop(layout), self._last[layout]
            written = [part for part in parts if (layout, part) in self.changed]
            size = sum(self.facts.size(layout, part) for part in written)
            self.changed -= {(layout, part) for part in written if part != GRADIENTS}
            yield Offload(f"{layout} after {last.name}", _model(layout), layout, parts, size, last.line,
                          getattr(last, "ahead", 0))

    def _is_kept(self, layout: str, part: str, step: Any) -> bool:
        """Whether the host has content for a part that comes back. Weights on their way to a sampler are on their way."""
        if part == GRADIENTS:
            return (layout, part) in self.changed
        return not (part == WEIGHTS and is_refilled(self.facts.plan, layout)) and getattr(step, "dst", "") != layout

    def _note(self, step: Any) -> None:
        """What a step has changed."""
        layout = f"{step.model}.train" if step.op in ("train", "optimizer") else ""
        if layout not in self.facts.layouts:
            refilled = step.op == "reshard" and is_refilled(self.facts.plan, step.dst)
            self.changed |= {(step.dst, WEIGHTS)} if step.op == "reshard" and not refilled else set()
        elif step.op == "train":
            self.changed.add((layout, GRADIENTS))
        else:
            self.changed |= {(layout, WEIGHTS), (layout, OPTIMIZER)}
            self.changed.discard((layout, GRADIENTS))

    def _ahead(self, layout: str) -> int:
        return getattr(self._last[layout], "ahead", 0)


def is_refilled(plan: Plan, layout: str) -> bool:
    """Whether weights of a layout come from another one whenever they are needed, so that nobody keeps them."""
    home = f"{_model(layout)}.train", f"{_model(layout)}.forward"
    return layout.endswith(GENERATE) and any(n in plan.layouts for n in home) and _model(layout) in changing(plan)


def _model(layout: str) -> str:
    return layout.rpartition(".")[0]
