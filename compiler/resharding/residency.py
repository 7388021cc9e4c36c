"""Memory of a model that changes to its generation layout in place.

While generation holds an element, the training layout need not: a training tensor all of whose elements lie in the
rank's generation shard gives up its memory when it has been read for the last time, and is filled again from the
generation tensors, without communication, before training goes on. So weights take on each rank what its generation
shard and the training tensors outside it take, and buffers: HybridFlow's M / (t_g p_g) (arXiv 2409.19256, table 2).
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Iterable, Iterator, Mapping, NamedTuple, Sequence

from compiler.resharding.redistribute import Move, WeightTransfer, redistribute
from compiler.resharding.rounds import BUCKET_BYTES, Broadcast, Copy, Exchange, Round, rounds
from compiler.weights import Piece, WeightLayout


Sizes = Mapping[str, int]  # elements by local tensor


class Touched(NamedTuple):
    """Local tensors that a round reads and writes, and elements of the buffers it needs."""

    read: frozenset[str]
    written: frozenset[str]
    buffers: int


def given_up(transfer: WeightTransfer, rank: int) -> dict[str, tuple[Move, ...]]:
    """Local tensors of the source that the destination shard of `rank` contains, with the copies that refill them.

    Tensors with padding stay: nothing else holds that.
    """
    if rank not in transfer.src.layout or rank not in transfer.dst.layout:
        return {}
    covered, moves = _elements(transfer.src.pieces(rank)), defaultdict(list)
    back = redistribute(transfer.dst, transfer.src, transfer.itemsize)
    locals_of = _Locals(transfer.src, rank)
    for move in back.moves_to(rank):
        for name in locals_of.meeting(move):
            moves[name].append(move)
    sizes = transfer.src.local_tensors(rank)
    return {
        name: tuple(found) for name, found in moves.items()
        if all(move.is_local for move in found) and covered[name] == math.prod(sizes[name])
    }


def transition_bytes(transfer: WeightTransfer, rank: int, bucket_bytes: int = BUCKET_BYTES) -> int:
    """Bytes of weights and buffers on `rank` at the fullest moment of a transition in place, there and back.

    Each local tensor has memory of its own; where a training engine keeps several in one, it is given up as one.
    """
    src, dst = ({name: math.prod(size) for name, size in weights.local_tensors(rank).items()}
                for weights in (transfer.src, transfer.dst))
    spare = given_up(transfer, rank)
    there = _peak_there(list(touches(transfer, rank, bucket_bytes)), src, dst, set(spare))
    return max(there, _peak_back(spare, last_reads(transfer, rank, spare), src, dst)) * transfer.itemsize


def last_reads(transfer: WeightTransfer, rank: int, spare: Mapping[str, Sequence[Move]]) -> dict[str, str]:
    """By local tensor of the destination, the last source tensor, in their order, that is filled again from it."""
    target = _Locals(transfer.dst, rank)
    order = (name for name in transfer.src.local_tensors(rank) if name in spare)
    return {local: name for name in order for move in spare[name] for local in target.meeting(move)}


def _peak_there(steps: Sequence[Touched], src: Sizes, dst: Sizes, spare: set[str]) -> int:
    """Buffers are those of the fullest round, and stay to the last."""
    last = {name: i for i, step in enumerate(steps) for name in step.read}
    held = peak = sum(src.values()) - sum(src[name] for name in spare - last.keys())
    live: set[str] = set()
    for i, step in enumerate(steps):
        held += sum(dst[name] for name in step.written - live)
        live |= step.written
        peak = max(peak, held)
        held -= sum(src[name] for name in step.read & spare if last[name] == i)
    return peak + max((step.buffers for step in steps), default=0)


def _peak_back(spare: Iterable[str], last: Mapping[str, str], src: Sizes, dst: Sizes) -> int:
    held = sum(dst.values()) + sum(src.values()) - sum(src[name] for name in spare)
    held -= sum(size for name, size in dst.items() if name not in last)
    peak = held
    for name in (name for name in src if name in spare):
        held += src[name]
        peak = max(peak, held)
        held -= sum(dst[local] for local, reader in last.items() if reader == name)
    return peak


def touches(transfer: WeightTransfer, rank: int, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Touched]:
    """Round after round, as `compiler.resharding.rounds` has them."""
    source, target = _Locals(transfer.src, rank), _Locals(transfer.dst, rank)
    for step in rounds(transfer, rank, bucket_bytes):
        given, arriving, buffers = _boxes(step, rank)
        read, written = (frozenset(name for box in boxes for name in ends.meeting(box))
                         for ends, boxes in ((source, given), (target, arriving)))
        yield Touched(read, written, buffers)


def _boxes(step: Round, rank: int) -> tuple[Iterable, Iterable, int]:
    """(boxes that `rank` gives, boxes that arrive, elements of buffers)."""
    if isinstance(step, Copy):
        return step.moves, step.moves, 0
    if isinstance(step, Exchange):
        return step.sent, step.received, sum(move.elements for move in (*step.sent, *step.received))
    if isinstance(step, Broadcast):
        return step.shares if step.root == rank else (), step.shares, sum(share.elements for share in step.shares)
    everything = [share for shares in step.shares for share in shares]
    return step.shares[step.ranks.index(rank)], everything, sum(share.elements for share in everything)


class _Locals:
    """Which local tensors of a rank a box of a canonical tensor meets."""

    def __init__(self, weights: WeightLayout, rank: int) -> None:
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in weights.pieces(rank):
            self._pieces[piece.tensor].append(piece)

    def meeting(self, box) -> Iterator[str]:
        for piece in self._pieces[box.tensor]:
            ends = zip(piece.start, piece.stop, box.start, box.stop)
            if all(max(a, c) < min(b, d) for a, b, c, d in ends):
                yield piece.local


def _elements(pieces: Iterable[Piece]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for piece in pieces:
        found[piece.local] += piece.elements
    return found
