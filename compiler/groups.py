"""The groups of a plan: what shares ranks."""

from __future__ import annotations

from typing import Iterator

from compiler.plan import GroupSpec, Plan


def groups_of(plan: Plan) -> tuple[GroupSpec, ...]:
    """Those of the plan; where it names none, all models share all ranks."""
    return plan.groups or ((GroupSpec(tuple(plan.models), 0, plan.world),) if plan.models else ())


def layouts_of(plan: Plan, member: str) -> tuple[str, ...]:
    """The layouts that a member of a group has there: those of a model that are no samplers elsewhere, or a sampler."""
    samplers = {name for group in plan.groups for name in group.samplers}
    if member in samplers:
        return (member,)
    return tuple(n for n in plan.layouts if n.rpartition(".")[0] == member and n not in samplers)


def group_faults(plan: Plan) -> Iterator[str]:
    """Groups are disjoint, every model is in one of them, and each layout has all of the ranks of one.

    It is the group of its model, unless it samples the next iteration's batch on ranks of its own.
    """
    groups = groups_of(plan)
    for name in plan.models:
        if sum(group.models.count(name) for group in groups) != 1:
            yield f"model `{name}` is not in one group"
    for group in groups:
        where = f"the group of {', '.join(group.members) or 'no model'}"
        if not group.members or any(name not in plan.models for name in group.models):
            yield f"{where} has models that the plan does not have"
        if group.ranks < 1 or group.first < 0 or group.last >= plan.world:
            yield f"{where} has ranks outside the world of {plan.world}"
        yield from (f"{where} has the sampler `{s}`, which the plan does not have" for s in group.samplers
                    if not is_sampler(plan, s))
    ordered = sorted(groups, key=lambda g: g.first)
    for one, other in zip(ordered, ordered[1:]):
        if other.first <= one.last:
            yield f"the groups of {', '.join(one.members)} and {', '.join(other.members)} share ranks"
    of = {name: group for group in groups for name in group.members}
    for name, spec in plan.layouts.items():
        group = of.get(name if is_sampler(plan, name) else name.rpartition(".")[0])
        if group is None or (spec.first, spec.ranks) != (group.first, group.ranks):
            yield f"layout `{name}` does not have the ranks of its group"


def is_sampler(plan: Plan, layout: str) -> bool:
    """Whether a layout samples on ranks of its own, apart from the model's other layout."""
    spec, model = plan.layouts.get(layout), layout.rpartition(".")[0]
    others = (f"{model}.{stage}" in plan.layouts for stage in ("train", "forward"))
    return spec is not None and layout.endswith(".generate") and not spec.within and bool(plan.run.lag) and any(others)
