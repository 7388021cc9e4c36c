"""Plans the move of a model's weights between any two weight layouts, box by box, with the bytes that it costs.

Data-parallel replicas hold the same boxes, so all is worked out for the shards of one replica, and only the question
who gives a box to whom is answered rank by rank, when it is asked. So a plan for a thousand ranks takes no longer than
one for a replica.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Iterator

from compiler.layout import ModelLayout
from compiler.weights import Piece, WeightLayout

Point = tuple[int, ...]
Box = tuple[str, Point, Point]  # tensor, start, stop


@dataclass(frozen=True)
class Move:
    """The box [start, stop) of canonical `tensor` goes from `src_rank` to `dst_rank`, which may be the same."""

    tensor: str
    start: Point
    stop: Point
    src_rank: int
    dst_rank: int

    @property
    def elements(self) -> int:
        return volume(self.start, self.stop)

    @property
    def is_local(self) -> bool:
        return self.src_rank == self.dst_rank


@dataclass(frozen=True)
class Part:
    """The box [start, stop) of canonical `tensor`, the `number`-th, that lies in a shard of the destination.

    holders: the source shards in which it lies, ascending, at least one. A shard of a layout is numbered t + tp * p.
    """

    tensor: str
    number: int
    start: Point
    stop: Point
    holders: tuple[int, ...]

    @property
    def elements(self) -> int:
        return volume(self.start, self.stop)


@dataclass(frozen=True)
class WeightTransfer:
    """Moves that fill every destination tensor from the source, each element once, at the lower bound of bytes.

    itemsize: bytes an element takes on the wire. Bytes count what crosses ranks; local copies are free.
    """

    src: WeightLayout
    dst: WeightLayout
    itemsize: int = 4

    # ---- moves

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        return tuple(sorted({*self.src.layout.ranks, *self.dst.layout.ranks}))

    @functools.cached_property
    def moves(self) -> tuple[Move, ...]:
        """All of them, local ones too, tensor after tensor: as many as ranks times boxes."""
        order = {name: i for i, name in enumerate(self.dst.tensors)}
        found = (move for rank in self.dst.layout.ranks for move in self.moves_to(rank))
        return tuple(sorted(found, key=lambda move: order[move.tensor]))

    def moves_to(self, rank: int) -> tuple[Move, ...]:
        """What fills the destination shard of `rank`, tensor after tensor; () if it has none."""
        parts = self.parts(self._dst_shard(rank)) if rank in self.dst.layout else ()
        moved = (p for p in parts if not self.is_gathered(p, rank))
        return tuple(Move(p.tensor, p.start, p.stop, self.giver(p, rank), rank) for p in moved)

    def boxes_to(self, rank: int) -> Iterator[Box]:
        """All that arrives at the destination shard of `rank`, however it does."""
        return ((move.tensor, move.start, move.stop) for move in self.moves_to(rank))

    def one_of_each_kind(self) -> tuple[int, ...]:
        """Ranks of the destination, one for each different set of boxes to arrive."""
        return self.dst.layout.replica(0)

    def moves_from(self, rank: int) -> tuple[Move, ...]:
        """What `rank` gives, itself included, in the order of the receiving ranks, then tensor after tensor."""
        return tuple(self._given(rank)) if rank in self.src.layout else ()

    def parts(self, shard: int) -> tuple[Part, ...]:
        """The boxes that make up a shard of the destination, tensor after tensor."""
        return self._tables.parts(shard)

    def source_boxes(self) -> tuple[Part, ...]:
        """The boxes into which the source cuts the model, tensor after tensor."""
        return self._tables.source_boxes()

    # what `compiler.resharding.gathers` has more of

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks, ascending, that gather together: the same on every rank."""
        return ()

    def gather(self, rank: int) -> None:
        """The collective that `rank` takes part in."""

    def one_of_alike_replicas(self) -> Iterator[int]:
        """Ranks of the destination: those outside the source, and of source replicas whose ranks are alike, one's."""
        src, seen = self.src.layout, set()
        yield from (rank for rank in self.dst.layout.ranks if rank not in src)
        for d in range(src.dp):
            replica = [rank for rank in src.replica(d) if rank in self.dst.layout]
            kinds = tuple(map(self._kind, replica))
            if kinds not in seen:
                seen.add(kinds)
                yield from replica

    def giver(self, part: Part, rank: int) -> int:
        """The rank from which `rank` gets `part`, the same wherever it is computed.

        Itself, if it holds it; else a rank of the source replica in which it stands (HybridFlow's micro data-parallel
        group, arXiv 2409.19256, section 5.3, so that replicas do not cross); ranks outside the source take replicas in
        turn. Holders of the same box within a replica take turns, too.
        """
        src, holders = self.src.layout, part.holders
        if rank in src:
            at = src.coordinates(rank)
            if self._src_shard(rank) in holders:
                return rank
            return _rank(src, at.dp, holders[(at.tp + at.pp) % len(holders)])
        at = self.dst.layout.coordinates(rank)
        turn = at.dp + part.number
        return _rank(src, turn % src.dp, holders[(at.tp + at.pp + turn // src.dp) % len(holders)])

    def is_gathered(self, part: Part, rank: int) -> bool:
        """Whether `part` comes to `rank` by a collective, not by a move."""
        return False

    def _given(self, rank: int) -> Iterator[Move]:
        at, shard = self.src.layout.coordinates(rank), self._src_shard(rank)
        mates = set(self.src.layout.replica(at.dp))
        for other in self.dst.layout.ranks:
            if other in self.src.layout and other not in mates:
                continue
            for part in self._tables.held_by(self._dst_shard(other), shard):
                if self.giver(part, other) == rank and not self.is_gathered(part, other):
                    yield Move(part.tensor, part.start, part.stop, rank, other)

    # ---- bytes

    @functools.cached_property
    def total_bytes(self) -> int:
        return sum(map(self.bytes_received, self.dst.layout.ranks))

    def bytes_received(self, rank: int) -> int:
        return self.lacking(rank) * self.itemsize

    def bytes_sent(self, rank: int) -> int:
        return sum(move.elements for move in self.moves_from(rank) if not move.is_local) * self.itemsize

    def bytes_crossing(self, devices_per_node: int) -> tuple[int, int]:
        """Bytes from other ranks of the same node, and from ranks of other nodes; together `total_bytes`."""
        near = far = 0
        for giver, rank, size in self.flows():
            inside = giver // devices_per_node == rank // devices_per_node
            near, far = (near + size, far) if inside else (near, far + size)
        return near, far

    def busiest_node(self, devices_per_node: int) -> int:
        """Bytes from or to other nodes, the greater of the two, of the node that has most."""
        sent, received = defaultdict(int), defaultdict(int)
        for giver, rank, size in self.flows():
            out, into = giver // devices_per_node, rank // devices_per_node
            if out != into:
                sent[out] += size
                received[into] += size
        return max((*sent.values(), *received.values()), default=0)

    def flows(self) -> Iterator[tuple[int, int, int]]:
        """(rank that gives, rank that receives, bytes), pairs in any order and several times."""
        yield from ((*pair, elements * self.itemsize) for pair, elements in self._flows.items())

    @functools.cached_property
    def lower_bound_bytes(self) -> int:
        """What no plan can do without: by rank, the elements of its destination shard that its source shard lacks."""
        return sum(map(self.lacking, self.dst.layout.ranks)) * self.itemsize

    def lacking(self, rank: int) -> int:
        """Elements that the destination shard of `rank` has and its source shard lacks."""
        if rank not in self.dst.layout:
            return 0
        return self._tables.dst_elements(self._dst_shard(rank)) - self._kept(rank)

    @functools.cached_property
    def _flows(self) -> dict[tuple[int, int], int]:
        """Elements that move from one rank to another. Ranks that stand alike in a replica have alike flows."""
        alike: dict[tuple, dict[int, int]] = {}
        found: dict[tuple[int, int], int] = defaultdict(int)
        for rank in self.dst.layout.ranks:
            kind = self._kind(rank)
            if kind not in alike:
                alike[kind] = defaultdict(int)
                for move in self.moves_to(rank):
                    alike[kind][self._relative(move.src_rank, rank)] += 0 if move.is_local else move.elements
            for giver, elements in alike[kind].items():
                if elements:
                    found[self._absolute(giver, rank), rank] += elements
        return found

    def _kind(self, rank: int) -> tuple:
        """Ranks of one kind get the same boxes, from the same shards of their replicas."""
        if rank not in self.src.layout:
            return rank,
        return self._src_shard(rank), self._dst_shard(rank)

    def _relative(self, giver: int, rank: int) -> int:
        return self._src_shard(giver) if rank in self.src.layout else giver

    def _absolute(self, giver: int, rank: int) -> int:
        return _rank(self.src.layout, self.src.layout.coordinates(rank).dp, giver) if rank in self.src.layout else giver

    def redundant_bytes(self, rank: int) -> int:
        """Weights of the source shard of `rank` that its destination shard does not contain, so that both must stay."""
        if rank not in self.src.layout:
            return 0
        return (self._tables.src_elements(self._src_shard(rank)) - self._kept(rank)) * self.itemsize

    def peak_bytes(self, rank: int) -> int:
        """Weights on `rank` while both layouts live, an element that both contain counted once."""
        wanted = self._tables.dst_elements(self._dst_shard(rank)) if rank in self.dst.layout else 0
        return wanted * self.itemsize + self.redundant_bytes(rank)

    # ---- shards

    @functools.cached_property
    def _tables(self) -> "_Tables":
        return _tables(_one_replica(self.src), _one_replica(self.dst))

    @functools.cached_property
    def _src_shards(self) -> dict[int, int]:
        return _shards(self.src.layout)

    @functools.cached_property
    def _dst_shards(self) -> dict[int, int]:
        return _shards(self.dst.layout)

    def _src_shard(self, rank: int) -> int:
        return self._src_shards[rank]

    def _dst_shard(self, rank: int) -> int:
        return self._dst_shards[rank]

    def _kept(self, rank: int) -> int:
        """Elements that `rank` holds in both layouts."""
        if rank not in self.src.layout or rank not in self.dst.layout:
            return 0
        return self._tables.kept(self._src_shard(rank), self._dst_shard(rank))


def redistribute(src: WeightLayout, dst: WeightLayout, itemsize: int = 4) -> WeightTransfer:
    """The transfer from `src` to `dst`. Raises ValueError if the two layouts are of different models."""
    if (src.shape, src.role) != (dst.shape, dst.role):
        raise ValueError("the two layouts are of different models")
    return WeightTransfer(src, dst, itemsize)


def zero_redundancy_bytes(train: ModelLayout, tp: int, model_bytes: int) -> float:
    """Bytes that each rank receives for tensors cut evenly over tp and pp: (d_g - 1) / (t p) M.

    M = `model_bytes`, d_g = t p / `tp` generation replicas in a training replica: HybridFlow's engine, arXiv
    2409.19256, table 2. Holds where `tp` divides train.tp; norms, which tp does not cut, move between stages alone.
    """
    return (train.tp * train.pp / tp - 1) / (train.tp * train.pp) * model_bytes


class _Tables:
    """Boxes and numbers of elements by shards. `src`, `dst`: one replica each, whose ranks are its shards."""

    def __init__(self, src: WeightLayout, dst: WeightLayout) -> None:
        self.src, self.dst = src, dst
        self._numbers = {name: i for i, name in enumerate(dst.tensors)}
        self._holders = _holders(src)
        self._parts: dict[int, tuple[Part, ...]] = {}
        self._held: dict[int, dict[int, list[Part]]] = {}
        self.kept = functools.cache(self._count_kept)  # (source shard, destination shard) -> elements in both
        self.src_elements, self.dst_elements = (functools.cache(functools.partial(_elements, w)) for w in (src, dst))

    def parts(self, shard: int) -> tuple[Part, ...]:
        if shard not in self._parts:
            found = [part for piece in self.dst.pieces(shard) for part in self._cut(piece)]
            self._parts[shard] = tuple(sorted(found, key=lambda part: part.number))
        return self._parts[shard]

    def source_boxes(self) -> tuple[Part, ...]:
        return tuple(
            Part(name, number, start, stop, shards) for name, number in self._numbers.items()
            for (start, stop), shards in self._holders[name].items()
        )

    def held_by(self, shard: int, holder: int) -> list[Part]:
        """The parts of a destination shard that a source shard holds."""
        if shard not in self._held:
            self._held[shard] = defaultdict(list)
            for part in self.parts(shard):
                for at in part.holders:
                    self._held[shard][at].append(part)
        return self._held[shard].get(holder, [])

    def _cut(self, piece: Piece) -> Iterator[Part]:
        for (start, stop), shards in self._holders[piece.tensor].items():
            low, high = tuple(map(max, piece.start, start)), tuple(map(min, piece.stop, stop))
            if all(a < b for a, b in zip(low, high)):
                yield Part(piece.tensor, self._numbers[piece.tensor], low, high, shards)

    def _count_kept(self, holder: int, shard: int) -> int:
        return sum(part.elements for part in self.held_by(shard, holder))


_tables = functools.lru_cache(maxsize=16)(_Tables)


def _one_replica(weights: WeightLayout) -> WeightLayout:
    layout = weights.layout
    return replace(weights, layout=replace(layout, ranks=tuple(range(layout.tp * layout.pp)), dp=1))


def _holders(src: WeightLayout) -> dict[str, dict[tuple[Point, Point], tuple[int, ...]]]:
    """By tensor and box, the shards that hold it. Boxes of one tensor are equal or disjoint: so layouts cut."""
    found: dict[str, dict[tuple[Point, Point], tuple[int, ...]]] = defaultdict(dict)
    for shard in src.layout.ranks:
        for piece in src.pieces(shard):
            boxes = found[piece.tensor]
            boxes[piece.start, piece.stop] = (*boxes.get((piece.start, piece.stop), ()), shard)
    return found


def _elements(weights: WeightLayout, shard: int) -> int:
    return sum(piece.elements for piece in weights.pieces(shard))


def _shards(layout: ModelLayout) -> dict[int, int]:
    """The shard of each rank."""
    replicas = (layout.replica(d) for d in range(layout.dp))
    return {rank: shard for replica in replicas for shard, rank in enumerate(replica)}


def _rank(layout: ModelLayout, replica: int, shard: int) -> int:
    return layout.rank(replica, shard // layout.tp, shard % layout.tp)


def volume(start: Point, stop: Point) -> int:
    return math.prod(b - a for a, b in zip(start, stop))
