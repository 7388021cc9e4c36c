"""Turns the end of a failed run into one report: what happened, in which iteration, at which line, on which rank."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any, Optional, Sequence

from compiler.plan import Plan
from compiler.proof.verify import walk
from rlhf_dsl.diagnostics import Diagnostic, diagnostic
from rlhf_dsl.render import render
from runtime.launch import Ended
from runtime.places import place_of
from runtime.run_folder import RunFolder

SHOWN_OUTPUT = 2000
EXIT_FAILED = 4


@dataclass(frozen=True)
class Report:
    """text: for people; trace: what `-v` adds; code: the exit code."""

    text: str
    trace: str
    code: int = EXIT_FAILED


def report_of(plan: Plan, folder: RunFolder, ended: Ended, told: Sequence[dict]) -> Report:
    """The report on ranks that `ended` without finishing. told: failures that ranks sent, if they could not write them.

    It is about the rank that was first to fail by itself, not because another was gone.
    """
    known = [f for f in (*folder.failures(), *told) if not f["consequence"]]
    if known:
        return report_of_failure(plan, folder, min(known, key=lambda f: f["time"]))
    if ended.rank is not None:
        found = _at(plan, folder, ended.rank, "R0153", signal=_signal_name(ended.signal))
        return Report(render([found]) + _footer(folder), ended.output)
    output = ended.output.strip()[-SHOWN_OUTPUT:] or "nothing"
    return Report(render([diagnostic("R0155", place=str(folder.path), code=ended.code, output=output)]), ended.output)


def report_of_failure(plan: Plan, folder: RunFolder, failure: dict) -> Report:
    """The report on what a rank wrote down about its own end."""
    rank = failure["rank"]
    if not failure["rendered"]:
        found = _at(plan, folder, rank, "R0154", kind=failure["kind"], text=failure["text"])
        return Report(render([found]) + _footer(folder), failure["trace"], failure["code"])
    iteration, step = _position(plan, folder, rank)
    at = f", step `{step.op} {step.name}` ({plan.program.path}:{step.line})" if step is not None else ", starting"
    where = f"\nwhere: rank {rank}, iteration {iteration}{at}"
    return Report(failure["rendered"] + where + _footer(folder), failure["trace"], failure["code"])


def _footer(folder: RunFolder) -> str:
    return f"\nlogs:  {folder.path / 'logs'}"


def _at(plan: Plan, folder: RunFolder, rank: int, code: str, **words) -> Diagnostic:
    """A diagnostic at the place in the program where a rank stood."""
    iteration, step = _position(plan, folder, rank)
    span, where = place_of(plan, step.line if step is not None else 0)
    told = f"{step.op} {step.name}" if step is not None else "starting"
    return diagnostic(code, span, **where, rank=rank, iteration=iteration, step=told, **words)


def _position(plan: Plan, folder: RunFolder, rank: int) -> tuple[int, Any]:
    """(iteration, step) that a rank reached; the step is None if it never began one."""
    iteration, index = folder.position_of(rank)
    return iteration, next((s for i, s in enumerate(walk(plan)) if i == index), None)


def _signal_name(number: Optional[int]) -> str:
    try:
        return f"{signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"
