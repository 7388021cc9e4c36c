"""The placement of a program on a described cluster."""

from __future__ import annotations

import math
from typing import Mapping

from compiler.cluster import Cluster
from compiler.cost.workload import Workload
from compiler.search.derive import workload_of
from compiler.search.infeasible import MOST_NODES, Need, need
from compiler.search.placement import Found, search
from compiler.shapes import ModelShape
from rlhf_dsl.diagnostics import DiagnosticError, fault
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Checked


def placement_on(checked: Checked, shapes: Mapping[str, ModelShape], cluster: Cluster) -> tuple[Workload, Found]:
    """What the program asks, and the best placement. Raises DiagnosticError P0113 to P0115 where nothing fits."""
    workload = workload_of(checked, shapes)
    found = search(workload, cluster.machines)
    if found is None:
        raise _infeasible(checked, cluster, need(workload, cluster.machines))
    return workload, found


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
