"""Why nothing fits, and what would be enough."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, Optional, Sequence

from compiler.cost.workload import PlacedModel, Workload
from compiler.machine import Machine
from compiler.search.options import options
from compiler.search.placement import search
from compiler.search.space import device_counts

MOST_NODES = 256


class Need(NamedTuple):
    """model: the one that does not fit even alone, "" if only all together do not.

    least: bytes on each device that it needs at best, inf if the cluster has no layout as `plan:` asks for
    layout: in which; usable: bytes that a device has for it
    enough: the number of such nodes that would be enough, None if no number up to MOST_NODES is
    """

    model: str
    least: float
    layout: str
    usable: float
    enough: Optional[int]


def need(workload: Workload, machines: Sequence[Machine]) -> Need:
    """The first model that fits on no part of the cluster, or what all of them together need."""
    total = 0.0
    for model in workload.models:
        ways = [(*least_memory(machine, workload, model), machine) for machine in machines]
        least, layout, machine = min(ways, key=lambda way: way[0] / way[2].usable)
        if least == math.inf:
            return Need(model.name, least, "", machine.usable, None)
        if least > machine.usable:
            return Need(model.name, least, layout, machine.usable, _enough(workload, machine))
        total += least
    largest = max(machines, key=lambda m: m.devices * m.usable)
    return Need("", total, "", largest.usable, _enough(workload, largest))


def least_memory(machine: Machine, workload: Workload, model: PlacedModel) -> tuple[float, str]:
    """(bytes on a device, layout) of the way to run `model` on the whole machine that needs the least memory."""
    endless = dataclasses.replace(machine, memory=1e18)
    counts = [model.asked.devices] if model.asked.devices else device_counts(machine)[::-1]
    ways = next(filter(None, (options(endless, workload, model, n) for n in counts if n <= machine.devices)), ())
    if not ways:
        return math.inf, ""
    best = min(ways, key=lambda o: o.resident + o.work)
    return best.resident + best.work, str(best.choice.layout)


def _enough(workload: Workload, machine: Machine) -> Optional[int]:
    nodes = machine.nodes
    while nodes < MOST_NODES:
        nodes *= 2
        if search(workload, [dataclasses.replace(machine, nodes=nodes)], keep=1) is not None:
            return nodes
    return None
