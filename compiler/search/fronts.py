"""What sets of colocated models can reach on a number of devices: models of a set take turns within a stage."""

from __future__ import annotations

import dataclasses
import operator
from typing import NamedTuple, Sequence

from compiler.cost.workload import PlacedModel, Workload
from compiler.machine import Machine
from compiler.search.options import Option, options, pareto


class Point(NamedTuple):
    """One way to run a set: seconds by stage, and one option for each of its models."""

    times: tuple[float, ...]
    options: tuple[Option, ...]


class _Partial(NamedTuple):
    times: tuple[float, ...]
    resident: float
    work: float
    options: tuple[Option, ...]


class Fronts:
    """Undominated points by set and number of devices, each computed once.

    Models that are asked the same (shape, role, calls) share all of them.
    """

    def __init__(self, workload: Workload, machines: Sequence[Machine]) -> None:
        self.workload, self.machines = workload, tuple(machines)
        self.kinds = tuple(self._kind(model) for model in workload.models)
        self._points: dict[tuple, tuple[Point, ...]] = {}
        self._options: dict[tuple, tuple[Option, ...]] = {}
        self._fast: dict[tuple, tuple[Option, ...]] = {}

    def _kind(self, model: PlacedModel) -> int:
        """The index of the first model that is asked the same."""
        return next(i for i, other in enumerate(self.workload.models) if self._asked(other) == self._asked(model))

    def _asked(self, model: PlacedModel) -> tuple:
        calls = ((i, dataclasses.replace(call, model="")) for i, call in self.workload.calls(model.name))
        return model.role, model.shape, model.trained, tuple(calls)

    def key(self, members: Sequence[int]) -> tuple[int, ...]:
        """The kinds of a set of models, given by their indices."""
        return tuple(sorted(self.kinds[m] for m in members))

    def of_model(self, kind: int, pool: int, devices: int) -> tuple[Option, ...]:
        where = (kind, pool, devices)
        if where not in self._options:
            self._options[where] = options(self.machines[pool], self.workload, self.workload.models[kind], devices)
        return self._options[where]

    def of_set(self, key: tuple[int, ...], pool: int, devices: int) -> tuple[Point, ...]:
        """Points in which all models of the set use all of the devices; () if they do not fit."""
        where = (key, pool, devices)
        if where not in self._points:
            lists = [self.of_model(kind, pool, devices) for kind in key]
            usable = self.machines[pool].usable
            self._points[where] = self._unbound(key, pool, devices, lists) or _bound(lists, usable)
        return self._points[where]

    def _unbound(self, key, pool, devices, lists) -> tuple[Point, ...]:
        """The front where memory excludes nothing that time alone would choose; () if it may."""
        fastest = [self._fastest(kind, pool, devices) for kind in key]
        if not all(fastest):
            return ()
        resident = sum(max(o.resident for o in one) for one in fastest)
        work = max(o.work for one in fastest for o in one)
        if resident + work > self.machines[pool].usable:
            return ()
        points = [Point((0.0,) * len(self.workload.stages), ())]
        for one in fastest:
            points = pareto((Point(_added(p.times, o.times), (*p.options, o)) for p in points for o in one), _times)
        return tuple(points)

    def _fastest(self, kind: int, pool: int, devices: int) -> tuple[Option, ...]:
        where = (kind, pool, devices)
        if where not in self._fast:
            self._fast[where] = tuple(pareto(self.of_model(kind, pool, devices), _times))
        return self._fast[where]


def _bound(lists: Sequence[Sequence[Option]], usable: float) -> tuple[Point, ...]:
    """The front under the limit of memory: what is resident adds up, and the greatest work comes on top."""
    if not all(lists):
        return ()
    least = [min(o.resident for o in one) for one in lists]
    partials = [_Partial((0.0,) * len(lists[0][0].times), 0.0, 0.0, ())]
    for i, one in enumerate(lists):
        rest = sum(least[i + 1:])
        joined = (_joined(p, o) for p in partials for o in one)
        partials = pareto((p for p in joined if p.resident + p.work + rest <= usable), _memory_too)
    return tuple(pareto((Point(p.times, p.options) for p in partials), _times))


def _joined(partial: _Partial, option: Option) -> _Partial:
    return _Partial(_added(partial.times, option.times), partial.resident + option.resident,
                    max(partial.work, option.work), (*partial.options, option))


def _added(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(operator.add, one, other))


def _times(item) -> tuple[float, ...]:
    return item.times


def _memory_too(partial: _Partial) -> tuple[float, ...]:
    return (*partial.times, partial.resident, partial.resident + partial.work)
