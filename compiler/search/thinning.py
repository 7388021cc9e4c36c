"""Leaves out what is not worth an option of its own: dominated ways, and, where asked, those that are barely better."""

from __future__ import annotations

import operator
from typing import Callable, Iterable, NamedTuple, TypeVar

Item = TypeVar("Item")


class Near(NamedTuple):
    """What counts as equal: shares of a time, and of a device's memory (what is resident, what is needed in all)."""

    time: float
    resident: float
    total: float


EXACT = Near(0.0, 0.0, 0.0)
COARSE = Near(0.01, 0.02, 0.05)


def pareto(items: Iterable[Item], key: Callable[[Item], tuple[float, ...]]) -> list[Item]:
    """Items whose key no other's is at most as large as in each place, of equal ones the first, in order of keys."""
    kept: list[Item] = []
    keys: list[tuple[float, ...]] = []
    for mine, _, item in sorted((key(item), i, item) for i, item in enumerate(items)):
        if not _covered(mine, keys):
            keys.append(mine)
            kept.append(item)
    return kept


def thinned(items: Iterable[Item], times: Callable[[Item], tuple[float, ...]], near: Near = EXACT) -> list[Item]:
    """As `pareto` by times alone, but for what is near; the least sum is always kept."""
    kept: list[Item] = []
    keys: list[tuple[float, ...]] = []
    for _, mine, _, item in sorted((sum(times(item)), times(item), i, item) for i, item in enumerate(items)):
        wider = tuple(t * (1 + near.time) for t in mine)
        if not _covered(wider, keys):
            keys.append(mine)
            kept.append(item)
    return kept


def thinned_with_memory(items: Iterable[Item], usable: float, near: Near = EXACT) -> list[Item]:
    """Items with `times`, `resident` and `work`; those with the least resident or the least in all are kept, too.

    Of several models on a device residents add up and the greatest work counts, so an item with less resident and
    less in all is never the worse one to have.
    """
    found = sorted((sum(x.times), x.times, x.resident, x.work, i, x) for i, x in enumerate(items))
    if not found:
        return []
    least = {min(found, key=lambda f: (f[2], f[2] + f[3]))[4], min(found, key=lambda f: (f[2] + f[3], f[2]))[4]}
    resident_near, total_near = usable * near.resident, usable * near.total
    kept: list[Item] = []
    keys: list[tuple[float, ...]] = []
    for _, mine, resident, work, i, item in found:
        wider = (*(t * (1 + near.time) for t in mine), resident + resident_near, resident + work + total_near)
        if i in least or not _covered(wider, keys):
            keys.append((*mine, resident, resident + work))
            kept.append(item)
    return kept


def _covered(wider: tuple[float, ...], keys: list[tuple[float, ...]]) -> bool:
    """Whether a key is at most `wider` in each place. One that covers comes to the front: it often does so again."""
    for place, other in enumerate(keys):
        if all(map(operator.le, other, wider)):
            if place:
                keys.insert(0, keys.pop(place))
            return True
    return False
