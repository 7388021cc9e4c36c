"""Run under mpiexec with a plan file: calls of models on ranks of their own meet while they compute.

At a meeting each rank says that it is in its call, and waits in there until the others are in theirs. Were one call to
wait for another to end, no rank would ever get further. Rank 0 prints, `by rank`, how often it met the others, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable

import torch
from mpi4py import MPI

from compiler.plan import Plan
from compiler.proof.verify import load_plan
from runtime import meshes
from runtime.executor.executor import Executor
from runtime.executor.models import Models
from runtime.executor.sources import open_sources
from runtime.world import DistWorld

GIVES_UP = timedelta(seconds=300)


@dataclass(frozen=True)
class Guest:
    """A call that comes to a meeting time after time, but for the first `late` times; its layout has one rank."""

    layout: str
    method: str
    late: int = 0


EACH_ALONE = {
    "forward": (Guest("actor.train", "forward"), Guest("ref.forward", "forward"), Guest("critic.train", "forward")),
    "train": (Guest("actor.train", "train"), Guest("critic.train", "train")),
    "step": (Guest("actor.train", "step"), Guest("critic.train", "step")),
}
# The first batch is sampled before anything is trained; the last training has no batch beside it.
WITH_LAG = {"beside": (Guest("actor.train", "train"), Guest("actor.generate", "generate", late=1))}


class Meetings:
    """times: how often the guests of a meeting all come, where that is limited"""

    def __init__(self, plan: Plan) -> None:
        self.held, self.calls = Counter(), Counter()
        self.meetings, self.times = (WITH_LAG, plan.run.steps - 1) if plan.run.lag else (EACH_ALONE, None)
        self.store = torch.distributed.distributed_c10d._get_default_store()

    def invite(self, layout: str, engine: Any) -> None:
        for name, guests in self.meetings.items():
            for guest in (g for g in guests if g.layout == layout):
                setattr(engine, guest.method, self._coming(name, guests, guest, getattr(engine, guest.method)))

    def _coming(self, name: str, guests: tuple[Guest, ...], mine: Guest, call: Callable) -> Callable:
        def called(*arguments: Any, **more: Any) -> Any:
            self.calls[name] += 1
            number = self.calls[name] - mine.late
            if number > 0 and (self.times is None or number <= self.times):
                self.held[name] += 1
                self.store.set(f"{name} {number} {mine.layout}", "here")
                self.store.wait([f"{name} {number} {guest.layout}" for guest in guests], GIVES_UP)
            return call(*arguments, **more)

        return called


def main() -> None:
    torch.set_num_threads(1)
    comm, plan = MPI.COMM_WORLD, load_plan(Path(sys.argv[1]))
    job = meshes.start(comm)
    models, meetings = Models(plan, job), Meetings(plan)
    executor = Executor(plan, DistWorld(None, job.rank, job.size), models, open_sources(plan), {})
    for layout in models.layouts:
        if models.engine(layout) is not None:
            meetings.invite(layout, models.engine(layout))
    executor.setup()
    for number in range(1, plan.run.steps + 1):
        executor.run_iteration(number)
    everyone = comm.gather(dict(meetings.held))
    if comm.rank == 0:
        print(json.dumps({"by rank": everyone}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
