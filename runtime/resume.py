"""`rlflowc resume RUN`: goes on with a run from its last checkpoint, on the same ranks or on others."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Optional

from compiler.commands import compile_checked
from compiler.plan import Plan
from compiler.proof.verify import load_plan
from rlhf_dsl.diagnostics import fault
from rlhf_dsl.frontend import loads
from runtime import checkpoint, preflight
from runtime.commands import run_ranks
from runtime.run_folder import RunFolder


def resume_command(args: Namespace) -> int:
    """args: run, set, ranks, cluster, verbose, color. Metrics after the checkpoint are taken out: they come again."""
    folder = RunFolder(Path(args.run).absolute())
    if not folder.plan.is_file():
        raise fault("R0166", place=args.run, reason="it is not the folder of a run")
    start = checkpoint.latest(folder.checkpoints)
    if start is None:
        raise fault("R0166", place=args.run, reason="it holds no checkpoint")
    progress = checkpoint.read_progress(start)
    plan = _plan(folder, args)
    preflight.check(plan)
    folder.plan.write_text(plan.to_json(), encoding="utf-8")
    folder.stop_request().unlink(missing_ok=True)
    for failure in folder.path.glob("failure-*.json"):
        failure.unlink()
    for file in (folder.metrics, folder.trace):
        _cut(file, progress.iteration)
    return run_ranks(plan, folder, args, start)


def _plan(folder: RunFolder, args: Namespace) -> Plan:
    """The run's own plan, or, for other ranks or settings, a new one of the program as it ran."""
    plan = load_plan(folder.plan)
    if not args.set and (args.ranks or plan.world) == plan.world:
        return plan
    overrides = {**json.loads(folder.overrides.read_text(encoding="utf-8")), **args.set}
    checked = loads(folder.program.read_text(encoding="utf-8"), overrides, plan.program.path)
    ranks: Optional[int] = args.ranks or plan.world
    return compile_checked(checked, args, ranks)


def _cut(file: Path, last: int) -> None:
    """Keeps the lines of iterations up to `last`."""
    if not file.is_file():
        return
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if _iteration(line) <= last]
    beside = file.with_name(f".{file.name}")
    beside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    beside.replace(file)


def _iteration(line: str) -> float:
    """Of a line that a crash cut: infinity."""
    try:
        return json.loads(line)["iteration"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
