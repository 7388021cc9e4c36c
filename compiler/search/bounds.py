"""Lower bounds: what sets of models can reach at best, stage by stage, if they divide a number of devices."""

from __future__ import annotations

import math
from bisect import bisect_left
from operator import le
from typing import Iterator, NamedTuple, Optional

from compiler.search.fronts import Fronts, Point, beaten
from compiler.search.space import device_counts

FINE = 128  # steps in which devices are counted in bounds


class Entry(NamedTuple):
    """A point of a set, and where."""

    pool: int
    devices: int
    point: Point


class Bounds:
    """Entries and bounds by set, computed when they are asked for."""

    def __init__(self, fronts: Fronts) -> None:
        self.fronts = fronts
        self.devices = sum(machine.devices for machine in fronts.machines)
        self.unit = max(1, self.devices // FINE)
        self._stages = len(fronts.workload.stages)
        self._fewest: dict[tuple, int] = {}
        self._at: dict[tuple, Optional[list[float]]] = {}
        self._places: dict[tuple, tuple] = {}
        self._entries: dict[tuple, tuple[Entry, ...]] = {}
        self._known: dict[tuple, list] = {}
        self._least: dict[tuple, list[list[float]]] = {(): [[0.0] * (self._top + 1)] * self._stages}

    @property
    def _top(self) -> int:
        return -(-self.devices // self.unit)

    def places(self, key: tuple[int, ...]) -> tuple[tuple[int, int, tuple[Point, ...]], ...]:
        """(pool, devices, relaxed points) wherever each model of the set fits alone and more devices are of use."""
        if key not in self._places:
            found = [place for pool in range(len(self.fronts.machines)) for place in self._places_in(pool, key)]
            self._places[key] = tuple(found)
        return self._places[key]

    def _places_in(self, pool: int, key: tuple[int, ...]) -> Iterator[tuple[int, int, tuple[Point, ...]]]:
        """A place is of no use if what it could reach at best is reached on fewer devices."""
        reached: list[Point] = []
        for n in device_counts(self.fronts.machines[pool]):
            points = self.fronts.relaxed(key, pool, n)
            if not points or all(beaten(p.times, reached, self.fronts.near) for p in points):
                continue
            if self.fronts.fit_together(key, pool, n):
                reached += points
            yield pool, n, points

    def entries(self, key: tuple[int, ...], pool: int, devices: int) -> tuple[Entry, ...]:
        """The points of a set there, without those that another is known to reach on no more devices."""
        where = (key, pool, devices)
        if where not in self._entries:
            known = self._known.setdefault((key, pool), [])
            fresh = [Entry(pool, devices, p) for p in self.fronts.of_set(key, pool, devices)]
            fresh = [e for e in fresh if not any(n < devices and all(map(le, t, e.point.times)) for t, n in known)]
            known.extend((entry.point.times, devices) for entry in fresh)
            self._entries[where] = tuple(fresh)
        return self._entries[where]

    def fewest(self, keys: tuple) -> int:
        """The devices that sets need at least; 0 for sets that fit nowhere."""
        if keys not in self._fewest:
            self._fewest[keys] = sum(min((n for _, n, _ in self.places(key)), default=0) for key in keys)
        return self._fewest[keys]

    def least(self, keys: tuple, devices: int) -> Optional[list[float]]:
        """By stage, a bound on the seconds of sets that share `devices` devices; None if they do not fit."""
        units = -(-devices // self.unit)
        if (keys, units) not in self._at:
            least = [table[units] for table in self._tables(keys)]
            self._at[keys, units] = None if math.inf in least else least
        return self._at[keys, units]

    def _tables(self, keys: tuple) -> list[list[float]]:
        """By stage and number of units, as `least`."""
        if keys not in self._least:
            rest = self._tables(keys[1:])
            self._least[keys] = [_merged(self._alone(keys[0], i), rest[i]) for i in range(self._stages)]
        return self._least[keys]

    def _alone(self, key: tuple[int, ...], stage: int) -> list[float]:
        """By number of units, the least seconds of one set; devices are rounded down, which only lowers the bound."""
        table = [math.inf] * (self._top + 1)
        for _, devices, points in self.places(key):
            units = devices // self.unit
            table[units] = min(table[units], min(point.times[stage] for point in points))
        for units in range(self._top):
            table[units + 1] = min(table[units], table[units + 1])
        return table


def _merged(one: list[float], rest: list[float]) -> list[float]:
    """By budget, min over n of max(one[n], rest[budget - n]), both falling: it is where they cross."""
    merged = []
    for budget in range(len(one)):
        n = bisect_left(range(budget + 1), True, key=lambda n: one[n] <= rest[budget - n])
        after = one[n] if n <= budget else math.inf
        merged.append(min(max(one[n], rest[budget - n]) if n <= budget else after,
                          max(one[n - 1], rest[budget - n + 1]) if n else math.inf))
    return merged
