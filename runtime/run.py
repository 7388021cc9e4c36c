"""The course of a run on one rank: evaluations, iterations, and the boundaries at which it may stop."""

from __future__ import annotations

import signal
import time
from typing import Callable, Optional

import torch

from compiler.plan import EvalSection, Plan
from runtime import checkpoint
from runtime.executor.executor import Executor
from runtime.executor.models import Models
from runtime.journal import Journal
from runtime.run_folder import RunFolder
from runtime.times import Stopwatch, Times
from runtime.world import World

CONTINUE, SAVE, STOP = 0, 1, 2


class Requests:
    """Wishes of the person who runs it: SIGUSR1 saves at the next boundary, SIGTERM or a stop file saves and ends there."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._wish = folder, CONTINUE
        signal.signal(signal.SIGUSR1, lambda *_: self._raise(SAVE))
        signal.signal(signal.SIGTERM, lambda *_: self._raise(STOP))

    def _raise(self, wish: int) -> None:
        self._wish = max(self._wish, wish)

    def agreed(self, world: World) -> int:
        """The strongest wish of any rank; all ranks get the same answer."""
        wish = STOP if world.rank == 0 and self._folder.stop_request().exists() else self._wish
        self._wish = CONTINUE
        return int(world.reducer.all_reduce(torch.tensor([float(wish)]), "max"))


def run(plan: Plan, folder: RunFolder, world: World, models: Models, executor: Executor, report: Callable[[dict], None],
        resumed: int = 0) -> bool:
    """All iterations after `resumed`. Returns False if it was asked to stop before the last."""
    journal = Journal(folder) if world.rank == 0 else None
    requests, stopwatch = Requests(folder), Stopwatch(plan, world)
    last = plan.run.steps
    executor.setup()
    if not resumed:
        _begin(plan, executor, stopwatch, journal, report)
    if requests.agreed(world) == STOP and resumed < last:
        return False
    for number in range(resumed + 1, last + 1):
        began = time.perf_counter()
        done = executor.run_iteration(number)
        due = [s for s in plan.evals if number == last or s.every and number % s.every == 0]
        done.metrics |= _evaluations(due, executor)
        seconds = time.perf_counter() - began
        _finish(journal, report, number, last, done.metrics, seconds, stopwatch.slowest(done), done.lengths, done.skipped)
        wish = requests.agreed(world)
        if done.save or wish != CONTINUE:
            path = checkpoint.write(folder.checkpoints, models, executor, number)
            report({"event": "saved", "text": f"saved {' and '.join(models.changing)} to {path}"})
        if wish == STOP and number < last:
            return False
    return True


def _begin(plan: Plan, executor: Executor, stopwatch: Stopwatch, journal: Optional[Journal],
           report: Callable[[dict], None]) -> None:
    """What the models are worth before any training."""
    began = time.perf_counter()
    metrics = _evaluations(plan.evals, executor)
    seconds = time.perf_counter() - began
    if metrics or not plan.run.steps:
        _finish(journal, report, 0, plan.run.steps, metrics, seconds, stopwatch.slowest(executor.iteration), {})


def _evaluations(sections: list[EvalSection] | tuple[EvalSection, ...], executor: Executor) -> dict[str, Optional[float]]:
    metrics: dict[str, Optional[float]] = {}
    for section in sections:
        metrics |= executor.evaluate(section)
    return metrics


def _finish(journal: Optional[Journal], report: Callable[[dict], None], number: int, last: int,
            metrics: dict, seconds: float, times: Times, lengths: dict[str, float], skipped: bool = False) -> None:
    if journal is not None:
        journal.write(number, metrics, seconds, times, lengths)
    report({"event": "iteration", "iteration": number, "of": last, "metrics": metrics, "seconds": seconds})
    if skipped:
        report({"event": "message", "text": f"step {number}: `keep` left no row, so nothing was trained"})
