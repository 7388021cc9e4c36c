"""Turns the end of a failed run into one report: what happened, in which iteration, at which line, on which rank."""

from __future__ import annotations

import signal
from typing import Optional

from compiler.plan import Plan
from compiler.verify import walk
from rlhf_dsl.ast import Span
from rlhf_dsl.diagnostics import Diagnostic, diagnostic
from rlhf_dsl.source import Source
from runtime.launch import Ended
from runtime.run_folder import RunFolder

SHOWN_OUTPUT = 2000


def report_of(plan: Plan, text: str, folder: RunFolder, ended: Ended) -> tuple[Optional[Diagnostic], str, str]:
    """(diagnostic, already rendered text, trace), of which the first or the second is there. text: of the program."""
    failure = folder.first_failure()
    if failure is None:
        return _of_death(plan, text, folder, ended), "", ended.output[-SHOWN_OUTPUT:]
    rank = failure["rank"]
    span, where, words = _where(plan, text, folder, rank)
    if failure["rendered"]:
        return None, f"{failure['rendered']}\n\n{_sentence(rank, words)}", failure["trace"]
    return diagnostic("R0154", span, **where, rank=rank, kind=failure["kind"], text=failure["text"], **words), "", failure["trace"]


def _of_death(plan: Plan, text: str, folder: RunFolder, ended: Ended) -> Diagnostic:
    if ended.rank is None:
        return diagnostic("R0155", place=str(folder.path), code=ended.code, output=ended.output.strip()[-SHOWN_OUTPUT:] or "nothing")
    span, where, words = _where(plan, text, folder, ended.rank)
    return diagnostic("R0153", span, **where, rank=ended.rank, signal=_signal_name(ended.signal), **words)


def _where(plan: Plan, text: str, folder: RunFolder, rank: int) -> tuple[Optional[Span], dict, dict]:
    """The place in the program where a rank stood, (span, keywords of a diagnostic), and the words for it."""
    iteration, index = folder.position_of(rank)
    step = next((s for i, s in enumerate(walk(plan)) if i == index), None)
    if step is None:
        return None, {"place": plan.program.path}, {"iteration": iteration, "step": "starting"}
    words = {"iteration": iteration, "step": f"{step.op} {step.name}"}
    source = Source(plan.program.path, text)
    line = source.line(step.line)
    if not line.strip():
        return None, {"place": plan.program.path}, words
    start = source.line_starts[step.line - 1]
    span = Span(start + len(line) - len(line.lstrip()), start + len(line.split("#")[0].rstrip()))
    return span, {"source": source}, words


def _sentence(rank: int, words: dict) -> str:
    return f"rank {rank}, iteration {words['iteration']}, at `{words['step']}`"


def _signal_name(number: Optional[int]) -> str:
    try:
        return f"{signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"
