"""Run under mpiexec with a plan as argument: how much memory each rank has resident after iteration 20, and at the end.

What is free but kept by the allocator for later is given back before it is read: it comes and goes with lengths.
Rank 0 prints one line of JSON: `by rank`, [bytes after iteration 20, bytes after the last, seconds an iteration].
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from pathlib import Path

import psutil
import torch
from mpi4py import MPI

from compiler.proof.verify import load_plan
from runtime import meshes
from runtime.executor.executor import Executor
from runtime.executor.models import Models
from runtime.executor.python_calls import start_ops
from runtime.executor.sources import open_sources
from runtime.run import run
from runtime.run_folder import RunFolder
from runtime.world import DistWorld

SETTLED = 20  # iterations


def main() -> None:
    torch.set_num_threads(1)
    comm, path = MPI.COMM_WORLD, Path(sys.argv[1])
    job, plan, folder = meshes.start(comm), load_plan(path), RunFolder(path.with_suffix(".run"))
    if comm.rank == 0:
        folder.create()
    comm.Barrier()
    models = Models(plan, job)
    executor = Executor(plan, DistWorld(None, job.rank, job.size), models, open_sources(plan), start_ops(plan))
    models.prepare()
    process, resident, began = psutil.Process(), [], time.perf_counter()

    def measure(event: dict) -> None:
        if event["event"] == "iteration" and event["iteration"] in (SETTLED, plan.run.steps):
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            resident.append(process.memory_info().rss)

    run(plan, folder, executor.world, models, executor, measure)
    seconds = (time.perf_counter() - began) / plan.run.steps
    every = comm.gather([*resident, seconds])
    if comm.rank == 0:
        print(json.dumps({"by rank": every}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
