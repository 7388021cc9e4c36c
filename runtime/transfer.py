"""Executes a planned move of weights between ranks over torch.distributed, round after round (`compiler.resharding.rounds`).

Every rank knows the whole plan, so sizes are never sent.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Callable, Iterable, Optional, Union

import torch
import torch.distributed as dist

from compiler.resharding.redistribute import WeightTransfer
from compiler.resharding.rounds import BUCKET_BYTES, rounds
from compiler.weights import Piece
from runtime.transfer_steps import Regions, Tensors, Wire, step_of

Notice = Callable[[str], None]


class WeightMover:
    """Carries out `transfer` on global rank `rank`; all ranks of `group` (None: all ranks) call it together.

    groups: the process group of a set of ranks, ascending, that gathers (`transfer.groups`); not asked if none does
    dtype: what travels; source values are rounded to it, destinations convert it to theirs.
    bucket_bytes: bound on what a rank sends, and on what it receives, in one round. Buffers serve one round after the
    other; between moves there are none.
    device: where the buffers are that travel; ends may lie elsewhere
    bytes_sent, bytes_received: by this rank to and from others, since it was made; what it gathers or broadcasts counts
    once for each other rank of its group.
    Raises ValueError if the group lacks ranks of the plan, or `dtype` is not as wide as the plan says.
    """

    def __init__(
        self, transfer: WeightTransfer, rank: int, group: Optional[dist.ProcessGroup] = None,
        groups: Optional[Callable[[tuple[int, ...]], dist.ProcessGroup]] = None, dtype: torch.dtype = torch.float32,
        bucket_bytes: int = BUCKET_BYTES, device: Union[str, torch.device] = "cpu",
    ) -> None:
        peers = tuple(dist.get_process_group_ranks(group))
        if not set(transfer.ranks) <= set(peers):
            raise ValueError(f"the transfer needs ranks {transfer.ranks}, the group has {peers}")
        if dtype.itemsize != transfer.itemsize:
            raise ValueError(f"the plan counts {transfer.itemsize} bytes an element, {dtype} has {dtype.itemsize}")
        self.transfer = transfer
        self._wire, self._dtype, self._device = Wire(rank, group, groups), dtype, torch.device(device)
        self._covered = covered_elements(transfer.dst.pieces(rank))
        self._sizes = transfer.dst.local_tensors(rank)
        ends = Regions(transfer.src.pieces(rank)), Regions(transfer.dst.pieces(rank))
        self._steps = [step_of(one, *ends, rank) for one in rounds(transfer, rank, bucket_bytes)]
        self._room = max((step.room for step in self._steps), default=0)
        self._first = _events(reversed(list(enumerate(step.written for step in self._steps))), self._sizes)
        self._last = _events(enumerate(step.read for step in self._steps), transfer.src.local_tensors(rank))
        self.bytes_sent = self.bytes_received = 0

    @torch.no_grad()
    def move(
        self, source: Tensors, destination: Tensors, arrives: Optional[Notice] = None, left: Optional[Notice] = None
    ) -> None:
        """Fills the tensors of `destination` in place from those of `source`; both by local names, {} where none.

        arrives: called with a name of `destination` before anything is written there
        left: called with a name of `source` when nothing more is read there
        Padding of the destination becomes zero. Raises ValueError if a destination tensor has another shape.
        """
        for name, size in self._sizes.items():
            check_size(name, destination[name], size)
        room = torch.empty(self._room, dtype=self._dtype, device=self._device)
        for i in range(-1, len(self._steps)):
            for name in self._first.get(i, ()):
                if arrives is not None:
                    arrives(name)
                clear_padding(destination[name], self._covered.get(name, 0))
            if i >= 0:
                step = self._steps[i]
                sent, received = step.run(source, destination, self._wire, room[:step.room])
                self.bytes_sent += sent
                self.bytes_received += received
            for name in self._last.get(i, ()) if left is not None else ():
                left(name)


def _events(touched: Iterable[tuple[int, frozenset[str]]], names: Iterable[str]) -> dict[int, list[str]]:
    """The names by the last of the steps that touch them, -1 for those that none does."""
    at = dict.fromkeys(names, -1)
    for i, some in touched:
        at |= dict.fromkeys(some, i)
    found: dict[int, list[str]] = defaultdict(list)
    for name, i in at.items():
        found[i].append(name)
    return found


def check_size(name: str, tensor: torch.Tensor, size: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != size:
        raise ValueError(f"local tensor {name} has shape {tuple(tensor.shape)}, its layout says {size}")


def clear_padding(tensor: torch.Tensor, covered: int) -> None:
    """Zeros a tensor that has more than the `covered` elements, so that its padding is defined."""
    if covered < tensor.numel():
        tensor.zero_()


def covered_elements(pieces: Iterable[Piece]) -> dict[str, int]:
    """By local tensor, the elements that `pieces` fill; the others are padding."""
    found: dict[str, int] = defaultdict(int)
    for piece in pieces:
        found[piece.local] += piece.elements
    return found
