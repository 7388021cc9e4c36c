"""The best placement: every division of the models into sets, every number of devices for each, every layout.

HybridFlow's Algorithm 1 (arXiv 2409.19256, section 6) made exact: the sets of a partition run side by side, a stage
ends with its slowest set, and an iteration is the sum of its stages. Branch and bound finds the least.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Callable, Iterator, NamedTuple, Optional, Sequence

from compiler.cost.workload import Workload
from compiler.machine import Machine
from compiler.search.bounds import Bounds, Entry
from compiler.search.fronts import Fronts
from compiler.search.options import Choice, Option
from compiler.search.space import partitions
from rlhf_dsl.uncollected import uncollected

TIME, DEVICE_HOURS = "time", "device-hours"
OBJECTIVES = (TIME, DEVICE_HOURS)
Progress = Callable[[int, int, float], None]  # (steps done, all steps, seconds an iteration of the best so far)


class ModelPlacement(NamedTuple):
    """One model of a group: its option."""

    model: str
    option: Option

    @property
    def choice(self) -> Choice:
        return self.option.choice


@dataclass(frozen=True)
class Group:
    """Models that share `devices` devices of the cluster's part `pool`. times: seconds by stage."""

    models: tuple[ModelPlacement, ...]
    pool: int
    devices: int
    times: tuple[float, ...]

    @property
    def resident(self) -> float:
        return sum(m.option.resident for m in self.models)

    @property
    def peak(self) -> float:
        """Bytes on the fullest device."""
        return self.resident + max(m.option.work for m in self.models)


@dataclass(frozen=True)
class Found:
    """A placement. stages: seconds by stage, each that of its slowest group.

    alternatives: the best of other partitions
    considered: sets on devices that the search looked at; divisions: partitions that differ; feasible: those for which
    there are devices enough
    """

    groups: tuple[Group, ...]
    stages: tuple[float, ...]
    alternatives: tuple["Found", ...] = ()
    considered: int = 0
    divisions: int = 0
    feasible: int = 0
    search_s: float = 0.0

    @property
    def iteration_s(self) -> float:
        return sum(self.stages)

    @property
    def devices(self) -> int:
        return sum(group.devices for group in self.groups)

    def value(self, objective: str) -> float:
        return value(objective, self.iteration_s, self.devices)


def value(objective: str, seconds: float, devices: int) -> float:
    """What is minimized: seconds an iteration, or device-hours an iteration."""
    return seconds if objective == TIME else seconds * devices / 3600


def search(workload: Workload, machines: Sequence[Machine], objective: str = TIME, keep: int = 4,
           progress: Optional[Progress] = None, fronts: Optional[Fronts] = None) -> Optional[Found]:
    """The best placement and the best of the next `keep - 1` partitions, or None if there is none at all.

    fronts: costs that an earlier search of the same workload and machines computed.
    """
    began = time.perf_counter()
    run = _Search(workload, tuple(machines), objective, keep, fronts or Fronts(workload, machines))
    with uncollected():
        run.all(progress or (lambda done, total, best: None))
    if not run.best:
        return None
    first, *others = (run.found(solution) for solution in run.best)
    return Found(first.groups, first.stages, tuple(others), run.considered, run.divisions, run.feasible,
                 time.perf_counter() - began)


class _Solution(NamedTuple):
    value: float
    partition: tuple[tuple[int, ...], ...]
    entries: tuple[Entry, ...]


