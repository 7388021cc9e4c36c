"""`rlflowc run`: compiles if need be, makes the run folder, starts the ranks or is one of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional

from compiler.plan import Plan
from rlhf_dsl.diagnostics import DiagnosticError, fault
from rlhf_dsl.frontend import read_source
from rlhf_dsl.source import STDIN
from rlhf_dsl.terminal import say, show, wants_color
from runtime import launch, preflight
from runtime.failures import report_of
from runtime.reporter import for_stream
from runtime.run_folder import RunFolder, new_run_folder

RUNS = Path("runs")
EXIT_INTERRUPTED = 130


def run_command(args: Any) -> int:
    """args: program (a program or a plan), set, ranks, cluster, run_dir, verbose, color."""
    if launch.is_rank():
        return _run_as_rank(args)
    launch.check_number(args.ranks or 1)  # before a plan is made for them
    plan, folder = _prepare(args)
    return run_ranks(plan, folder, args)


def _prepare(args: Any, ranks: Optional[int] = None) -> tuple[Plan, RunFolder]:
    """The plan and a new run folder. Whatever is wrong with what the run reads shows here."""
    plan, text = _plan_of(args, ranks)
    if ranks is None:
        launch.check_number(plan.world)
    preflight.check(plan)
    return plan, _make_folder(plan, text, args)


def _plan_of(args: Any, ranks: Optional[int] = None) -> tuple[Plan, str]:
    """The plan to run and the text of its program ("" if it is not at hand)."""
    from compiler.commands import compile_file, is_plan, load_fitting

    wanted = args.ranks or ranks
    if not is_plan(args.program):
        return compile_file(args, wanted)
    plan = load_fitting(args)
    if args.set:
        raise fault("R0156", option="-s")
    if wanted and wanted != plan.world:
        raise fault("R0152", started=wanted, wanted=plan.world)
    return plan, _text_of(plan)


def _text_of(plan: Plan) -> str:
    """The program that a plan was made of, if it is where it was, as it was."""
    if plan.program.path == STDIN:
        return ""
    with contextlib.suppress(DiagnosticError):
        text = read_source(plan.program.path).text
        if hashlib.sha256(text.encode()).hexdigest() == plan.program.digest:
            return text
    return ""


def _make_folder(plan: Plan, text: str, args: Any) -> RunFolder:
    try:
        chosen = RunFolder(Path(args.run_dir).absolute()) if args.run_dir else None
        folder = chosen.create() if chosen else new_run_folder(RUNS, plan.program.name)
        folder.program.write_text(text, encoding="utf-8")
        folder.overrides.write_text(json.dumps(args.set, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        folder.plan.write_text(plan.to_json(), encoding="utf-8")
        if args.tensorboard:
            folder.tensorboard.mkdir()
    except OSError as error:
        place = args.run_dir or str(RUNS)
        if isinstance(error, FileExistsError) and Path(place).is_dir():
            raise fault("R0157", place=place) from None
        raise fault("R0158", place=place, reason=error.strerror) from None
    return folder


@dataclass
class _Outcome:
    """asked: to stop; killed: asked twice; finished: what rank 0 said at the end, None if it did not get there;
    failures: what ranks said of theirs."""

    asked: bool = False
    killed: bool = False
    finished: Optional[bool] = None
    failures: list[dict] = field(default_factory=list)


def run_ranks(plan: Plan, folder: RunFolder, args: Any, start: Optional[Path] = None) -> int:
    """Starts the ranks, from a checkpoint if `start`, and stays until they end. Returns the exit code."""
    reporter = for_stream(sys.stderr, wants_color(args.color, sys.stderr))
    outcome = _Outcome()

    def on_event(event: dict) -> None:
        if event["event"] == "done":
            outcome.finished = event["finished"]
        if event["event"] == "failure":
            outcome.failures.append(event)
        reporter(event)

    ranks = launch.Ranks(plan.world, folder, on_event, start)
    _forward_signals(folder, ranks, outcome, reporter)
    ended = ranks.wait()
    reporter({"event": "failed"})
    if outcome.finished:
        return 0
    if outcome.killed or outcome.finished is False:
        return EXIT_INTERRUPTED
    report = report_of(plan, folder, ended, outcome.failures)
    say(report.text)
    if args.verbose:
        say(report.trace)
    return report.code


def _forward_signals(folder: RunFolder, ranks: launch.Ranks, outcome: _Outcome, reporter: Callable[[dict], None]) -> None:
    """The first Ctrl-C or SIGTERM asks the ranks to save and end at the next boundary, the second ends them."""
    def ask(*_: Any) -> None:
        if outcome.asked:
            outcome.killed = True
            ranks.kill()
            return
        outcome.asked = True
        folder.stop_request().touch()
        reporter({"event": "message", "text": "stopping after this step, saving the models; once more to stop at once"})

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)


def _run_as_rank(args: Any) -> int:
    """`mpiexec -n N rlflowc run PLAN`: rank 0 makes the folder, every rank runs its part."""
    from mpi4py import MPI

    from runtime import rank

    comm = MPI.COMM_WORLD
    made = comm.bcast(_try_prepare(args, comm.size) if comm.rank == 0 else None, root=0)
    if isinstance(made, str):
        return rank.main([made], launched=False, verbose=args.verbose)
    if comm.rank == 0:
        show(made.diagnostics, args.color)
    comm.Barrier()  # no rank may end before the message is out: mpiexec would end the others
    return made.exit_code


def _try_prepare(args: Any, ranks: int) -> str | DiagnosticError:
    try:
        return str(_prepare(args, ranks)[1].path)
    except DiagnosticError as error:
        return error
