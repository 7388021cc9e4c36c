"""Lower bounds: what sets of models can reach at best, stage by stage, if they divide a number of devices."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple, Optional

from compiler.search.fronts import Fronts, Point
from compiler.search.space import device_counts
from compiler.search.thinning import pareto

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
        self._entries: dict[tuple, tuple[Entry, ...]] = {}
        self._least: dict[tuple, list[list[float]]] = {(): [[0.0] * (self._top + 1)] * self._stages}

    @property
    def _top(self) -> int:
        return -(-self.devices // self.unit)

    def entries(self, key: tuple[int, ...]) -> tuple[Entry, ...]:
        """The points of a set, without those that use no fewer devices of a pool than another that is as fast."""
        if key not in self._entries:
            found = []
            for pool, machine in enumerate(self.fronts.machines):
                points = [Entry(pool, n, p) for n in device_counts(machine) for p in self.fronts.of_set(key, pool, n)]
                found += pareto(points, lambda entry: (*entry.point.times, entry.devices))
            self._entries[key] = tuple(found)
        return self._entries[key]

    def fewest(self, keys: tuple) -> int:
        """The devices that sets need at least; 0 for sets that fit nowhere."""
        if keys not in self._fewest:
            least = (min((entry.devices for entry in self.entries(key)), default=0) for key in keys)
            self._fewest[keys] = sum(least)
        return self._fewest[keys]

    def least(self, keys: tuple, devices: int) -> Optional[list[float]]:
        """By stage, a bound on the seconds of sets that share `devices` devices of any pool; None if they do not fit."""
        tables = self._tables(keys)
        least = [table[-(-devices // self.unit)] for table in tables]
        return None if math.inf in least else least

    def _tables(self, keys: tuple) -> list[list[float]]:
        """By stage and number of units, as `least`."""
        if keys not in self._least:
            rest = self._tables(keys[1:])
            self._least[keys] = [_merged(self._alone(keys[0], i), rest[i]) for i in range(self._stages)]
        return self._least[keys]

    def _alone(self, key: tuple[int, ...], stage: int) -> list[float]:
        """By number of units, the least seconds of one set; devices are rounded down, which only lowers the bound."""
        table = [math.inf] * (self._top + 1)
        for entry in self.entries(key):
            units = entry.devices // self.unit
            table[units] = min(table[units], entry.point.times[stage])
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
