"""One rank of a run: `python -m runtime.rank RUN_FOLDER [CHECKPOINT]`, started by the launcher or by mpiexec."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any, Callable, Optional

from runtime.launch import die_with_parent
from runtime.reporter import LineReporter, PipeReporter, silent
from runtime.run_folder import Position, RunFolder

STEP_EVENT_S = 0.1  # the live line need not change faster
EXIT_FAILED, EXIT_STOPPED = 4, 130
LOST_PEER = ("closed by peer", "reset by peer", "Broken pipe", "NCCL communicator was aborted")
LOST_PEER_WAIT_S = 5  # by then MPI has noticed the rank that really died, and ends this one


def main(argv: Optional[list[str]] = None, launched: bool = True, verbose: bool = False) -> int:
    """Runs the plan in the folder to its end. The exit code is that of the command line; a failure aborts all ranks.

    launched: by our launcher, which reports a failure; else the first rank that fails does, with its trace if `verbose`
    """
    arguments = sys.argv[1:] if argv is None else argv
    if launched:
        die_with_parent()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    folder = RunFolder(Path(arguments[0]))
    talk = _open_channels(folder, comm.rank, launched)
    events = PipeReporter(talk) if launched else LineReporter(talk)
    try:
        return _run(comm, folder, events if comm.rank == 0 else silent, Path(arguments[1]) if arguments[1:] else None)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
        _give_up(comm, folder, error, PipeReporter(talk) if launched else _Teller(folder, talk, verbose), launched)
        raise


def _open_channels(folder: RunFolder, rank: int, launched: bool) -> IO[str]:
    """What a rank prints goes to its log. Returns the way to the launcher, or to the terminal."""
    talk = os.fdopen(os.dup(1 if launched else 2), "w", encoding="utf-8")
    log = os.open(folder.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return talk


def _run(comm: Any, folder: RunFolder, report: Callable[[dict], None], start: Optional[Path]) -> int:
    """start: the checkpoint to go on from, None for the beginning."""
    import torch

    from compiler.proof.verify import load_plan
    from runtime import checkpoint, meshes
    from runtime.executor.executor import Executor
    from runtime.executor.models import Models
    from runtime.executor.python_calls import start_ops
    from runtime.executor.sources import open_sources, with_steps
    from runtime.run import run
    from runtime.world import DistWorld, SoloWorld

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    plan = load_plan(folder.plan)
    _check_world(comm, plan)
    sources = open_sources(plan)
    plan = with_steps(plan, sources)
    job = meshes.start(comm)
    world = DistWorld(None, comm.rank, comm.size) if comm.size > 1 else SoloWorld()
    if comm.rank == 0:
        report({"event": "start", "program": plan.program.name, "of": plan.run.steps, "ranks": comm.size, "folder": str(folder.path)})
    models = Models(plan, job, folder.path / "state")
    position = Position(folder, comm.rank)
    ops = start_ops(plan)
    executor = Executor(plan, world, models, sources, ops, _follow(plan, position, report))
    models.prepare()
    resumed = checkpoint.restore(start, models, executor) if start else 0
    finished = run(plan, folder, world, models, executor, report, resumed)
    for runner in ops.values():
        runner.close()
    (folder.path / "state" / f"moved-{comm.rank}.json").write_text(json.dumps(models.bytes_moved()))
    comm.Barrier()
    report({"event": "done", "finished": finished, "text": "finished" if finished else _stopped(folder)})
    position.close()
    torch.distributed.destroy_process_group()
    return 0 if finished else EXIT_STOPPED


def _stopped(folder: RunFolder) -> str:
    from runtime import checkpoint

    saved = checkpoint.latest(folder.checkpoints)
    return f"stopped as asked; `rlflowc resume {folder.path}` goes on" if saved else "stopped as asked, before the first step"


def _check_world(comm: Any, plan: Any) -> None:
    from rlhf_dsl.diagnostics import fault

    if comm.size != plan.world:
        raise fault("R0152", started=comm.size, wanted=plan.world)


def _follow(plan: Any, position: Position, report: Callable[[dict], None]) -> Callable[[int, Any], None]:
    """Marks where the rank stands and tells of steps, not more often than an eye can follow."""
    from compiler.proof.verify import walk

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


def _give_up(comm: Any, folder: RunFolder, error: BaseException, tell: Callable[[dict], None], launched: bool) -> None:
    """Says why and ends all ranks; one that only lost its peer waits for the one that knows the reason."""
    failure = _failure(comm.rank, error)
    print(failure["trace"], file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):  # a full disk must not keep the others waiting
        if not _written(folder, failure) or not launched:
            tell({"event": "failure", **failure})
    if failure["consequence"]:
        time.sleep(LOST_PEER_WAIT_S)
    comm.Abort(failure["code"])


def _written(folder: RunFolder, failure: dict[str, Any]) -> bool:
    try:
        folder.write_failure(failure)
    except OSError:
        return False
    return True


def _failure(rank: int, error: BaseException) -> dict[str, Any]:
    from rlhf_dsl.diagnostics import DiagnosticError
    from rlhf_dsl.render import render

    failure = {"rank": rank, "time": time.time(), "trace": traceback.format_exc(), "kind": type(error).__name__,
               "text": str(error)}
    if isinstance(error, DiagnosticError):
        return failure | {"consequence": False, "rendered": render(error.diagnostics), "code": error.exit_code}
    return failure | {"consequence": any(sign in str(error) for sign in LOST_PEER), "rendered": "", "code": EXIT_FAILED}


class _Teller:
    """Without our launcher the first rank that knows a reason reports it."""

    def __init__(self, folder: RunFolder, talk: IO[str], verbose: bool) -> None:
        self._folder, self._talk, self._verbose = folder, talk, verbose

    def __call__(self, failure: dict[str, Any]) -> None:
        from compiler.proof.verify import load_plan
        from runtime.failures import report_of_failure

        if failure["consequence"] or not self._folder.claim_report():
            return
        report = report_of_failure(load_plan(self._folder.plan), self._folder, failure)
        print(report.text, *([report.trace] if self._verbose else []), sep="\n", file=self._talk, flush=True)


if __name__ == "__main__":
    sys.exit(main())
