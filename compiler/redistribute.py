"""Plans the move of a model's weights between any two weight layouts, box by box, with the bytes that it costs."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Iterator, Sequence

from compiler.layout import ModelLayout
from compiler.weights import Piece, WeightLayout

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Move:
    """The box [start, stop) of canonical `tensor` goes from `src_rank` to `dst_rank`, which may be the same."""

    tensor: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    src_rank: int
    dst_rank: int

    @property
    def elements(self) -> int:
        return _volume(self.start, self.stop)

    @property
    def is_local(self) -> bool:
        return self.src_rank == self.dst_rank


@dataclass(frozen=True)
class WeightTransfer:
    """Moves that fill every destination tensor from the source, each element once.

    itemsize: bytes an element takes on the wire. Bytes count what crosses ranks; local copies are free.
    """

    src: WeightLayout
    dst: WeightLayout
    moves: tuple[Move, ...]
    itemsize: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        return tuple(sorted({*self.src.layout.ranks, *self.dst.layout.ranks}))

    @property
    def total_bytes(self) -> int:
        return sum(self._received.values())

    def bytes_received(self, rank: int) -> int:
        return self._received.get(rank, 0)

    def bytes_sent(self, rank: int) -> int:
        return self._sent.get(rank, 0)

    @functools.cached_property
    def lower_bound_bytes(self) -> int:
        """What no plan can do without: by rank, the elements of its destination shard that its source shard lacks."""
        return sum(self._held(self.dst, r) - self._kept(r) for r in self.dst.layout.ranks) * self.itemsize

    def redundant_bytes(self, rank: int) -> int:
        """Weights of the source shard of `rank` that its destination shard does not contain, so that both must stay."""
        return (self._held(self.src, rank) - self._kept(rank)) * self.itemsize

    def peak_bytes(self, rank: int) -> int:
        """Weights on `rank` while both layouts live, an element that both contain counted once."""
        return self._held(self.dst, rank) * self.itemsize + self.redundant_bytes(rank)

    @functools.cached_property
    def _received(self) -> dict[int, int]:
        return self._bytes_by("dst_rank")

    @functools.cached_property
    def _sent(self) -> dict[int, int]:
        return self._bytes_by("src_rank")

    def _bytes_by(self, end: str) -> dict[int, int]:
        found: dict[int, int] = defaultdict(int)
        for move in self.moves:
            if not move.is_local:
                found[getattr(move, end)] += move.elements * self.itemsize
        return dict(found)

    def _held(self, layout: WeightLayout, rank: int) -> int:
        return sum(piece.elements for piece in layout.pieces(rank))

    def _kept(self, rank: int) -> int:
        """Elements that `rank` holds in both layouts."""
        held = _by_tensor(self.src.pieces(rank))
        return sum(_volume(*box) for piece in self.dst.pieces(rank) for box in _overlaps(piece, held[piece.tensor]))


def redistribute(src: WeightLayout, dst: WeightLayout, itemsize: int = 4) -> WeightTransfer:
    """The transfer from `src` to `dst`, at the lower bound of bytes, the same wherever it is computed.

    Each missing box comes from one of the ranks that hold it, by this rule, first difference decides: a rank of the
    source replica in which the destination rank stands (HybridFlow's micro data-parallel group, arXiv 2409.19256,
    section 5.3, so that replicas share the load and do not cross); then the rank that has sent least so far; then the
    nearest rank number.
    Raises ValueError if the two layouts are of different models.
    """
    if (src.shape, src.role) != (dst.shape, dst.role):
        raise ValueError("the two layouts are of different models")
    holders = _holders(src)
    sent: dict[int, int] = defaultdict(int)
    moves = []
    for piece, rank in _wanted(dst):
        for (start, stop), ranks in _sources(piece, holders[piece.tensor]):
            giver = _choose(ranks, rank, src.layout, sent)
            move = Move(piece.tensor, start, stop, giver, rank)
            sent[giver] += 0 if move.is_local else move.elements
            moves.append(move)
    return WeightTransfer(src, dst, tuple(moves), itemsize)


def zero_redundancy_bytes(train: ModelLayout, tp: int, model_bytes: int) -> float:
    """Bytes that each rank receives for tensors cut evenly over tp and pp: (d_g - 1) / (t p) M.

    M = `model_bytes`, d_g = t p / `tp` generation replicas in a training replica: HybridFlow's engine, arXiv
    2409.19256, table 2. Holds where `tp` divides train.tp; norms, which tp does not cut, move between stages alone.
    """
    return (train.tp * train.pp / tp - 1) / (train.tp * train.pp) * model_bytes


def _wanted(dst: WeightLayout) -> Iterator[tuple[Piece, int]]:
    """Destination pieces, tensor after tensor, so that a transfer in order needs few buffers."""
    order = {name: i for i, name in enumerate(dst.tensors)}
    pairs = [(piece, rank) for rank in dst.layout.ranks for piece in dst.pieces(rank)]
    return iter(sorted(pairs, key=lambda pair: order[pair[0].tensor]))


def _holders(src: WeightLayout) -> dict[str, dict[Box, list[int]]]:
    """By tensor and box, the ranks that hold it. Boxes of one tensor are equal or disjoint: that is how layouts cut."""
    found: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank in src.layout.ranks:
        for piece in src.pieces(rank):
            found[piece.tensor][piece.start, piece.stop].append(rank)
    return found


def _sources(piece: Piece, holders: dict[Box, list[int]]) -> Iterator[tuple[Box, list[int]]]:
    for (start, stop), ranks in holders.items():
        box = _intersection(piece, start, stop)
        if box:
            yield box, ranks


def _choose(holders: Sequence[int], rank: int, layout: ModelLayout, sent: dict[int, int]) -> int:
    if rank in holders:
        return rank
    replica = layout.coordinates(rank).dp if rank in layout else None

    def cost(holder: int) -> tuple:
        far = replica is not None and layout.coordinates(holder).dp != replica
        return far, sent[holder], abs(holder - rank), holder

    return min(holders, key=cost)


def _overlaps(piece: Piece, others: Sequence[Piece]) -> Iterator[Box]:
    for other in others:
        box = _intersection(piece, other.start, other.stop)
        if box:
            yield box


def _intersection(piece: Piece, start: tuple[int, ...], stop: tuple[int, ...]) -> Box | None:
    low = tuple(map(max, piece.start, start))
    high = tuple(map(min, piece.stop, stop))
    return (low, high) if all(a < b for a, b in zip(low, high)) else None


def _by_tensor(pieces: Sequence[Piece]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.tensor].append(piece)
    return found


def _volume(start: tuple[int, ...], stop: tuple[int, ...]) -> int:
    return math.prod(b - a for a, b in zip(start, stop))
