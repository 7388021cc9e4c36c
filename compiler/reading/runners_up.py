"""The search's other divisions of the models, beside the one that a plan has."""

from __future__ import annotations

from typing import Iterable, Iterator

from compiler.plan import GroupSpec, Plan
from compiler.reading.units import plural, seconds_text


def runners_up(plan: Plan) -> Iterator[str]:
    """`19.32 s  actor, ref: 8 ranks | critic, reward: 8 ranks`, the fastest first."""
    for other in sorted(plan.alternatives, key=lambda a: a.iteration_s):
        yield f"{seconds_text(other.iteration_s):>10}  {groups_text(other.groups)}"


def groups_text(groups: Iterable[GroupSpec]) -> str:
    """`actor, ref: 8 ranks | critic: 4 ranks`"""
    return " | ".join(f"{', '.join(g.members)}: {plural(g.ranks, 'rank')}" for g in groups)
