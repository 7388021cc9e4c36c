"""The groups of a plan: models that share ranks."""

from __future__ import annotations

from typing import Iterable, Iterator

from compiler.plan import GroupSpec, LayoutSpec, Plan


def groups_of(plan: Plan) -> tuple[GroupSpec, ...]:
    """Those of the plan; where it names none, all models share all ranks."""
    return plan.groups or ((GroupSpec(tuple(plan.models), 0, plan.world),) if plan.models else ())


def group_faults(plan: Plan) -> Iterator[str]:
    """Groups are disjoint, every model is in one of them, and its layouts have all of the group's ranks.

    Sampling of the next iteration's batch may be on ranks of no group.
    """
    groups = groups_of(plan)
    for name in plan.models:
        if sum(group.models.count(name) for group in groups) != 1:
            yield f"model `{name}` is not in one group"
    for group in groups:
        where = f"the group of {', '.join(group.models) or 'no model'}"
        if not group.models or any(name not in plan.models for name in group.models):
            yield f"{where} has models that the plan does not have"
        if group.ranks < 1 or group.first < 0 or group.first + group.ranks > plan.world:
            yield f"{where} has ranks outside the world of {plan.world}"
    ordered = sorted(groups, key=lambda g: g.first)
    for one, other in zip(ordered, ordered[1:]):
        if other.first < one.first + one.ranks:
            yield f"the groups of {', '.join(one.models)} and {', '.join(other.models)} share ranks"
    of = {name: group for group in groups for name in group.models}
    for name, spec in plan.layouts.items():
        if plan.run.lag and name.endswith(".generate") and not spec.within:
            yield from _apart_faults(name, spec, ordered)
            continue
        group = of.get(name.rpartition(".")[0])
        if group is not None and (spec.first, spec.ranks) != (group.first, group.ranks):
            yield f"layout `{name}` does not have the ranks of its group"


def _apart_faults(name: str, spec: LayoutSpec, groups: Iterable[GroupSpec]) -> Iterator[str]:
    for group in groups:
        if spec.first < group.first + group.ranks and group.first < spec.first + spec.ranks:
            yield f"layout `{name}` shares ranks with the group of {', '.join(group.models)} and is not within it"
