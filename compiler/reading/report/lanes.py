"""The timeline of an iteration: a lane for each group of ranks, one for rows on their way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterator

from compiler.cost import CostModel, timeline
from compiler.cost.timeline import Span
from compiler.drawing.model import short
from compiler.groups import groups_of
from compiler.plan import Plan
from compiler.reading.tables import title_of, told
from compiler.reading.units import plural, seconds_text
from compiler.steps import HOME, UpdateLoop

TICKS = 8  # at most


@dataclass(frozen=True)
class Block:
    """Seconds since the iteration began. label: in short; model: whose work it is, "" for none; tip: in full"""

    title: str
    label: str
    model: str
    start: float
    end: float
    tip: str


@dataclass(frozen=True)
class Bracket:
    """A loop, whose steps are drawn as if each model did all its mini-batches in one."""

    title: str
    start: float
    end: float


@dataclass(frozen=True)
class Lanes:
    """groups: blocks by group, in the order of the plan's; moving: rows on their way"""

    groups: tuple[tuple[Block, ...], ...]
    moving: tuple[Block, ...]
    brackets: tuple[Bracket, ...]
    seconds: float

    @property
    def ticks(self) -> tuple[float, ...]:
        """Round seconds along the axis."""
        if not self.seconds:
            return (0.0,)
        rough = self.seconds / TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough * (1 - 1e-9))
        return tuple(i * step for i in range(int(self.seconds / step * (1 + 1e-9)) + 1))


def lanes_of(plan: Plan, costs: CostModel) -> Lanes:
    return _Lanes(plan, timeline(costs)).made()


class _Lanes:
    def __init__(self, plan: Plan, spans: tuple[Span, ...]) -> None:
        self.plan, self.spans = plan, {id(span.step): span for span in spans}
        self.blocks: list[tuple[tuple[int, ...], Block]] = []
        self.end = max((span.end for span in spans), default=0.0)

    def made(self) -> Lanes:
        brackets = []
        for step in self.plan.steps:
            if isinstance(step, UpdateLoop):
                self.loop(step)
                times = plural(step.epochs * step.minibatches, "mini-batch", "mini-batches")
                span = self.spans[id(step)]
                brackets.append(Bracket(f"{step.name}: {times}", span.start, span.end))
            else:
                self.add(self.spans[id(step)])
        lanes = tuple(tuple(b for groups, b in self.blocks if i in groups) for i in range(len(groups_of(self.plan))))
        moving = tuple(b for groups, b in self.blocks if not groups)
        return Lanes(lanes, moving, tuple(brackets), self.end)

    def add(self, span: Span) -> None:
        self.blocks.append((span.groups, _block(span.step, span.start, span.end, "")))

    def loop(self, loop: UpdateLoop) -> None:
        """Each group's steps one after another, as long as all their repetitions together take."""
        for step in loop.before:
            self.add(self.spans[id(step)])
        times, span = loop.epochs * loop.minibatches, self.spans[id(loop)]
        first = max((self.spans[id(step)].end for step in loop.before), default=span.start)
        at = dict.fromkeys((*range(len(groups_of(self.plan))), None), first)
        for step in loop.body:
            one = self.spans[id(step)]
            lanes = one.groups or (None,)
            start = max(at[lane] for lane in lanes)
            end = start + times * (one.end - one.start)
            self.blocks.append((one.groups, _block(step, start, end, f" in {times} times")))
            at.update(dict.fromkeys(lanes, end))


def _block(step, start: float, end: float, times: str) -> Block:
    tip = f"{told(step)}: {seconds_text(end - start)}{times}"
    return Block(title_of(step), short(step.name), _model_of(step), start, end, tip)


def _model_of(step) -> str:
    if step.op == "transfer":
        return next(place for place in (step.src, step.dst) if place != HOME).rpartition(".")[0]
    return getattr(step, "model", "")


def rows(lanes: Lanes) -> Iterator[tuple[int, Block]]:
    """(group, block) of what a group computes, in time: the timeline as a table."""
    found = [(group, block) for group, blocks in enumerate(lanes.groups) for block in blocks if block.model]
    yield from sorted(found, key=lambda pair: (pair[1].start, pair[0]))
