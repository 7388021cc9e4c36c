"""The placement of a program on a described cluster."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Callable, Mapping, Optional

from compiler.cluster import Cluster
from compiler.machine import Machine
from compiler.placement import Placement
from compiler.search.asked import require_possible
from compiler.search.derive import workload_of
from compiler.search.fronts import Fronts
from compiler.search.infeasible import MOST_NODES, Need, need
from compiler.search.placed import placement_of
from compiler.search.placement import TIME, Found, Progress, search
from compiler.shapes import ModelShape
from rlhf_dsl.diagnostics import DiagnosticError, fault
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Checked


Told = Callable[[Found], None]


def untold(found: Found) -> None:
    """Hears nothing."""


@dataclass(frozen=True)
class Searched:
    """Places programs by a search; called as `compiler.placement.place`. told: gets what was found"""

    objective: str = TIME
    progress: Optional[Progress] = None
    told: Told = untold

    def __call__(self, checked: Checked, shapes: Mapping[str, ModelShape], cluster: Cluster,
                 ranks: Optional[int]) -> Placement:
        """Raises DiagnosticError P01."""
        machines = some_devices(cluster, ranks) if ranks else cluster.machines
        cluster = dataclasses.replace(cluster, machines=machines)
        fronts, found = placement_on(checked, shapes, cluster, self.objective, self.progress)
        self.told(found)
        return placement_of(checked, fronts, found, self.objective, ranks)


def placement_on(checked: Checked, shapes: Mapping[str, ModelShape], cluster: Cluster, objective: str = TIME,
                 progress: Optional[Progress] = None) -> tuple[Fronts, Found]:
    """What the program asks and what that costs, and the best placement. Raises DiagnosticError P01."""
    require_possible(checked, shapes, cluster)
    workload = workload_of(checked, shapes)
    fronts = Fronts(workload, cluster.machines)
    found = search(workload, cluster.machines, objective, progress=progress, fronts=fronts)
    if found is None:
        raise _infeasible(checked, cluster, need(workload, cluster.machines))
    return fronts, found


def some_devices(cluster: Cluster, count: int) -> tuple[Machine, ...]:
    """The first `count` devices of a cluster: whole nodes, or a part of one. Raises DiagnosticError P0106, P0116."""
    if count > cluster.devices:
        raise fault("P0106", ranks=count, devices=cluster.devices)
    machines: list[Machine] = []
    left = count
    for machine in cluster.machines:
        taken = min(left, machine.devices)
        nodes, rest = divmod(taken, machine.devices_per_node)
        if rest and (nodes or machines):
            raise fault("P0116", ranks=count, cluster=cluster.name, each=machine.devices_per_node, less=count - rest)
        if taken:
            part = {"nodes": 1, "devices_per_node": rest} if rest else {"nodes": nodes}
            machines.append(dataclasses.replace(machine, **part))
        left -= taken
    return tuple(machines)


def _infeasible(checked: Checked, cluster: Cluster, found: Need) -> DiagnosticError:
    each = max(cluster.machines, key=lambda m: m.devices * m.usable)
    enough = f"{found.enough} nodes like those of {each.name} would be enough"
    if not found.enough:
        enough = f"not even {MOST_NODES} such nodes would be enough; take devices with more memory"
    words = {"cluster": cluster.name, "least": found.least / 1e9, "usable": found.usable / 1e9, "enough": enough}
    if not found.model:
        return fault("P0114", place=checked.path, **words)
    span = checked.models[found.model].span
    if found.least == math.inf:
        return fault("P0115", span, source=Source(checked.path, checked.text), model=found.model, cluster=cluster.name)
    return fault("P0113", span, source=Source(checked.path, checked.text), model=found.model, **words)
