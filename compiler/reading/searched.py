"""What the search of a plan looked at: its other divisions of the models, and other numbers of devices."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, Mapping, Optional

from compiler import codec
from compiler.groups import groups_of
from compiler.plan import Alternative, GroupBounds, GroupSpec, OtherSize, Plan, SearchSpec
from compiler.reading.tables import rows_of
from compiler.reading.units import bytes_text, plural, seconds_text

GENERATION, TRANSITION = "generation", "transition"
TOLD = 0.1  # share of the greatest difference below which one is not told
GOING_ON = "to the search each training computes a forward of its own; to go on from one takes less time and more memory"
FOR = {"time": "the shortest iteration", "device-hours": "the fewest device-hours"}


def groups_text(groups: Iterable[GroupSpec]) -> str:
    """`actor, ref: 8 ranks | critic: 4 ranks`"""
    return " | ".join(f"{', '.join(g.members)}: {plural(g.ranks, 'rank')}" for g in groups)


def goes_on(plan: Plan) -> bool:
    """Whether some training goes on from a forward, which the search knows nothing of."""
    return any(getattr(row.step, "retained", "") for row in rows_of(plan))


def runners_up(plan: Plan) -> list[Alternative]:
    """The best first."""
    return sorted(plan.alternatives, key=lambda a: a.iteration_s)


def terms(of: SearchSpec | Alternative) -> dict[str, float]:
    """Seconds by stage, with the weights' way into generation as one of its own."""
    found: dict[str, float] = {}
    for stage, seconds in of.stages.items():
        found[stage] = seconds - of.transition * (stage == GENERATION)
        if stage == GENERATION and of.transition:
            found[TRANSITION] = of.transition
    return found


# ---- lines ---------------------------------------------------------------------------------------

def search_lines(plan: Plan) -> Iterator[str]:
    """What was looked at, and a table of the plan's groups beside the runners-up, by stage."""
    search = plan.search
    if search is None:
        yield "layouts: as `plan:` says; what it leaves open is data parallelism over all ranks"
        return
    yield f"layouts: found by the search for {FOR.get(search.objective, search.objective)}"
    yield search_counts(search)
    if plan.alternatives:
        yield "the best of each division, stage after stage; where groups need not wait, the estimate above is less"
        yield from [GOING_ON] * goes_on(plan)
    columns = list(dict.fromkeys(name for one in (search, *plan.alternatives) for name in terms(one)))
    yield f"  {'an iteration':>12}" + "".join(f"{c:>13}" for c in columns) + f"{'memory':>11}  groups"
    yield _row(columns, search, sum(search.stages.values()), groups_of(plan)) + "  (this plan)"
    yield from (_row(columns, other, other.iteration_s, other.groups) for other in runners_up(plan))


def search_counts(search: SearchSpec) -> str:
    room = "all" if search.feasible == search.divisions else f"{search.feasible}"
    return (f"{plural(search.divisions, 'way')} to divide the models into sets, {room} with devices enough; "
            f"{plural(search.considered, 'allocation')} of devices considered")


def _row(columns: list[str], one: SearchSpec | Alternative, total: float, groups: Iterable[GroupSpec]) -> str:
    found = terms(one)
    cells = (seconds_text(found[c]) if c in found else "-" for c in columns)
    return f"  {seconds_text(total):>12}" + "".join(f"{c:>13}" for c in cells) + f"{bytes_text(one.memory):>11}  {groups_text(groups)}"


def runner_up_lines(plan: Plan) -> Iterator[str]:
    """Each runner-up, and which terms make it one."""
    for other in runners_up(plan):
        yield groups_text(other.groups)
        yield f"  {compared(plan.search, other)}"


def compared(mine: Optional[SearchSpec], other: Alternative) -> str:
    """`54.06 s, 0.13 s more: scoring 0.21 s more, training 0.08 s less; 38.2 GB on the fullest rank instead of 42.0 GB`"""
    if mine is None or not other.stages:
        return seconds_text(other.iteration_s)
    memory = ""
    if bytes_text(mine.memory) != bytes_text(other.memory):
        memory = f"; {bytes_text(other.memory)} on the fullest rank instead of {bytes_text(mine.memory)}"
    return f"{_beside(terms(mine), terms(other))}{memory}"


def _beside(mine: Mapping[str, float], other: Mapping[str, float]) -> str:
    total = sum(other.values()) - sum(mine.values())
    changes = {name: other.get(name, 0.0) - mine.get(name, 0.0) for name in {**mine, **other}}
    most = max(map(abs, changes.values()), default=0.0)
    told = sorted(((name, d) for name, d in changes.items() if abs(d) > TOLD * most), key=lambda pair: -abs(pair[1]))
    if abs(total) < 1e-3 * sum(mine.values()) and most < 1e-3 * sum(mine.values()):
        return f"{seconds_text(sum(other.values()))}, as good as the plan"
    return (f"{seconds_text(sum(other.values()))}, {_more(total)}"
            + (f": {', '.join(f'{name} {_more(d)}' for name, d in told)}" if told else ""))


def _more(seconds: float) -> str:
    return f"{seconds_text(abs(seconds))} {'more' if seconds >= 0 else 'less'}"


# ---- numbers of devices --------------------------------------------------------------------------

def bounds_of(plan: Plan, model: str) -> Optional[GroupBounds]:
    return next((b for b in (plan.search.bounds if plan.search else ()) if model in b.models), None)


def size_lines(plan: Plan, model: str) -> Iterator[str]:
    """Why the model's group has its number of ranks: what fewer and what more would do."""
    found = bounds_of(plan, model)
    if found is None:
        return
    group = next(g for g in groups_of(plan) if model in g.models)
    them = "it fits" if len(found.models) == 1 else "they fit"
    yield f"{them} on {plural(found.least, 'rank')} at least"
    for other in found.others:
        yield _size_line(plan.search, group, other)
    if not any(other.ranks > group.ranks for other in found.others):
        yield f"there are no more than {group.ranks}"


def _size_line(search: SearchSpec, group: GroupSpec, other: OtherSize) -> str:
    giver = f", {plural(other.ranks - group.ranks, 'rank')} taken from {', '.join(other.giver)}" if other.giver else ""
    if not other.stages:
        where = "there is no room" if giver or other.ranks < group.ranks else "there are no more"
        return f"on {other.ranks}{giver}: {where}"
    return f"on {other.ranks}{giver}: {_beside(search.stages, other.stages)}"


# ---- JSON ----------------------------------------------------------------------------------------

def search_json(search: SearchSpec) -> dict[str, Any]:
    found = codec.encode(search)
    return {"considered": search.considered, "feasible": search.feasible, "divisions": search.divisions,
            "objective": search.objective, "stages": dict(search.stages), "transition_s": search.transition,
            "memory_bytes": search.memory, "bounds": found.get("bounds", [])}
