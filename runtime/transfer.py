"""Executes a planned move of weights between ranks over torch.distributed.

Every rank of the group knows the whole plan, so sizes are never sent: each step is one `all_to_all_single`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Iterable, Iterator, Mapping, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from compiler.redistribute import Move, WeightTransfer
from compiler.weights import Piece

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Region:
    """A box of a local tensor."""

    local: str
    box: tuple[slice, ...]

    def of(self, tensors: Tensors) -> Tensor:
        return tensors[self.local][self.box]


class Regions:
    """Finds where a rank keeps a box of a canonical tensor."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            self._pieces[piece.tensor].append(piece)

    def find(self, tensor: str, start: Sequence[int], stop: Sequence[int]) -> Region:
        """KeyError if no single piece contains the box: then the plan is not one for these pieces."""
        for piece in self._pieces[tensor]:
            if all(a <= b for a, b in zip(piece.start, start)) and all(a >= b for a, b in zip(piece.stop, stop)):
                shift = [offset - first for offset, first in zip(piece.offset, piece.start)]
                return Region(piece.local, tuple(slice(a + s, b + s) for a, b, s in zip(start, stop, shift)))
        raise KeyError(f"this rank does not hold {tensor}[{tuple(start)}:{tuple(stop)}]")


@dataclass(frozen=True)
class _Step:
    """One exchange: regions in order of peers, and elements by peer."""

    send: tuple[tuple[Region, int], ...]
    receive: tuple[tuple[Region, int], ...]
    send_splits: list[int]
    receive_splits: list[int]


class WeightMover:
    """Carries out `transfer` on global rank `rank`; all ranks of `group` (None: all ranks) call it together.

    dtype: what travels; source values are rounded to it, destinations convert it to theirs.
    bucket_bytes: bound on what a rank sends, and on what it receives, in one exchange.
    bytes_sent, bytes_received: by this rank to and from others, since it was made.
    Raises ValueError if the group lacks ranks of the plan, or `dtype` is not as wide as the plan says.
    """

    def __init__(
        self, transfer: WeightTransfer, rank: int, group: Optional[dist.ProcessGroup] = None,
        dtype: torch.dtype = torch.float32, bucket_bytes: int = 64 << 20, device: str = "cpu",
    ) -> None:
        peers = dist.get_process_group_ranks(group)
        if not set(transfer.ranks) <= set(peers):
            raise ValueError(f"the transfer needs ranks {transfer.ranks}, the group has {tuple(peers)}")
        if dtype.itemsize != transfer.itemsize:
            raise ValueError(f"the plan counts {transfer.itemsize} bytes an element, {dtype} has {dtype.itemsize}")
        self._group, self._dtype, self._device = group, dtype, device
        self._covered = covered_elements(transfer.dst.pieces(rank))
        self._sizes = transfer.dst.local_tensors(rank)
        source, target = Regions(transfer.src.pieces(rank)), Regions(transfer.dst.pieces(rank))
        self._copies = [
            (source.find(m.tensor, m.start, m.stop), target.find(m.tensor, m.start, m.stop))
            for m in transfer.moves if m.is_local and m.src_rank == rank
        ]
        remote = [m for m in transfer.moves if not m.is_local]
        limit = max(bucket_bytes // dtype.itemsize, 1)
        self._steps = [_step(bucket, rank, peers, source, target) for bucket in buckets(remote, limit)]
        self.bytes_sent = self.bytes_received = 0

    @torch.no_grad()
    def move(self, source: Tensors, destination: Tensors) -> None:
        """Fills the tensors of `destination` in place from those of `source`; both by local names, {} where none.

        Padding of the destination becomes zero. Raises ValueError if a destination tensor has another shape.
        """
        for name, size in self._sizes.items():
            check_size(name, destination[name], size)
            clear_padding(destination[name], self._covered.get(name, 0))
        for here, there in self._copies:
            there.of(destination).copy_(here.of(source))
        for step in self._steps:
            self._exchange(step, source, destination)

    def _exchange(self, step: _Step, source: Tensors, destination: Tensors) -> None:
        outgoing = torch.empty(sum(step.send_splits), dtype=self._dtype, device=self._device)
        incoming = torch.empty(sum(step.receive_splits), dtype=self._dtype, device=self._device)
        for part, (region, _) in zip(outgoing.split([n for _, n in step.send]), step.send):
            values = region.of(source)
            part.view(values.shape).copy_(values)
        dist.all_to_all_single(incoming, outgoing, step.receive_splits, step.send_splits, group=self._group)
        for part, (region, _) in zip(incoming.split([n for _, n in step.receive]), step.receive):
            values = region.of(destination)
            values.copy_(part.view(values.shape))
        self.bytes_sent += outgoing.nbytes
        self.bytes_received += incoming.nbytes


def buckets(moves: Iterable[Move], limit: int) -> Iterator[list[Move]]:
    """Cuts `moves` in order so that in each bucket no rank sends, and none receives, more than `limit` elements.

    A move larger than that is cut along its first dim; one row always fits.
    """
    bucket: list[Move] = []
    load: dict[tuple[str, int], int] = defaultdict(int)
    for move in (part for move in moves for part in _parts(move, limit)):
        ends = (("send", move.src_rank), ("receive", move.dst_rank))
        if bucket and any(load[end] + move.elements > limit for end in ends):
            yield bucket
            bucket, load = [], defaultdict(int)
        bucket.append(move)
        for end in ends:
            load[end] += move.elements
    if bucket:
        yield bucket


def _parts(move: Move, limit: int) -> Iterator[Move]:
    first, end = move.start[0], move.stop[0]
    rows = max(limit * (end - first) // move.elements, 1)
    for row in range(first, end, rows):
        yield replace(move, start=(row, *move.start[1:]), stop=(min(row + rows, end), *move.stop[1:]))


def _step(bucket: list[Move], rank: int, peers: Sequence[int], source: Regions, target: Regions) -> _Step:
    outgoing: dict[int, list] = {peer: [] for peer in peers}
    incoming: dict[int, list] = {peer: [] for peer in peers}
    for move in bucket:
        if move.src_rank == rank:
            outgoing[move.dst_rank].append((source.find(move.tensor, move.start, move.stop), move.elements))
        if move.dst_rank == rank:
            incoming[move.src_rank].append((target.find(move.tensor, move.start, move.stop), move.elements))
    return _Step(
        tuple(itertools.chain(*outgoing.values())), tuple(itertools.chain(*incoming.values())),
        [sum(n for _, n in parts) for parts in outgoing.values()],
        [sum(n for _, n in parts) for parts in incoming.values()],
    )


def check_size(name: str, tensor: Tensor, size: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != size:
        raise ValueError(f"local tensor {name} has shape {tuple(tensor.shape)}, its layout says {size}")


def clear_padding(tensor: Tensor, covered: int) -> None:
    """Zeros a tensor that has more than the `covered` elements, so that its padding is defined."""
    if covered < tensor.numel():
        tensor.zero_()


def covered_elements(pieces: Iterable[Piece]) -> dict[str, int]:
    """By local tensor, the elements that `pieces` fill; the others are padding."""
    found: dict[str, int] = defaultdict(int)
    for piece in pieces:
        found[piece.local] += piece.elements
    return found
