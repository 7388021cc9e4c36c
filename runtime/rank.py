"""One rank of a run: `python -m runtime.rank RUN_FOLDER`, started by the launcher or by mpiexec."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Optional

from runtime.launch import die_with_parent
from runtime.reporter import LineReporter, PipeReporter, silent
from runtime.run_folder import Position, RunFolder

STEP_EVENT_S = 0.1  # the live line need not change faster
EXIT_FAILED, EXIT_STOPPED = 4, 130
LOST_PEER = ("closed by peer", "reset by peer", "Broken pipe", "NCCL communicator was aborted")
LOST_PEER_WAIT_S = 5  # by then MPI has noticed the rank that really died, and ends this one


def main(argv: Optional[list[str]] = None, launched: bool = True) -> int:
    """Runs the plan in the folder to its end. The exit code is that of the command line; a failure aborts all ranks."""
    arguments = sys.argv[1:] if argv is None else argv
    if launched:
        die_with_parent()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    folder = RunFolder(Path(arguments[0]))
    report = _open_channels(folder, comm.rank, launched)
    try:
        return _run(comm, folder, report)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
        _give_up(comm, folder, error)
        raise


def _open_channels(folder: RunFolder, rank: int, launched: bool) -> Callable[[dict], None]:
    """What a rank prints goes to its log; rank 0 keeps a way to the launcher or the terminal for its events."""
    talk = os.fdopen(os.dup(1 if launched else 2), "w", encoding="utf-8")
    log = os.open(folder.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if rank != 0:
        return silent
    return PipeReporter(talk) if launched else LineReporter(talk)


def _run(comm: Any, folder: RunFolder, report: Callable[[dict], None]) -> int:
    import torch

    from compiler.verify import load_plan
    from runtime import meshes
    from runtime.executor.executor import Executor
    from runtime.executor.models import Models
    from runtime.executor.python_calls import start_ops
    from runtime.executor.sources import open_sources
    from runtime.run import run
    from runtime.world import DistWorld, SoloWorld

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    plan = load_plan(folder.plan)
    _check_world(comm, plan)
    job = meshes.start(comm)
    world = DistWorld(None, comm.rank, comm.size) if comm.size > 1 else SoloWorld()
    if comm.rank == 0:
        report({"event": "start", "program": plan.program.name, "of": plan.run.steps, "ranks": comm.size, "folder": str(folder.path)})
    models = Models(plan, job, folder.checkpoints, lambda text: report({"event": "saved", "text": text}))
    position = Position(folder, comm.rank)
    ops = start_ops(plan)
    executor = Executor(plan, world, models, open_sources(plan), ops, _follow(plan, position, report))
    models.prepare()
    finished = run(plan, folder, world, models, executor, report)
    for runner in ops.values():
        runner.close()
    (folder.path / "state" / f"moved-{comm.rank}.json").write_text(json.dumps(models.bytes_moved()))
    comm.Barrier()
    report({"event": "done", "finished": finished, "text": "finished" if finished else "stopped as asked; the models are saved"})
    position.close()
    torch.distributed.destroy_process_group()
    return 0 if finished else EXIT_STOPPED


def _check_world(comm: Any, plan: Any) -> None:
    from rlhf_dsl.diagnostics import fault

    if comm.size != plan.world:
        raise fault("R0152", started=comm.size, wanted=plan.world)


def _follow(plan: Any, position: Position, report: Callable[[dict], None]) -> Callable[[int, Any], None]:
    """Marks where the rank stands and tells of steps, not more often than an eye can follow."""
    from compiler.verify import walk

    numbers = {id(step): i for i, step in enumerate(walk(plan))}
    spoken = 0.0

    def on_step(iteration: int, step: Any) -> None:
        nonlocal spoken
        position.at(iteration, numbers.get(id(step), -1))
        now = time.monotonic()
        if now - spoken > STEP_EVENT_S:
            spoken = now
            report({"event": "step", "iteration": iteration, "text": f"{step.op} {step.name}"})

    return on_step


def _give_up(comm: Any, folder: RunFolder, error: BaseException) -> None:
    from rlhf_dsl.diagnostics import DiagnosticError
    from rlhf_dsl.render import render

    trace = traceback.format_exc()
    print(trace, file=sys.stderr, flush=True)
    lost = not isinstance(error, DiagnosticError) and any(sign in str(error) for sign in LOST_PEER)
    report = {"consequence": lost, "trace": trace, "kind": type(error).__name__, "text": str(error), "rendered": "", "code": EXIT_FAILED}
    if isinstance(error, DiagnosticError):
        report |= {"rendered": render(error.diagnostics, color=False), "code": error.exit_code}
    folder.write_failure(comm.rank, report)
    sys.stderr.flush()
    if lost:
        time.sleep(LOST_PEER_WAIT_S)
    comm.Abort(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main())
