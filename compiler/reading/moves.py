"""What a transfer of rows or a change of a model's layout moves: bytes, links, and by which strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

from compiler.cost import CostModel
from compiler.proof.wellformed import shape_of
from compiler.reading.tables import Row
from compiler.reading.units import bytes_text
from compiler.resharding.gathers import ALL_GATHER, MINIMAL, VANILLA, ZERO_REDUNDANCY
from compiler.resharding.transitions import weight_transfer

HOW = {
    ZERO_REDUNDANCY: "ranks of a training replica with the same generation shard all-gather it",
    VANILLA: "each training replica all-gathers the model, and a rank keeps its part",
    ALL_GATHER: "all ranks all-gather the model, and a rank keeps its part",
    MINIMAL: "point to point, what is lacking",
}
ROWS = "rows"


@dataclass(frozen=True)
class Moving:
    """Bytes of one time. how: the strategy of weights, or "rows"

    most: to a rank; least: what no plan with these layouts does without; near, far: inside and between nodes
    peak: weights of both layouts on the fullest rank meanwhile; twice: of the source's shard outside the destination's, where a rank has both
    """

    how: str
    total: float
    most: float
    least: float
    near: float
    far: float
    peak: float = 0.0
    twice: float = 0.0

    @property
    def links(self) -> str:
        """`14.6 MB between nodes`, `all inside nodes`"""
        if not self.far or not self.near:
            return f"all {'between' if self.far else 'inside'} nodes"
        return f"{bytes_text(self.far)} between nodes"


def moving(costs: CostModel, row: Row) -> Moving:
    """Of a Transfer, of the part of the rows that it takes, or of a Reshard."""
    moved, part = costs.moved(row.step), row.part
    amounts = tuple(part * size for size in (moved.total, moved.per_rank, moved.lower_bound))
    if row.step.op != "reshard":
        return Moving(ROWS, *amounts, *_links_of_rows(costs, amounts[0]))
    plan, step = costs.plan, row.step
    shape, role = shape_of(plan, step.model), plan.models[step.model].role
    transfer = weight_transfer(shape, role, plan.layouts, step.src, step.dst)
    both = set(transfer.src.layout.ranks) & set(transfer.dst.layout.ranks)
    return Moving(step.strategy, *amounts, *transfer.bytes_crossing(_node(costs)),
                  max(map(transfer.peak_bytes, transfer.ranks)), max(map(transfer.redundant_bytes, both), default=0))


def _links_of_rows(costs: CostModel, total: float) -> tuple[float, float]:
    """Rows lie where tokens balance, so that any rank is as likely as another to have the row that one gets."""
    world = costs.plan.world
    near = (min(_node(costs), world) - 1) / (world - 1) if world > 1 else 0.0
    return total * near, total * (1 - near)


def _node(costs: CostModel) -> int:
    return costs.plan.world if costs.cluster.is_local else costs.cluster.devices_per_node


def move_lines(found: Moving) -> Iterator[str]:
    """For people: `33.3 MB in all, 31.5 MB between nodes; at most 520.2 kB to a rank; ...`."""
    if not found.total:
        yield "nothing crosses ranks"
        return
    yield (f"{bytes_text(found.total)} in all, {found.links}; at most {bytes_text(found.most)} to a rank"
           + (f"; no plan moves less than {bytes_text(found.least)}" if found.least else ""))
    if found.how != ROWS:
        twice = f", {bytes_text(found.twice)} of it beside the new shard" if found.twice else ", nothing twice"
        yield f"{found.how}: weights fill at most {bytes_text(found.peak)} of a rank meanwhile{twice}"
