"""Run under mpiexec with a folder of plans as argument: runs each plan, and goes on from the first checkpoint of another.

For each NAME.plan.json rank 0 prints a line of JSON:
    name, failed    the plan, and the code of the diagnostic that ended it, "" for none
    metrics         by iteration
    files           of the last checkpoint, by name, their digests
    begun           by rank, by step, bytes that were allocated at most when it began, beside those before the models
                    were made. What is resident would say more than the plan: heaps that are free but kept, and pages
                    that ranks share for their messages
    peaks           by rank, the most of them
    resumed         the same metrics and files of a run that goes on from the first checkpoint
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any, Optional

import torch
from mpi4py import MPI

from compiler.plan import Plan
from compiler.proof.verify import load_plan
from compiler.reading.tables import title_of
from rlhf_dsl.diagnostics import DiagnosticError
from runtime import checkpoint, meshes
from runtime.executor.executor import Executor
from runtime.executor.models import Models
from runtime.executor.python_calls import start_ops
from runtime.executor.sources import open_sources
from runtime.run import run
from runtime.run_folder import RunFolder
from runtime.world import DistWorld

class Mallinfo(ctypes.Structure):
    """See mallinfo2(3): of all arenas together."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


LIBC = ctypes.CDLL(None)
LIBC.mallinfo2.restype = Mallinfo


def allocated() -> int:
    """Bytes that this process has allocated and not freed, small ones in its heaps and large ones by themselves."""
    found = LIBC.mallinfo2()
    return found.uordblks + found.hblkhd


def ran(plan: Plan, job: meshes.Job, folder: RunFolder, start: Optional[Path] = None) -> dict[str, Any]:
    if job.rank == 0:
        folder.create()
    MPI.COMM_WORLD.Barrier()
    ops = start_ops(plan)
    try:
        events, begun = _followed(plan, job, folder, ops, start)
    finally:
        for runner in ops.values():
            runner.close()
    MPI.COMM_WORLD.Barrier()
    saved = json.loads((checkpoint.latest(folder.checkpoints) / checkpoint.FILE).read_text())
    metrics = {event["iteration"]: event["metrics"] for event in events}
    return {"metrics": metrics, "files": saved["files"], "begun": MPI.COMM_WORLD.allgather(begun),
            "peaks": MPI.COMM_WORLD.allgather(max(begun.values()))}


def _followed(plan: Plan, job: meshes.Job, folder: RunFolder, ops: dict[str, Any],
              start: Optional[Path]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """(what was told of each iteration, the most that was allocated when each of their steps began)"""
    def begin(title: str) -> None:
        begun[title] = max(begun.get(title, 0), allocated() - before)

    gc.collect()
    before, events, begun = allocated(), [], {}
    models = Models(plan, job, folder.path / "state")
    executor = Executor(plan, DistWorld(None, job.rank, job.size), models, open_sources(plan), ops,
                        lambda iteration, step: begin(title_of(step)))
    models.prepare()
    resumed = checkpoint.restore(start, models, executor) if start else 0
    begun.clear()  # what is loaded is offloaded where it is first used

    def follow(event: dict[str, Any]) -> None:
        if event["event"] == "iteration":
            events.append(event)

    run(plan, folder, executor.world, models, executor, follow, resumed)
    return events, begun


def told(path: Path, job: meshes.Job) -> dict[str, Any]:
    """What the plan in `path` gave."""
    plan, name = load_plan(path), path.name.removesuffix(".plan.json")
    whole, half = RunFolder(path.with_name(f"{name}.run")), RunFolder(path.with_name(f"{name}.resumed"))
    try:
        found = ran(plan, job, whole)
        found["resumed"] = ran(plan, job, half, whole.checkpoints / checkpoint.name_of(1))
    except DiagnosticError as error:
        return {"name": name, "failed": error.diagnostics[0].code}
    return {"name": name, "failed": "", **found}


def main() -> None:
    torch.set_num_threads(1)
    job = meshes.start(MPI.COMM_WORLD)
    for path in sorted(Path(sys.argv[1]).glob("*.plan.json")):
        found = told(path, job)
        if job.rank == 0:
            print(json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
