"""When each step of an iteration begins and ends, if ranks that do not wait for each other work side by side.

A step begins when its ranks are free and what it reads is there. Rows travel while ranks compute; whoever reads them
waits. Groups of ranks are as in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Iterator

from compiler.cost.model import CostModel
from compiler.steps import HOME, UpdateLoop

CALLS = ("generate", "forward", "train")
REPEATED = 4  # times that a loop's body is followed; the others take as long as the last


@dataclass(frozen=True)
class Span:
    """Seconds since the iteration began. groups: positions in `Plan.groups` of the ranks that are busy, () for rows"""

    step: Any
    groups: tuple[int, ...]
    start: float
    end: float


def iteration_seconds(costs: CostModel) -> float:
    """From the first step to the end of the last."""
    return max((span.end for span in timeline(costs)), default=0.0)


def timeline(costs: CostModel) -> tuple[Span, ...]:
    """Steps in the order of the plan; those of a loop once, its own span around all repetitions."""
    return tuple(_Clock(costs).run())


@dataclass
class _Clock:
    """Seconds: free, by group, when it is idle; home, by expression, when it is known there; there, by call, when its
    rows have come; done, by call, when its results leave."""

    costs: CostModel
    free: list[float] = field(init=False)
    home: dict[int, float] = field(default_factory=dict)
    there: dict[str, float] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = [0.0] * max(1, len(self.costs.plan.groups))

    @property
    def all(self) -> tuple[int, ...]:
        """The groups that a step at home keeps busy: ranks that do nothing but sample join in while they sample."""
        groups = self.costs.plan.groups
        return tuple(i for i, group in enumerate(groups) if group.models) or (0,)

    def idle(self) -> float:
        """When all of them are."""
        return max(self.free[group] for group in self.all)

    def run(self) -> Iterator[Span]:
        for step in self.costs.plan.steps:
            yield from self.loop(step) if isinstance(step, UpdateLoop) else [self.step(step, 1.0)]

    def loop(self, loop: UpdateLoop) -> Iterator[Span]:
        start = self.idle()
        before = [self.step(step, 1.0) for step in loop.before]
        times = loop.epochs * loop.minibatches
        marks, rounds = [self.idle()], []
        for _ in range(min(times, REPEATED)):
            rounds.append([self.step(step, 1 / loop.minibatches) for step in loop.body])
            marks.append(self.idle())
        late = (times - len(rounds)) * (marks[-1] - marks[-2])
        for group in self.all:
            self.free[group] += late
        yield Span(loop, self.all, start, self.idle())
        yield from (*before, *rounds[0])

    def step(self, step: Any, part: float) -> Span:
        groups, seconds = self._groups(step), self.costs.seconds(step, part)
        start = max((self._known(step), *(self.free[group] for group in groups)))
        end = start + seconds
        for group in groups:
            self.free[group] = end
        self._made(step, end)
        return Span(step, groups, start, end)

    def _groups(self, step: Any) -> tuple[int, ...]:
        """Those whose ranks a step keeps busy."""
        if step.op == "transfer":
            return ()
        apart = set(filter(self.costs.is_apart, (getattr(step, end, "") for end in ("layout", "src", "dst"))))
        busy = apart if apart and step.op == "generate" else apart | {getattr(step, "model", "")}
        mine = tuple(i for i, group in enumerate(self.costs.plan.groups) if busy.intersection(group.members))
        return mine or self.all

    def _known(self, step: Any) -> float:
        """When what a step reads is there."""
        if step.op == "transfer" and step.dst == HOME:
            return self.done.get(step.call, 0.0)
        if step.op in CALLS:
            return self.there.get(step.name, 0.0)
        return max(map(self._known_at_home, _expressions(step)), default=0.0)

    def _known_at_home(self, root: int) -> float:
        """When the values nearest below an expression are known."""
        found, stack, seen = 0.0, [root], set()
        while stack:
            expr = stack.pop()
            if expr in self.home:
                found = max(found, self.home[expr])
            elif expr not in seen:
                seen.add(expr)
                stack.extend(self.costs.plan.exprs[expr].args)
        return found

    def _made(self, step: Any, end: float) -> None:
        if step.op in CALLS:
            self.done[step.name] = end
        elif step.op == "transfer" and step.src == HOME:
            self.there[step.call] = max(end, self.there.get(step.call, 0.0))
        else:
            self.home.update(dict.fromkeys(_expressions(step), end))


def _expressions(step: Any) -> tuple[int, ...]:
    """Those that a step at home evaluates, or that it moves."""
    named = [v.expr for name in ("values", "exprs") for v in getattr(step, name, ())]
    return (*named, *([step.expr] if hasattr(step, "expr") else []))
