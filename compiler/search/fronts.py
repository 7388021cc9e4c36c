"""What sets of colocated models can reach on a number of devices: models of a set take turns within a stage."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import NamedTuple, Sequence

from compiler.cost.workload import PlacedModel, Workload
from compiler.machine import Machine
from compiler.search.options import Option, options
from compiler.search.thinning import COARSE, Near, thinned, thinned_with_memory


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

    def __init__(self, workload: Workload, machines: Sequence[Machine], near: Near = COARSE) -> None:
        self.workload, self.machines, self.near = workload, tuple(machines), near
        self.kinds = tuple(self._kind(model) for model in workload.models)
        self._points: dict[tuple, tuple[Point, ...]] = {}
        self._relaxed: dict[tuple, tuple[Point, ...]] = {}
        self._options: dict[tuple, tuple[Option, ...]] = {}
        self._fast: dict[tuple, tuple[Option, ...]] = {}

    def _kind(self, model: PlacedModel) -> int:
        """The index of the first model that is asked the same."""
        return next(i for i, other in enumerate(self.workload.models) if self._asked(other) == self._asked(model))

    def _asked(self, model: PlacedModel) -> tuple:
        calls = ((i, dataclasses.replace(call, model="")) for i, call in self.workload.calls(model.name))
        bound = [pair for pair in self.workload.together if model.name in pair]
        return model.role, model.shape, model.trained, model.asked, tuple(calls), bound and model.name

    def key(self, members: Sequence[int]) -> tuple[int, ...]:
        """The kinds of a set of models, given by their indices."""
        return tuple(sorted(self.kinds[m] for m in members))

    def of_model(self, kind: int, pool: int, devices: int) -> tuple[Option, ...]:
        where = (kind, pool, devices)
        if where not in self._options:
            self._options[where] = options(self.machines[pool], self.workload, self.workload.models[kind], devices,
                                           self.near)
        return self._options[where]

    def of_set(self, key: tuple[int, ...], pool: int, devices: int) -> tuple[Point, ...]:
        """Points in which all models of the set use all of the devices; () if they do not fit."""
        where = (key, pool, devices)
        if where not in self._points:
            lists = [self.of_model(kind, pool, devices) for kind in key]
            usable = self.machines[pool].usable
            relaxed = self.relaxed(key, pool, devices)
            fits = relaxed and self.fit_together(key, pool, devices)
            self._points[where] = relaxed if fits else bound_front(lists, usable, self.near) if relaxed else ()
        return self._points[where]

    def relaxed(self, key: tuple[int, ...], pool: int, devices: int) -> tuple[Point, ...]:
        """The front if each model had the memory for itself: no point of the set is faster in all stages."""
        where = (key, pool, devices)
        if where not in self._relaxed:
            fast = [self._fastest(kind, pool, devices) for kind in key]
            self._relaxed[where] = tuple(_free(fast, self.near)) if all(fast) else ()
        return self._relaxed[where]

    def fit_together(self, key: tuple[int, ...], pool: int, devices: int) -> bool:
        fast = [self._fastest(kind, pool, devices) for kind in key]
        resident = sum(max(o.resident for o in one) for one in fast)
        return resident + max(o.work for one in fast for o in one) <= self.machines[pool].usable

    def _fastest(self, kind: int, pool: int, devices: int) -> tuple[Option, ...]:
        where = (kind, pool, devices)
        if where not in self._fast:
            self._fast[where] = tuple(thinned(self.of_model(kind, pool, devices), _times, self.near))
        return self._fast[where]


def bound_front(lists: Sequence[Sequence[Option]], usable: float, near: Near) -> tuple[Point, ...]:
    """The front under the limit of memory: what is resident adds up, and the greatest work comes on top.

    For each limit on the work, models choose freely among what is below it, as long as residents fit in the rest.
    """
    points: list[Point] = []
    known = None
    for limit in _limits({o.work for one in lists for o in one}, usable, near):
        below = _within([[o for o in one if o.work <= limit] for one in lists], usable - limit)
        if not all(below) or beaten(_added(*_reach(below)), points, near):
            continue
        fast = [thinned(one, _times, near) for one in below]
        if fast == known:
            continue
        free = sum(max(o.resident for o in one) for one in fast) + limit <= usable
        known = fast if free else None
        points += _free(fast, near) if free else _resident(below, usable - limit, near, points)
        points = thinned(points, _times, near)
    return tuple(points)


def _within(lists: Sequence[Sequence[Option]], room: float) -> list[list[Option]]:
    """Options that leave room for the smallest of the other models."""
    if not all(lists):
        return [[]]
    floor = [min(o.resident for o in one) for one in lists]
    spare = room - sum(floor)
    return [[o for o in one if o.resident <= spare + least] for one, least in zip(lists, floor)]


def _reach(lists: Sequence[Sequence[Option]]) -> list[tuple[float, ...]]:
    """By model, the least seconds of each stage."""
    return [tuple(map(min, zip(*(o.times for o in one)))) for one in lists]


def _limits(works: set[float], usable: float, near: Near) -> Sequence[float]:
    """Limits of the work, ascending: each that occurs, or steps of what counts as near."""
    if not near.total:
        return sorted(works)
    step = usable * near.total / 2
    return sorted({min(math.ceil(work / step) * step, usable) for work in works})


def _free(lists: Sequence[Sequence[Option]], near: Near) -> list[Point]:
    """The front of all combinations."""
    points = [Point((0.0,) * len(lists[0][0].times), ())]
    for one in lists:
        points = thinned((Point(_added(p.times, o.times), (*p.options, o)) for p in points for o in one), _times, near)
    return points


def _resident(lists: Sequence[Sequence[Option]], usable: float, near: Near, known: Sequence[Point]) -> list[Point]:
    """The front of combinations whose residents are at most `usable` and that no known point beats."""
    floor = [min(o.resident for o in one) for one in lists]
    partials = [_Partial((0.0,) * len(lists[0][0].times), 0.0, 0.0, ())]
    single = [thinned_with_memory((_joined(partials[0], o) for o in one), usable, near) for one in lists]
    reach = _reach(lists)
    for i, one in enumerate(single):
        room = usable - sum(floor[i + 1:])
        ahead = _added((0.0,) * len(reach[i]), *reach[i + 1:])
        joined = (_appended(p, o) for p in partials for o in one if p.resident + o.resident <= room)
        open_ = (p for p in joined if not beaten(_added(p.times, ahead), known, near))
        partials = thinned_with_memory(open_, usable, near)
    return [Point(p.times, p.options) for p in partials]


def beaten(times: tuple[float, ...], known: Sequence[Point], near: Near) -> bool:
    """Whether a point is as fast as `times` in each stage, or nearly so."""
    wider = tuple(t * (1 + near.time) for t in times)
    for point in known:
        if all(map(operator.le, point.times, wider)):
            return True
    return False


def _appended(partial: _Partial, other: _Partial) -> _Partial:
    return _Partial(_added(partial.times, other.times), partial.resident + other.resident, 0.0,
                    (*partial.options, *other.options))


def _joined(partial: _Partial, option: Option) -> _Partial:
    return _Partial(_added(partial.times, option.times), partial.resident + option.resident, 0.0,
                    (*partial.options, option))


def _added(*times: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(operator.add, *times)) if len(times) == 2 else tuple(map(sum, zip(*times)))


def _times(item) -> tuple[float, ...]:
    return item.times
