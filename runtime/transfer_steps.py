"""What one rank does in each kind of round of a transfer (`compiler.resharding.rounds`): packs, communicates, unpacks.

A step reads some local tensors of the source, `read`, and writes some of the destination, `written`; `run` gives the
bytes that it sent to and received from other ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Callable, Iterable, Iterator, Mapping, NamedTuple, Optional, Protocol, Sequence, Union

import torch
import torch.distributed as dist
from torch import Tensor

from compiler.resharding.gathers import Share
from compiler.resharding.redistribute import Move
from compiler.resharding.rounds import AllGather, Broadcast, Copy, Exchange, Round
from compiler.weights import Piece
from runtime.messages import swap

Tensors = Mapping[str, Tensor]
Sizes = Mapping[int, int]
Slices = tuple[slice, ...]


def gathers_itself(slots: Tensor) -> bool:
    """Whether what carries these is NCCL, whose all-gather writes where it shall."""
    return slots.is_cuda


@dataclass(frozen=True)
class Wire:
    """How this rank reaches others. group: that all of them are in; groups: of ranks that gather."""

    rank: int
    group: Optional[dist.ProcessGroup]
    groups: Optional[Callable[[tuple[int, ...]], dist.ProcessGroup]]

    def all_gather(self, slots: Tensor, ranks: tuple[int, ...]) -> None:
        """Fills slots[i] from ranks[i], whose own slot is full. slots: contiguous, a row for each rank.

        On GPUs NCCL carries them. gloo's own all-gather fills memory of its own and copies out of it; here each rank
        sends to each.
        """
        group, own = self.groups(ranks), slots[ranks.index(self.rank)]
        if gathers_itself(slots):
            dist.all_gather_single(slots.flatten(), own, group=group)
            return
        others = {rank: slot for rank, slot in zip(ranks, slots) if rank != self.rank}
        swap(dict.fromkeys(others, own), others, group)


@dataclass(frozen=True)
class Region:
    """A box of a local tensor."""

    local: str
    box: Slices

    def of(self, tensors: Tensors) -> Tensor:
        return tensors[self.local][self.box]


class Regions:
    """Finds where a rank keeps a box of a canonical tensor."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            self._pieces[piece.tensor].append(piece)

    def find(self, box: Union[Move, Share]) -> Region:
        """KeyError if no single piece contains the box: then the plan is not one for these pieces."""
        whole = tuple(slice(0, b - a) for a, b in zip(box.start, box.stop))
        found = next((region for region, inside in self.meeting(box) if inside == whole), None)
        if found is None:
            raise KeyError(f"this rank does not hold {box.tensor}[{box.start}:{box.stop}]")
        return found

    def meeting(self, box: Union[Move, Share]) -> Iterator[tuple[Region, Slices]]:
        """(where the rank keeps what it has of `box`, where in the box that is), for each piece that meets it."""
        for piece in self._pieces[box.tensor]:
            low, high = tuple(map(max, piece.start, box.start)), tuple(map(min, piece.stop, box.stop))
            if all(a < b for a, b in zip(low, high)):
                here = (slice(a - p + o, b - p + o) for a, b, p, o in zip(low, high, piece.start, piece.offset))
                inside = (slice(a - s, b - s) for a, b, s in zip(low, high, box.start))
                yield Region(piece.local, tuple(here)), tuple(inside)


class Arrival(NamedTuple):
    """A box, of `size`, that stands in a buffer from `offset` on, and the regions that parts of it go to."""

    offset: int
    size: tuple[int, ...]
    parts: tuple[tuple[Region, Slices], ...]


class Step(Protocol):
    """room: elements of the buffers that it needs; `run` gets as much, of the type that travels."""

    read: frozenset[str]
    written: frozenset[str]
    room: int

    def run(self, source: Tensors, destination: Tensors, wire: Wire, room: Tensor) -> tuple[int, int]: ...


def step_of(one: Round, source: Regions, target: Regions, rank: int) -> Step:
    """The round `one` on this rank, whose local tensors `source` and `target` know."""
    if isinstance(one, Copy):
        return _Copy([(source.find(move), target.find(move)) for move in one.moves])
    if isinstance(one, AllGather):
        mine = one.shares[one.ranks.index(rank)]
        everything = [share for shares in one.shares for share in shares]
        return _AllGather(one.ranks, [source.find(s) for s in mine], _arrivals(everything, target), _elements(mine))
    if isinstance(one, Broadcast):
        send = [source.find(s) for s in one.shares] if one.root == rank else []
        return _Broadcast(one.ranks, one.root, send, _arrivals(one.shares, target), _elements(one.shares))
    return _exchange(one, source, target)


