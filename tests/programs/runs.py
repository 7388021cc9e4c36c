"""Run under mpiexec with a folder of plans as argument: runs one after the other through the real runtime.

Of NAME.plan.json rank 0 writes NAME.result.json:
    metrics   by iteration, as the run reports them, with those of the evaluations
    changed   by model that is trained, the largest change of any of its parameters
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from compiler.plan import Plan
from compiler.proof.verify import load_plan
from runtime import meshes
from runtime.executor.executor import Executor
from runtime.executor.models import Models
from runtime.executor.python_calls import start_ops
from runtime.executor.sources import open_sources
from runtime.run import run
from runtime.run_folder import RunFolder
from runtime.world import DistWorld


def run_plan(plan: Plan, job: meshes.Job, folder: RunFolder) -> dict[str, Any]:
    began, events = time.perf_counter(), []
    world, models, ops = DistWorld(None, job.rank, job.size), Models(plan, job), start_ops(plan)
    executor = Executor(plan, world, models, open_sources(plan), ops)
    models.prepare()
    trained = [name for name, spec in plan.models.items() if spec.optimizer]
    before = {name: copied(models.whole(name)) for name in trained}
    finished = run(plan, folder, world, models, executor, events.append)
    after = {name: models.whole(name) for name in trained}
    for runner in ops.values():
        runner.close()
    return {
        "finished": finished,
        "metrics": [event["metrics"] for event in events if event["event"] == "iteration"],
        "changed": {name: largest_difference(before[name], after[name]) for name in trained},
        "states": executor.states,
        "positions": executor.positions,
        "seconds": time.perf_counter() - began,
    }


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def largest_difference(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """0 where there are no tensors, on every rank but the first."""
    return max((float((after[name] - before[name]).abs().max()) for name in before), default=0.0)


def main() -> None:
    torch.set_num_threads(1)
    comm, folder = MPI.COMM_WORLD, Path(sys.argv[1])
    job = meshes.start(comm)
    for path in sorted(folder.glob("*.plan.json")):
        name = path.name.removesuffix(".plan.json")
        scratch = RunFolder(folder / f"{name}.run")
        if comm.rank == 0:
            scratch.create()
        comm.Barrier()
        result = run_plan(load_plan(path), job, scratch)
        if comm.rank == 0:
            (folder / f"{name}.result.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
