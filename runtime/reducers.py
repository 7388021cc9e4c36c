"""What crosses shards while equations are evaluated: tiny sums and extrema, and the gathers behind order statistics.

A reducer joins the shards that hold the rows of one batch. All its methods are collective: every shard calls them, in
the same order. No gradient flows through them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_LOCAL = {
    "sum": lambda parts: parts.sum(0),
    "min": lambda parts: parts.amin(0),
    "max": lambda parts: parts.amax(0),
}

_DISTRIBUTED = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class Reducer(Protocol):
    """rank: this shard's place in the order of shards; size: how many there are."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Elementwise "sum", "min" or "max" over the shards; same shape on each. Sums of f32 are taken in f64."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[size, *shape], in shard order; same shape on each."""

    def all_gather_rows(self, tensor: Tensor) -> list[Tensor]:
        """The shards' tensors in shard order; their first sizes may differ (also 0)."""


@dataclass(frozen=True)
class SoloReducer:
    """One shard that holds every row; gradients pass, since nothing is exchanged."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor[None]

    def all_gather_rows(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


@dataclass(frozen=True)
class _Table:
    """Where the threads of one group lay their tensors down for the others."""

    barrier: threading.Barrier
    slots: list = field(default_factory=list)


@dataclass(frozen=True)
class ThreadReducer:
    """One of `size` shards that are threads of this process."""

    rank: int
    size: int
    table: _Table

    @staticmethod
    def group(size: int) -> list["ThreadReducer"]:
        table = _Table(threading.Barrier(size), [None] * size)
        return [ThreadReducer(rank, size, table) for rank in range(size)]

    @staticmethod
    def run(size: int, work: Callable[["ThreadReducer"], Any]) -> list:
        """`work(reducer)` on `size` threads; the results in shard order. The first error of a shard is raised again."""
        results: list = [None] * size
        errors: list = []
        shards = ThreadReducer.group(size)

        def shard(reducer: ThreadReducer) -> None:
            try:
                results[reducer.rank] = work(reducer)
            except BaseException as error:
                # The others wait for this shard at the barrier: let them go, their errors are consequences.
                errors.append(error)
                reducer.table.barrier.abort()

        threads = [threading.Thread(target=shard, args=(r,), daemon=True) for r in shards]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results

    def all_gather_rows(self, tensor: Tensor) -> list[Tensor]:
        self.table.slots[self.rank] = tensor.detach()
        self.table.barrier.wait()
        parts = list(self.table.slots)
        self.table.barrier.wait()
        return parts

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.all_gather_rows(tensor))

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        wide = _wide(tensor, op)
        return _LOCAL[op](self.all_gather(wide)).to(tensor.dtype)


@dataclass(frozen=True)
class DistReducer:
    """The members of a torch.distributed group (gloo or NCCL); None is the default group.

    device: where tensors must lie to be exchanged ("cpu" for gloo)
    """

    group: Optional[dist.ProcessGroup] = None
    device: str = "cpu"

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        wide = _wide(tensor, op).detach().to(self.device, copy=True)
        dist.all_reduce(wide, _DISTRIBUTED[op], self.group)
        return wide.to(tensor.device, tensor.dtype)

    def all_gather(self, tensor: Tensor) -> Tensor:
        local = tensor.detach().to(self.device).contiguous()
        parts = local.new_empty((self.size, *local.shape))
        dist.all_gather_into_tensor(parts.view(-1), local.view(-1), self.group)
        return parts.to(tensor.device)

    def all_gather_rows(self, tensor: Tensor) -> list[Tensor]:
        """Padded to the longest shard, since gloo gathers equal shapes only."""
        counts = self.all_gather(torch.tensor([tensor.shape[0]])).flatten().tolist()
        padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
        padded[:tensor.shape[0]] = tensor.detach()
        return [part[:count] for part, count in zip(self.all_gather(padded), counts)]


def _wide(tensor: Tensor, op: str) -> Tensor:
    return tensor.double() if op == "sum" and tensor.is_floating_point() else tensor
