"""`rlflowc run`: compiles if need be, makes the run folder, starts the ranks or is one of them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, Optional

from compiler.plan import Plan
from rlhf_dsl.diagnostics import DiagnosticError, fault
from rlhf_dsl.render import render
from runtime import launch
from runtime.failures import report_of
from runtime.reporter import for_stream
from runtime.run_folder import RunFolder, new_run_path

RUNS = Path("runs")
EXIT_FAILED, EXIT_INTERRUPTED = 4, 130


def run_command(args: Any) -> int:
    """args: program (a program or a plan), set, ranks, cluster, run_dir, verbose, color."""
    if launch.is_rank():
        return _run_as_rank(args)
    plan, text = _plan_of(args)
    folder = _make_folder(plan, text, args.run_dir)
    return _run_ranks(plan, text, folder, bool(args.verbose))


def _plan_of(args: Any, ranks: Optional[int] = None) -> tuple[Plan, str]:
    """The plan to run and the text of its program ("" if it is not at hand)."""
    from compiler.commands import compile_file, is_plan
    from compiler.verify import load_plan

    wanted = args.ranks or ranks
    if not is_plan(args.program):
        return compile_file(args, wanted)
    plan = load_plan(Path(args.program))
    if args.set:
        raise fault("R0156", option="-s")
    if wanted and wanted != plan.world:
        raise fault("R0152", started=wanted, wanted=plan.world)
    source = Path(plan.program.path)
    return plan, source.read_text(encoding="utf-8") if source.is_file() else ""


def _make_folder(plan: Plan, text: str, run_dir: Optional[str]) -> RunFolder:
    path = Path(run_dir) if run_dir else new_run_path(RUNS, plan.program.name)
    if (path / "metrics.jsonl").exists():
        raise fault("R0157", place=str(path))
    try:
        folder = RunFolder(path.absolute()).create()
        folder.plan.write_text(plan.to_json(), encoding="utf-8")
        (folder.path / "program.rlflow").write_text(text, encoding="utf-8")
    except OSError as error:
        raise fault("R0158", place=str(path), reason=error.strerror) from error
    return folder


def _run_ranks(plan: Plan, text: str, folder: RunFolder, verbose: bool) -> int:
    reporter = for_stream(sys.stderr, color="NO_COLOR" not in os.environ)
    outcome = {"stopped": False, "done": False}

    def on_event(event: dict) -> None:
        outcome["done"] |= event["event"] == "done"
        reporter(event)

    ranks = launch.Ranks(plan.world, folder, on_event)
    _forward_signals(folder, ranks, outcome)
    ended = ranks.wait()
    reporter({"event": "failed"})
    if outcome["done"]:
        return EXIT_INTERRUPTED if outcome["stopped"] else 0
    if outcome["stopped"]:
        return EXIT_INTERRUPTED
    return _fail(plan, text, folder, ended, verbose)


def _forward_signals(folder: RunFolder, ranks: launch.Ranks, outcome: dict) -> None:
    """The first Ctrl-C or SIGTERM asks the ranks to save and end at the next boundary, the second ends them."""
    def ask(*_: Any) -> None:
        if outcome["stopped"]:
            ranks.kill()
            return
        outcome["stopped"] = True
        folder.stop_request().touch()
        print("stopping after this step, saving the models; once more to stop at once", file=sys.stderr, flush=True)

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)


def _fail(plan: Plan, text: str, folder: RunFolder, ended: launch.Ended, verbose: bool) -> int:
    found, rendered, trace = report_of(plan, text, folder, ended)
    print(render([found]) if found else rendered, file=sys.stderr)
    if verbose:
        print(trace, file=sys.stderr)
    print(f"logs of the ranks: {folder.path / 'logs'}", file=sys.stderr)
    return EXIT_FAILED


def _run_as_rank(args: Any) -> int:
    """`mpiexec -n N rlflowc run PLAN`: rank 0 makes the folder, every rank runs its part."""
    from mpi4py import MPI

    from runtime import rank

    comm = MPI.COMM_WORLD
    made: Any = None
    if comm.rank == 0:
        made = _try_prepare(args, comm.size)
    made = comm.bcast(made, root=0)
    if isinstance(made, DiagnosticError):
        if comm.rank != 0:
            os._exit(made.exit_code)
        raise made
    return rank.main([made], launched=False)


def _try_prepare(args: Any, ranks: int) -> Any:
    try:
        plan, text = _plan_of(args, ranks)
        return str(_make_folder(plan, text, args.run_dir).path)
    except DiagnosticError as error:
        return error
