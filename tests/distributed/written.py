"""Run under mpiexec with a folder of plans as argument: runs each plan that is for as many ranks, one after the other.

Of NAME.plan.json rank 0 writes NAME.result.json, metrics by iteration and responses as `matrix.py` has them, and
NAME.pt, all weights of all trained models. A plan that has its result already is left out.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from matrix import Recorder
from mpi4py import MPI

from compiler.plan import Plan
from compiler.proof.verify import load_plan
from runtime import meshes
from runtime.executor.models import Models
from runtime.executor.python_calls import start_ops
from runtime.executor.sources import open_sources
from runtime.run import run
from runtime.run_folder import RunFolder
from runtime.world import DistWorld, SoloWorld


def run_plan(plan: Plan, job: meshes.Job, folder: RunFolder) -> dict:
    """Metrics, responses and weights of a run."""
    world = DistWorld(None, job.rank, job.size) if job.size > 1 else SoloWorld()
    models, ops, events = Models(plan, job), start_ops(plan), []
    try:
        executor = Recorder(plan, world, models, open_sources(plan), ops)
        models.prepare()
        run(plan, folder, world, models, executor, events.append)
        weights = {name: models.whole(name) for name, spec in plan.models.items() if spec.optimizer}
    finally:
        for runner in ops.values():
            runner.close()
    metrics = [event["metrics"] for event in events if event["event"] == "iteration"]
    return {"metrics": metrics, "responses": executor.responses, "weights": weights}


def main() -> None:
    folder, comm = Path(sys.argv[1]), MPI.COMM_WORLD
    torch.set_num_threads(1)
    job = meshes.start(comm)
    for path in sorted(folder.glob("*.plan.json")):
        name, plan = path.name.removesuffix(".plan.json"), load_plan(path)
        done = comm.bcast((folder / f"{name}.pt").exists())
        if plan.world != comm.size or done:
            continue
        (folder / "current").write_text(name)
        scratch = RunFolder(folder / f"{name}.run")
        if comm.rank == 0:
            shutil.rmtree(scratch.path, ignore_errors=True)
            scratch.create()
        comm.barrier()
        found = run_plan(plan, job, scratch)
        if comm.rank == 0:
            weights = found.pop("weights")
            (folder / f"{name}.result.json").write_text(json.dumps(found))
            torch.save(weights, folder / f"{name}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
