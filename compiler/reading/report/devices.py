"""The device map: which ranks each group has, and how its models are cut over them."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.cluster import Cluster
from compiler.groups import groups_of
from compiler.plan import GroupSpec, LayoutSpec, Plan
from compiler.reading.units import plural, ranks_text

MOST_CELLS = 128  # of the whole map
MOST_COLUMNS, MOST_STRIPES = 8, 8  # of the picture of one layout


@dataclass(frozen=True)
class Cell:
    """One rank, or several; group: its position in the plan, -1 for ranks that no group has."""

    first: int
    last: int
    group: int

    @property
    def name(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True)
class Cut:
    """One layout as a small picture. columns: data shards, rows: stages, stripes: tensor shards; shown, of how many."""

    columns: tuple[int, int]
    rows: tuple[int, int]
    stripes: tuple[int, int]

    @property
    def told(self) -> str:
        (_, dp), (_, pp), (_, tp) = self.columns, self.rows, self.stripes
        return f"{plural(dp, 'data shard')} of {plural(pp, 'stage')} of {plural(tp, 'tensor shard')}"


def cells_of(plan: Plan, cluster: Cluster) -> tuple[Cell, ...]:
    """All ranks: each alone, by nodes, or by several nodes, so that a page holds them. A cell is of one group."""
    size = 1
    if plan.world > MOST_CELLS:
        size = 1 if cluster.is_local else cluster.devices_per_node
        while plan.world / size > MOST_CELLS:
            size *= 2
    groups, cells, first = groups_of(plan), [], 0
    while first < plan.world:
        group = _group_at(groups, first)
        last = min(first - first % size + size, plan.world) - 1
        while _group_at(groups, last) != group:
            last -= 1
        cells.append(Cell(first, last, group))
        first = last + 1
    return tuple(cells)


def _group_at(groups: tuple[GroupSpec, ...], rank: int) -> int:
    return next((i for i, g in enumerate(groups) if g.first <= rank <= g.last), -1)


def cut_of(spec: LayoutSpec) -> Cut:
    return Cut((min(spec.dp, MOST_COLUMNS), spec.dp), (min(spec.pp, MOST_COLUMNS), spec.pp),
               (min(spec.tp, MOST_STRIPES), spec.tp))


def where(plan: Plan, group: GroupSpec, cluster: Cluster) -> str:
    """`ranks 0-63, on 8 nodes of a100`: each part of a cluster begins on a node of its own."""
    text = ranks_text(range(group.first, group.last + 1))
    if cluster.is_local:
        return text
    each = next((m.devices_per_node for m in cluster.machines if m.name == group.pool), cluster.devices_per_node)
    begin = min((g.first for g in plan.groups if g.pool == group.pool), default=0) if group.pool else 0
    nodes = (group.last - begin) // each - (group.first - begin) // each + 1
    return f"{text}, on {plural(nodes, 'node')} of {group.pool or cluster.name}"
