"""What bounds the number of devices of each set of a placement: the least that it fits on, and the next numbers."""

from __future__ import annotations

import dataclasses
from typing import Iterator, NamedTuple, Optional, Sequence

from compiler.search.fronts import Fronts
from compiler.search.placement import Found, Group, value
from compiler.search.space import device_counts
from compiler.search.thinning import thinned


class OtherSize(NamedTuple):
    """A placement with `devices` devices for one set. giver: the position of the set that has fewer for it, -1: none
    has; times: seconds by stage with the best layouts, () where the sets do not fit so"""

    devices: int
    giver: int
    times: tuple[float, ...]


class SetBounds(NamedTuple):
    """least: devices that a set needs at least; others: the next smaller and the next greater number, if there are any"""

    least: int
    others: tuple[OtherSize, ...]


def bounds_of_sets(fronts: Fronts, found: Found, objective: str) -> tuple[Optional[SetBounds], ...]:
    """Of the sets of a placement, in its order; None for one whose number of devices `plan:` says."""
    return tuple(_Sizes(fronts, found, objective, i).bounds() for i in range(len(found.groups)))


@dataclasses.dataclass(frozen=True)
class _Sizes:
    fronts: Fronts
    found: Found
    objective: str
    mine: int

    def bounds(self) -> Optional[SetBounds]:
        if any(self._model(name).asked.devices for name in self._names(self._group)):
            return None
        counts = device_counts(self._machine)
        least = next(n for n in counts if self._points(self.mine, n))
        fewer = [n for n in counts if n < self._group.devices][-1:]
        more = [n for n in counts if n > self._group.devices][:1]
        others = [self._other({self.mine: n}, -1) for n in fewer] + [self._greater(n) for n in more]
        return SetBounds(least, tuple(others))

    @property
    def _group(self) -> Group:
        return self.found.groups[self.mine]

    @property
    def _machine(self):
        return self.fronts.machines[self._group.pool]

    def _model(self, name: str):
        return next(m for m in self.fronts.workload.models if m.name == name)

    @staticmethod
    def _names(group: Group) -> list[str]:
        return [m.model for m in group.models]

    def _points(self, number: int, devices: int) -> Sequence:
        group = self.found.groups[number]
        names = [m.name for m in self.fronts.workload.models]
        return self.fronts.of_set(self.fronts.key([names.index(n) for n in self._names(group)]), group.pool, devices)

    def _greater(self, devices: int) -> OtherSize:
        """With devices that no set has, else with some of the set that does best without them."""
        pool = [(i, g) for i, g in enumerate(self.found.groups) if g.pool == self._group.pool]
        lacking = devices - self._group.devices - (self._machine.devices - sum(g.devices for _, g in pool))
        if lacking <= 0:
            return self._other({self.mine: devices}, -1)
        ways = [self._other({self.mine: devices, i: n}, i) for i, g in pool if i != self.mine
                for n in self._smaller(g.devices - lacking)]
        return min(ways, key=lambda way: (not way.times, sum(way.times)), default=OtherSize(devices, -1, ()))

    def _smaller(self, most: int) -> Iterator[int]:
        """The greatest number of devices up to `most`."""
        yield from [n for n in device_counts(self._machine) if n <= most][-1:]

    def _other(self, changed: dict[int, int], giver: int) -> OtherSize:
        reached: list[tuple[float, ...]] = [(0.0,) * len(self.found.stages)]
        devices = 0
        for i, group in enumerate(self.found.groups):
            count = changed.get(i, group.devices)
            devices += count
            joined = (tuple(map(max, times, p.times)) for times in reached for p in self._points(i, count))
            reached = thinned(joined, tuple, self.fronts.near)
        best = min(reached, key=lambda times: value(self.objective, sum(times), devices), default=())
        return OtherSize(changed[self.mine], giver, best)
