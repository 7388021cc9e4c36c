"""The numbers of devices that a set of models may get, and the ways to divide models into sets."""

from __future__ import annotations

from typing import Iterator, Sequence

from compiler.machine import Machine


def device_counts(machine: Machine) -> tuple[int, ...]:
    """Parts of a node that divide it, and whole nodes."""
    each = machine.devices_per_node
    parts = [n for n in range(1, each) if each % n == 0]
    return (*parts, *(each * n for n in range(1, machine.nodes + 1)))


def partitions(items: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to divide `items` into sets; sets and their members in the order of `items`."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        yield ((first,), *smaller)
        for i, group in enumerate(smaller):
            yield ((first, *group), *smaller[:i], *smaller[i + 1:])
