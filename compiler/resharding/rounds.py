"""Cuts a transfer of weights into rounds of bounded buffers, in an order that all ranks share.

Every rank works out its own rounds, and where ranks meet they find the same ones: which they are follows from the
transfer and the bound alone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Iterable, Iterator, Sequence, TypeVar, Union

from compiler.resharding.gathers import Gather, Share
from compiler.resharding.redistribute import Move, WeightTransfer

BUCKET_BYTES = 16 << 20  # what a rank sends, and what it receives, in one round
BoxOf = TypeVar("BoxOf", Move, Share)


@dataclass(frozen=True)
class Copy:
    """Boxes that a rank keeps."""

    moves: tuple[Move, ...]


@dataclass(frozen=True)
class AllGather:
    """Members of a group, whose ranks ascend, each give `shares[member]`, all of the same number of elements."""

    ranks: tuple[int, ...]
    shares: tuple[tuple[Share, ...], ...]


@dataclass(frozen=True)
class Broadcast:
    """One member of a group gives `shares` to all others: what cannot be gathered evenly."""

    ranks: tuple[int, ...]
    root: int  # a rank
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class Exchange:
    """What a rank sends to and receives from others, all ranks at once; both in the order of tensors, then of ranks."""

    sent: tuple[Move, ...]
    received: tuple[Move, ...]


Round = Union[Copy, AllGather, Broadcast, Exchange]


def rounds(transfer: WeightTransfer, rank: int, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Round]:
    """What `rank` does, one after the other: keeps, gathers, exchanges.

    bucket_bytes: bound on what it sends, and on what it receives, in a round; a row of a tensor always fits
    """
    limit = max(bucket_bytes // transfer.itemsize, 1)
    to = transfer.moves_to(rank)
    yield from (Copy((move,)) for move in to if move.is_local)
    gather = transfer.gather(rank)
    if gather is not None:
        yield from gather_rounds(gather, limit)
    yield from _exchanges(transfer, rank, to, limit)


# ---- gathering -----------------------------------------------------------------------------------

def gather_rounds(gather: Gather, limit: int) -> Iterator[Union[AllGather, Broadcast]]:
    """Shares of equal shape, one of each member, are gathered together; what is over is broadcast."""
    columns, over = _columns(gather)
    for run in _packed(columns, limit):
        yield AllGather(gather.ranks, tuple(zip(*run)))
    for member, shares in sorted(over.items()):
        for run in _packed([(share,) for share in shares], limit):
            yield Broadcast(gather.ranks, gather.ranks[member], tuple(share for share, in run))


def _columns(gather: Gather) -> tuple[list[tuple[Share, ...]], dict[int, list[Share]]]:
    """(tuples of a share of each member, in the order of tensors; shares left over, by member)."""
    alike: dict[tuple[int, ...], list[list[Share]]] = defaultdict(lambda: [[] for _ in gather.ranks])
    for share in gather.shares:
        size = tuple(b - a for a, b in zip(share.start, share.stop))
        alike[size][share.member].append(share)
    columns, over = [], defaultdict(list)
    for by_member in alike.values():
        even = min(map(len, by_member))
        columns += zip(*(shares[:even] for shares in by_member))
        for member, shares in enumerate(by_member):
            over[member] += shares[even:]
    columns.sort(key=lambda column: (min(share.number for share in column), column[0].number, column[0].start))
    for shares in over.values():
        shares.sort(key=lambda share: (share.number, share.start))
    return columns, over


def _packed(columns: Sequence[tuple[Share, ...]], limit: int) -> Iterator[list[tuple[Share, ...]]]:
    """Runs of columns that stay within `limit`; a column that does not is cut by rows."""
    run: list[tuple[Share, ...]] = []
    load = 0
    for column in columns:
        height = _height(column[0])
        rows = max(limit // (_size(column) // height), 1)
        cuts = -(-height // rows)
        for k in range(cuts):
            parts = tuple(part for share in column for part in _rows(share, k, cuts))
            if run and load + _size(parts) > limit:
                yield run
                run, load = [], 0
            run.append(parts)
            load += _size(parts)
    if run:
        yield run


def _size(column: tuple[Share, ...]) -> int:
    """Elements that a rank receives, of a column of one sends."""
    return max(len(column) - 1, 1) * column[0].elements


# ---- point to point ------------------------------------------------------------------------------

def _exchanges(transfer: WeightTransfer, rank: int, to: Iterable[Move], limit: int) -> Iterator[Exchange]:
    windows = list(_windows(transfer, limit))
    if not windows:
        return
    ends = [[m for m in moves if not m.is_local] for moves in (transfer.moves_from(rank), to)]
    sent, received = (_by_tensor(moves) for moves in ends)
    for window in windows:
        parts = ([p for tensor, k, cuts in window for move in moves.get(tensor, ()) for p in _rows(move, k, cuts)]
                 for moves in (sent, received))
        yield Exchange(*map(tuple, parts))


def _windows(transfer: WeightTransfer, limit: int) -> Iterator[list[tuple[str, int, int]]]:
    """Runs of (tensor, part, parts): in none of them a rank sends, or receives, more than `limit` elements."""
    window: list[tuple[str, int, int]] = []
    load = 0
    for tensor, ends in _loads(transfer).items():
        cuts = -(-_most(ends, 1) // limit)
        while _most(ends, cuts) > limit and cuts < ends.rows:
            cuts += 1
        each = _most(ends, cuts)
        for k in range(cuts):
            if window and load + each > limit:
                yield window
                window, load = [], 0
            window.append((tensor, k, cuts))
            load += each
    if window:
        yield window


@dataclass
class _Ends:
    """Moves of a tensor by who receives and who sends them, within a replica of the source and out of it."""

    received: dict[int, list[Move]] = field(default_factory=lambda: defaultdict(list))
    within: dict[int, list[Move]] = field(default_factory=lambda: defaultdict(list))
    out: dict[int, list[Move]] = field(default_factory=lambda: defaultdict(list))

    @property
    def rows(self) -> int:
        return max(_height(move) for moves in self.received.values() for move in moves)


def _loads(transfer: WeightTransfer) -> dict[str, _Ends]:
    """By tensor, in order, what ranks send and receive; of source replicas that are alike, one stands for all."""
    found: dict[str, _Ends] = defaultdict(_Ends)
    for rank in transfer.one_of_alike_replicas():
        for move in transfer.moves_to(rank):
            if not move.is_local:
                ends = found[move.tensor]
                ends.received[rank].append(move)
                (ends.within if rank in transfer.src.layout else ends.out)[move.src_rank].append(move)
    return {tensor: found[tensor] for tensor in transfer.dst.tensors if tensor in found}


def _most(ends: _Ends, cuts: int) -> int:
    """Elements that the fullest rank sends or receives at most, when all boxes are cut into so many parts."""
    def fullest(by_rank: dict[int, list[Move]]) -> int:
        sums = (sum(-(-_height(m) // cuts) * (m.elements // _height(m)) for m in moves) for moves in by_rank.values())
        return max(sums, default=0)

    return max(fullest(ends.received), fullest(ends.within) + fullest(ends.out))


def _by_tensor(moves: Iterable[Move]) -> dict[str, list[Move]]:
    found: dict[str, list[Move]] = defaultdict(list)
    for move in moves:
        found[move.tensor].append(move)
    return found


# ---- boxes ---------------------------------------------------------------------------------------

def _rows(box: BoxOf, k: int, cuts: int) -> Iterator[BoxOf]:
    """Part k of a box in `cuts` parts along its first dim, none if it is empty."""
    if cuts == 1:
        yield box
        return
    low, high = (box.start[0] + i * _height(box) // cuts for i in (k, k + 1))
    if low < high:
        yield replace(box, start=(low, *box.start[1:]), stop=(high, *box.stop[1:]))


def _height(box: Union[Move, Share]) -> int:
    return box.stop[0] - box.start[0]
