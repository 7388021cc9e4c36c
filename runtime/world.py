"""What ranks say to each other about rows, over torch.distributed or between threads of one process.

The executor is written against `World` alone, so that `rlflowc eval --dp N` walks through the very code that N ranks do.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Protocol, Sequence

import torch
from torch import Tensor

from runtime.messages import Outbox
from runtime.reducers import DistReducer, Reducer, SoloReducer, ThreadReducer


class World(Protocol):
    """rank of size ranks. reducer: sums, minima and maxima over all of them."""

    rank: int
    size: int
    reducer: Reducer

    def exchange(self, parts: Sequence[Tensor], receive: Sequence[int]) -> list[Tensor]:
        """parts[r] (1-D, one dtype) goes to rank r; returns what each rank sent here, `receive[r]` elements from rank r.

        All ranks call it with numbers that agree. Parts are not to be written to any more.
        """

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """Every rank's 1-D `part` in rank order, of `sizes[r]` elements."""

    def settle(self) -> None:
        """Returns when all that this rank sent has arrived."""


class SoloWorld:
    """One rank: nothing moves."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.reducer = SoloReducer()

    def exchange(self, parts: Sequence[Tensor], receive: Sequence[int]) -> list[Tensor]:
        return [parts[0]]

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        return part

    def settle(self) -> None:
        """Nothing is on its way."""


class DistWorld:
    """The ranks of a torch.distributed group, all of the job's. Rows are in the host's memory. bool travels as bytes.

    Parts of an exchange go from pair to pair: a rank waits for what it gets, and for nothing else. It says what it
    expects before it sends, so that ranks that send to each other do not wait for each other.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.rank, self.size, self._group = rank, size, group
        self.reducer = DistReducer(group)
        self._outbox = Outbox(group)

    def exchange(self, parts: Sequence[Tensor], receive: Sequence[int]) -> list[Tensor]:
        arrived = [torch.empty(count, dtype=parts[0].dtype) for count in receive]
        arrived[self.rank] = parts[self.rank]
        others = [rank for rank in range(self.size) if rank != self.rank]
        awaited = [torch.distributed.irecv(_wired(arrived[rank]), rank, group=self._group)
                   for rank in others if receive[rank]]
        for rank in (rank for rank in others if parts[rank].numel()):
            self._outbox.send(_wired(parts[rank]), rank)
        for work in awaited:
            work.wait()
        return arrived

    def settle(self) -> None:
        self._outbox.settle()

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        widest = max(sizes, default=0)
        if not widest:
            return part.new_zeros(0)
        wire = torch.uint8 if part.dtype == torch.bool else part.dtype
        mine = torch.zeros(widest, dtype=wire)
        mine[: part.numel()] = part
        everyone = torch.empty(widest * self.size, dtype=wire)
        torch.distributed.all_gather_into_tensor(everyone, mine, group=self._group)
        return torch.cat([row[:n] for row, n in zip(everyone.view(self.size, widest), sizes)]).to(part.dtype)


def _wired(tensor: Tensor) -> Tensor:
    """The same memory in a type that travels. Raises ValueError for what is not in the host's memory: whoever receives
    it waits for it there."""
    if tensor.device.type != "cpu":
        raise ValueError(f"rows travel from the host's memory, not from {tensor.device}")
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


class _Meeting:
    """Where N threads leave something for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.left: list[Any] = [None] * size


class ThreadWorld:
    """One of N shards that are threads of this process."""

    def __init__(self, rank: int, size: int, meeting: _Meeting, reducer: Reducer) -> None:
        self.rank, self.size, self.reducer, self._meeting = rank, size, reducer, meeting

    def _swap(self, mine: Any) -> list[Any]:
        self._meeting.barrier.wait()
        self._meeting.left[self.rank] = mine
        self._meeting.barrier.wait()
        return list(self._meeting.left)

    def exchange(self, parts: Sequence[Tensor], receive: Sequence[int]) -> list[Tensor]:
        return [theirs[self.rank] for theirs in self._swap(list(parts))]

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        return torch.cat(self._swap(part))

    def settle(self) -> None:
        """A meeting ends when all have taken what is theirs."""


def run_threads(size: int, work: Callable[[World], Any]) -> list[Any]:
    """Runs `work(world)` on `size` shards and returns their results in order; the first error of any is raised."""
    if size == 1:
        return [work(SoloWorld())]
    meeting, reducers = _Meeting(size), ThreadReducer.group(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def shard(rank: int) -> None:
        try:
            results[rank] = work(ThreadWorld(rank, size, meeting, reducers[rank]))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)
            meeting.barrier.abort()
            reducers[rank].table.barrier.abort()

    threads = [threading.Thread(target=shard, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results