class _Step:
    """send: regions in the order of the buffer that leaves; arrivals: of the one that comes."""

    def __init__(self, send: Sequence[Region], arrivals: Sequence[Arrival], room: int) -> None:
        self.send, self.arrivals, self.room = send, arrivals, room
        self.read = frozenset(region.local for region in send)
        self.written = frozenset(region.local for arrival in arrivals for region, _ in arrival.parts)

    def pack(self, source: Tensors, buffer: Tensor) -> None:
        offset = 0
        for region in self.send:
            values = region.of(source)
            buffer[offset:offset + values.numel()].view(values.shape).copy_(values)
            offset += values.numel()

    def unpack(self, buffer: Tensor, destination: Tensors) -> None:
        for offset, size, parts in self.arrivals:
            box = buffer[offset:offset + math.prod(size)].view(size)
            for region, inside in parts:
                region.of(destination).copy_(box[inside])


class _Copy:
    room = 0

    def __init__(self, pairs: Sequence[tuple[Region, Region]]) -> None:
        self.pairs = pairs
        self.read, self.written = (frozenset(pair[end].local for pair in pairs) for end in (0, 1))

    def run(self, source: Tensors, destination: Tensors, wire: Wire, room: Tensor) -> tuple[int, int]:
        for here, there in self.pairs:
            there.of(destination).copy_(here.of(source))
        return 0, 0


class _AllGather(_Step):
    """each: elements that every rank of the group gives. A rank packs what it gives where it shall arrive."""

    def __init__(self, ranks: tuple[int, ...], send: Sequence[Region], arrivals: Sequence[Arrival], each: int) -> None:
        super().__init__(send, arrivals, len(ranks) * each)
        self.ranks = ranks

    def run(self, source: Tensors, destination: Tensors, wire: Wire, room: Tensor) -> tuple[int, int]:
        slots = room.view(len(self.ranks), -1)
        own = slots[self.ranks.index(wire.rank)]
        self.pack(source, own)
        wire.all_gather(slots, self.ranks)
        self.unpack(room, destination)
        return (room.nbytes - own.nbytes,) * 2


class _Broadcast(_Step):
    def __init__(
        self, ranks: tuple[int, ...], root: int, send: Sequence[Region], arrivals: Sequence[Arrival], elements: int
    ) -> None:
        super().__init__(send, arrivals, elements)
        self.ranks, self.root = ranks, root

    def run(self, source: Tensors, destination: Tensors, wire: Wire, room: Tensor) -> tuple[int, int]:
        self.pack(source, room)
        dist.broadcast(room, self.root, group=wire.groups(self.ranks))
        self.unpack(room, destination)
        return (room.nbytes * (len(self.ranks) - 1), 0) if self.root == wire.rank else (0, room.nbytes)


class _Exchange(_Step):
    """sent, received: elements by peer, as they lie in the buffers that leave and come."""

    def __init__(self, send: Sequence[Region], arrivals: Sequence[Arrival], sent: Sizes, received: Sizes) -> None:
        super().__init__(send, arrivals, sum(sent.values()) + sum(received.values()))
        self.sent, self.received = sent, received

    def run(self, source: Tensors, destination: Tensors, wire: Wire, room: Tensor) -> tuple[int, int]:
        outgoing, incoming = room.tensor_split([sum(self.sent.values())])
        self.pack(source, outgoing)
        swap(_by_peer(outgoing, self.sent), _by_peer(incoming, self.received), wire.group)
        self.unpack(incoming, destination)
        return outgoing.nbytes, incoming.nbytes


def _exchange(one: Exchange, source: Regions, target: Regions) -> _Exchange:
    """Buffers hold what goes to, or comes from, one peer after the other, tensor after tensor."""
    sent = sorted(one.sent, key=lambda move: move.dst_rank)
    received = sorted(one.received, key=lambda move: move.src_rank)
    sizes: tuple[dict[int, int], dict[int, int]] = defaultdict(int), defaultdict(int)
    for move in sent:
        sizes[0][move.dst_rank] += move.elements
    for move in received:
        sizes[1][move.src_rank] += move.elements
    return _Exchange([source.find(move) for move in sent], _arrivals(received, target), *sizes)


def _by_peer(buffer: Tensor, sizes: Sizes) -> dict[int, Tensor]:
    return dict(zip(sizes, buffer.split(list(sizes.values()))))


def _arrivals(boxes: Iterable[Union[Move, Share]], target: Regions) -> list[Arrival]:
    """Boxes in the order of a buffer; of those that this rank needs nothing of, no trace is left."""
    found, offset = [], 0
    for box in boxes:
        parts = tuple(target.meeting(box))
        if parts:
            found.append(Arrival(offset, tuple(b - a for a, b in zip(box.start, box.stop)), parts))
        offset += box.elements
    return found


def _elements(boxes: Iterable[Share]) -> int:
    return sum(box.elements for box in boxes)
