"""Run under mpiexec on 3 ranks with a plan file: rows travel from pair to pair, and nobody else waits.

An order of events that an exchange of all ranks cannot have is enforced: a rank goes on, says so, and only then do the
others come. What waits too long fails. Rank 0 prints a line of JSON for each case.
"""

from __future__ import annotations

import json
import random
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Sequence
from unittest import mock

import torch
from mpi4py import MPI
from torch import Tensor

from compiler.plan import HOME
from compiler.proof.verify import load_plan
from runtime import meshes, messages, transfer_steps
from runtime.executor.executor import Executor
from runtime.executor.models import Models
from runtime.executor.sources import open_sources
from runtime.transfer_steps import Wire
from runtime.world import DistWorld

comm = MPI.COMM_WORLD
GIVES_UP = timedelta(seconds=300)
DTYPES = (torch.int64, torch.float32, torch.bool)
ROUNDS, LONGEST = 200, 3000  # elements


def main() -> None:
    torch.set_num_threads(1)
    job = meshes.start(comm)
    store = torch.distributed.distributed_c10d._get_default_store()
    for case in (who_has_nothing_goes_on, who_sends_goes_on):
        report(case.__name__, case(DistWorld(None, job.rank, job.size), store))
    for most in (messages.MOST_LEAVING, 4 * LONGEST):
        report(f"{most} bytes on their way", random_messages(most))
    report("gathered", [gathered(by_itself) for by_itself in (False, True)])
    by_step = CountingWorld(None, job.rank, job.size)
    run_counted(by_step, job)
    report("by step", by_step.counted)
    torch.distributed.destroy_process_group()


def report(case: str, found: Any) -> None:
    everyone = comm.gather(found)
    if comm.rank == 0:
        print(json.dumps({"case": case, "by rank": everyone}), flush=True)


def parts(counts: Sequence[int], dtype: torch.dtype = torch.int64, salt: int = 0) -> list[Tensor]:
    """For each rank, numbers that say where they come from."""
    return [(torch.arange(count) * 7 + 31 * comm.rank + 57 * rank + salt).remainder(101).to(dtype)
            for rank, count in enumerate(counts)]


def who_has_nothing_goes_on(world: DistWorld, store: Any) -> int:
    """Rank 2 is through before the others come."""
    return _elements(world, store, [[0, 3, 0], [5, 0, 0], [0, 0, 0]], through=2, late=(0, 1))


def who_sends_goes_on(world: DistWorld, store: Any) -> int:
    """Rank 0 sends and is through before rank 1 comes."""
    return _elements(world, store, [[0, 100_000, 0], [0, 0, 0], [0, 0, 0]], through=0, late=(1,))


def _elements(world: DistWorld, store: Any, counts: Sequence[Sequence[int]], through: int, late: Sequence[int]) -> int:
    """What arrives here of counts[from][to]. The ranks `late` do not come before the rank `through` has gone on."""
    if comm.rank in late:
        store.wait([f"rank {through} is through"], GIVES_UP)
    got = world.exchange(parts(counts[comm.rank]), [row[comm.rank] for row in counts])
    if comm.rank == through:
        store.set(f"rank {through} is through", "yes")
    world.settle()
    return sum(part.numel() for part in got)


def random_messages(most: int) -> dict[str, int]:
    """Many exchanges of any sizes, one behind the other. → elements that arrived, and those that are wrong"""
    numbers, world = random.Random(3), DistWorld(None, comm.rank, comm.size)
    world._outbox = messages.Outbox(None, most)
    arrived = wrong = held = 0
    for salt in range(ROUNDS):
        dtype = numbers.choice(DTYPES)
        counts = [[numbers.choice((0, 0, 1, numbers.randrange(LONGEST))) for _ in range(3)] for _ in range(3)]
        got = world.exchange(parts(counts[comm.rank], dtype, salt), [row[comm.rank] for row in counts])
        held = max(held, world._outbox._held)
        for rank, part in enumerate(got):
            right = torch.arange(counts[rank][comm.rank]) * 7 + 31 * rank + 57 * comm.rank + salt
            right = right.remainder(101).to(dtype)
            arrived, wrong = arrived + right.numel(), wrong + (not torch.equal(part, right))
    world.settle()
    return {"arrived": arrived, "wrong": wrong, "beyond": int(held > max(most, 8 * LONGEST))}


def gathered(by_itself: bool) -> list[list[int]]:
    """What the ranks' slots hold after an all-gather, as on GPUs or not; gloo can do it in both ways."""
    slots = torch.full((comm.size, 3), -1)
    slots[comm.rank] = torch.arange(3) + 10 * comm.rank
    with mock.patch.object(transfer_steps, "gathers_itself", lambda slots: by_itself):
        Wire(comm.rank, None, lambda ranks: None).all_gather(slots, tuple(range(comm.size)))
    return slots.tolist()


class CountingWorld(DistWorld):
    """Counts what this rank sends to and gets from others, by the transfer that it belongs to."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.counted: dict[str, list[int]] = {}
        self.transfer = ""

    def exchange(self, parts: Sequence[Tensor], receive: Sequence[int]) -> list[Tensor]:
        got = super().exchange(parts, receive)
        sent, received = (sum(p.nbytes for rank, p in enumerate(some) if rank != self.rank) for some in (parts, got))
        so_far = self.counted.setdefault(self.transfer, [0, 0])
        self.counted[self.transfer] = [so_far[0] + sent, so_far[1] + received]
        return got


def run_counted(world: CountingWorld, job: meshes.Job) -> None:
    plan = load_plan(Path(sys.argv[1]))

    def on_step(iteration: int, step: Any) -> None:
        world.transfer = f"{step.src} to {step.dst}" if step.op == "transfer" else ""

    executor = Executor(plan, world, Models(plan, job), open_sources(plan), {}, on_step)
    executor.setup()
    executor.run_iteration(1)
    assert HOME in world.transfer or not world.transfer


if __name__ == "__main__":
    main()