@dataclass
class _Search:
    workload: Workload
    machines: tuple[Machine, ...]
    objective: str
    keep: int
    fronts: Fronts
    best: list[_Solution] = field(default_factory=list)
    considered: int = 0
    divisions: int = 0
    feasible: int = 0

    def __post_init__(self) -> None:
        self.bounds = Bounds(self.fronts)
        self.gain = 1 - self.fronts.near.time / 2  # what is better by less is not looked for
        self.zero = (0.0,) * len(self.workload.stages)

    @property
    def limit(self) -> float:
        """A partition that cannot come below this is not among those to keep."""
        return self.best[-1].value * self.gain if len(self.best) == self.keep else math.inf

    def all(self, progress: Progress) -> None:
        todo, ranked = self._distinct(), []
        steps = 2 * len(todo)  # a bound of each, then the partitions by their bounds
        for i, (_, keys) in enumerate(todo):
            ranked.append((self._bound(keys, self.zero, self.bounds.devices, 0), i))
            progress(i, steps, math.inf)
        self.divisions, self.feasible = len(todo), sum(bound < math.inf for bound, _ in ranked)
        for done, (bound, i) in enumerate(sorted(ranked)):
            if bound >= self.limit:
                break
            self._partition(*todo[i])
            progress(len(todo) + done, steps, self._seconds())

    def _seconds(self) -> float:
        """Of an iteration, with the best so far."""
        return self.found(self.best[0]).iteration_s if self.best else math.inf

    def _distinct(self) -> list[tuple[tuple, tuple]]:
        """(partition, the keys of its sets), one of each kind, with the sets in order of their keys."""
        found = {}
        for partition in partitions(range(len(self.workload.models))):
            if not self._as_asked(partition):
                continue
            ordered = sorted(partition, key=self._order)
            found.setdefault(tuple(map(self.fronts.key, ordered)), tuple(ordered))
        return [(partition, keys) for keys, partition in found.items()]

    def _as_asked(self, partition: tuple[tuple[int, ...], ...]) -> bool:
        sets = [{self._names[m] for m in members} for members in partition]
        together = all(any({*pair} <= names for names in sets) for pair in self.workload.together)
        return together and all(set(alone) in sets for alone in self.workload.alone)

    def _order(self, members: Sequence[int]) -> tuple:
        """Large sets first: they decide most."""
        return -len(members), self.fronts.key(members), members

    def _bound(self, rest: tuple, times: tuple[float, ...], devices: int, used: int) -> float:
        """No completion of a placement with `times` so far, on `devices` left, has a lower value."""
        least = self.bounds.least(rest, devices)
        if least is None:
            return math.inf
        fewest = used + self.bounds.fewest(rest)
        return value(self.objective, sum(map(max, times, least)), fewest)

    def _partition(self, partition: tuple, keys: tuple) -> None:
        self._solution = None
        self._descend(partition, keys, (), self.zero, tuple(m.devices for m in self.machines))
        if self._solution is not None:
            self.best = sorted([*self.best, self._solution], key=lambda s: s.value)[:self.keep]

    def _descend(self, partition, rest, chosen, times, left) -> None:
        if not rest:
            used = sum(entry.devices for entry in chosen)
            self._solution = _Solution(value(self.objective, sum(times), used), partition, chosen)
            return
        used = sum(entry.devices for entry in chosen)
        for relaxed, pool, devices in sorted(self._places(rest, times, left, used)):
            if relaxed >= self._threshold:
                return
            remaining = tuple(n - devices * (i == pool) for i, n in enumerate(left))
            for bound, _, entry in self._children(rest, times, (pool, devices), sum(remaining), used):
                if bound >= self._threshold:
                    break
                self.considered += 1
                later = tuple(map(max, times, entry.point.times))
                self._descend(partition, rest[1:], (*chosen, entry), later, remaining)

    def _places(self, rest, times, left, used) -> Iterator[tuple[float, int, int]]:
        """(bound, pool, devices) for the next set, by what it could reach if memory were no limit."""
        threshold, total = self._threshold, sum(left)
        fewest = used + self.bounds.fewest(rest[1:])
        for pool, devices, points in self.bounds.places(rest[0]):
            least = self.bounds.least(rest[1:], total - devices) if devices <= left[pool] else None
            if least is None:
                continue
            seconds = min(sum(map(max, times, p.times, least)) for p in points)
            bound = value(self.objective, seconds, fewest + devices)
            if bound < threshold:
                yield bound, pool, devices

    def _children(self, rest, times, place, remaining, used) -> list[tuple[float, int, Entry]]:
        found = []
        for i, entry in enumerate(self.bounds.entries(rest[0], *place)):
            later = tuple(map(max, times, entry.point.times))
            found.append((self._bound(rest[1:], later, remaining, used + entry.devices), i, entry))
        return sorted(found)

    @property
    def _threshold(self) -> float:
        return self.limit if self._solution is None else min(self.limit, self._solution.value * self.gain)

    def found(self, solution: _Solution) -> Found:
        groups = tuple(self._group(members, entry) for members, entry in zip(solution.partition, solution.entries))
        groups = tuple(sorted(groups, key=lambda g: self._names.index(g.models[0].model)))
        return Found(groups, tuple(max(g.times[i] for g in groups) for i in range(len(self.zero))))

    @property
    def _names(self) -> list[str]:
        return [model.name for model in self.workload.models]

    def _group(self, members: Sequence[int], entry: Entry) -> Group:
        """The options of a point stand in the order of kinds."""
        ordered = sorted(members, key=lambda m: (self.fronts.kinds[m], m))
        placed = {m: ModelPlacement(self._names[m], o) for m, o in zip(ordered, entry.point.options)}
        return Group(tuple(placed[m] for m in members), entry.pool, entry.devices, entry.point.times)
