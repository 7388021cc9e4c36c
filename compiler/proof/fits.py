"""Whether a plan fits a described cluster: as many devices, and the memory of each."""

from __future__ import annotations

from typing import Iterator

from compiler.cluster import Cluster
from compiler.cost import CostModel
from compiler.groups import groups_of
from compiler.plan import Plan
from rlhf_dsl.diagnostics import fault

ROUNDING = 1e-9  # share by which sums of the same numbers in another order may differ


def require_fit(plan: Plan, cluster: Cluster, place: str) -> None:
    """Raises DiagnosticError P0204 with the first thing that does not fit."""
    reason = next(fit_faults(plan, cluster), None)
    if reason is not None:
        raise fault("P0204", place=place, cluster=cluster.name, reason=reason)


def fit_faults(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """What does not fit. Memory is that of the cost model, with models that share ranks taking turns."""
    if plan.world > cluster.devices:
        yield f"it has {plan.world} ranks, there are {cluster.devices} devices"
        return
    pools = {machine.name: machine for machine in cluster.machines}
    costs = CostModel(plan, cluster)
    for group in groups_of(plan):
        names = ", ".join(group.members)
        if group.pool and group.pool not in pools:
            yield f"{names} run on `{group.pool}`, which it does not have"
            continue
        machine = costs.machine(group.members[0])
        if group.ranks > machine.devices:
            yield f"{names} have {group.ranks} ranks, {machine.name} has {machine.devices} devices"
        need = costs.peak(group.members)
        if need > machine.usable * (1 + ROUNDING):
            yield f"{names} need {need / 1e9:.1f} GB on the fullest rank, a plan may fill {machine.usable / 1e9:.1f}"
