"""Degrees of parallelism that a model can take."""

from __future__ import annotations

from typing import Iterator, NamedTuple

from compiler.cost.sizes import Sizes
from compiler.machine import Machine


class Degrees(NamedTuple):
    tp: int
    pp: int
    dp: int

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp} dp{self.dp}"


def tensor_degrees(machine: Machine, sizes: Sizes, devices: int, across: bool = False) -> tuple[int, ...]:
    """Those that divide `devices`, heads and inner width, and divide the key/value heads or are a multiple of them.

    across: beyond a node too, for a model that does not fit otherwise
    """
    most = devices if across else min(devices, machine.devices_per_node)
    return tuple(t for t in _divisors(devices, most) if _cuts(sizes, t) and _tiles(machine, t))


def train_degrees(machine: Machine, sizes: Sizes, devices: int) -> Iterator[Degrees]:
    """All degrees whose product is `devices`; pp divides the layers."""
    for tp in tensor_degrees(machine, sizes, devices):
        for pp in _divisors(devices // tp, sizes.layers):
            if sizes.layers % pp == 0:
                yield Degrees(tp, pp, devices // (tp * pp))


def _cuts(sizes: Sizes, tp: int) -> bool:
    shares = sizes.kv_heads % tp == 0 or tp % sizes.kv_heads == 0
    return sizes.heads % tp == 0 and sizes.ffn % tp == 0 and shares


def _tiles(machine: Machine, tp: int) -> bool:
    """Whether tensor groups lie in a node or fill nodes."""
    return machine.devices_per_node % tp == 0 or tp % machine.devices_per_node == 0


def _divisors(number: int, most: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, min(number, most) + 1) if number % d == 0)
