"""What a plan says of the search that placed it."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from compiler.cost.sizes import sizes_of
from compiler.cost.transition import transition_time
from compiler.cost.workload import GENERATE
from compiler.plan import Alternative, GroupBounds, GroupSpec, OtherSize, SearchSpec
from compiler.search.fronts import Fronts
from compiler.search.options import as_stored
from compiler.search.placement import Found, Group
from compiler.search.sizes import SetBounds, bounds_of_sets

Ranks = Callable[[Sequence[Group]], tuple[GroupSpec, ...]]


def search_told(fronts: Fronts, found: Found, objective: str) -> SearchSpec:
    bounds = zip(found.groups, bounds_of_sets(fronts, found, objective))
    told = tuple(_bounds(fronts, found, group, one) for group, one in bounds if one is not None)
    return SearchSpec(objective, found.considered, found.divisions, found.feasible, bounds=told, **_seen(fronts, found))


def runner_up(fronts: Fronts, found: Found, ranks: Ranks) -> Alternative:
    return Alternative(ranks(found.groups), found.iteration_s, **_seen(fronts, found))


def _seen(fronts: Fronts, found: Found) -> dict[str, Any]:
    return {"stages": _by_stage(fronts, found.stages), "transition": _transition(fronts, found),
            "memory": max(group.peak for group in found.groups)}


def _by_stage(fronts: Fronts, times: Sequence[float]) -> dict[str, float]:
    return {stage.name: seconds for stage, seconds in zip(fronts.workload.stages, times)}


def _transition(fronts: Fronts, found: Found) -> float:
    """Of the group that generates longest; 0 if nothing is generated."""
    kinds = [{call.kind for call in stage.calls} for stage in fronts.workload.stages]
    stage = next((i for i, kind in enumerate(kinds) if GENERATE in kind), None)
    if stage is None:
        return 0.0
    group, total = max(found.groups, key=lambda g: g.times[stage]), 0.0
    models = {m.name: m for m in fronts.workload.models}
    for placed in group.models:
        if placed.choice.generate:
            model = models[placed.model]
            machine = as_stored(fronts.machines[group.pool], model)
            total += transition_time(machine, sizes_of(model.shape, model.role), placed.choice.layout,
                                     placed.choice.generate, model.asked.way)
    return total


def _bounds(fronts: Fronts, found: Found, group: Group, one: SetBounds) -> GroupBounds:
    others = tuple(OtherSize(other.devices, _by_stage(fronts, other.times),
                             _names(found.groups[other.giver]) if other.giver >= 0 else ()) for other in one.others)
    return GroupBounds(_names(group), one.least, others)


def _names(group: Group) -> tuple[str, ...]:
    return tuple(m.model for m in group.models)
