"""How long the steps of an iteration took, on the rank that took longest for each."""

from __future__ import annotations

import torch

from compiler.plan import Plan
from compiler.reading.tables import ITERATION, SETUP, rows_of
from runtime.executor.executor import Iteration
from runtime.world import World

Times = dict[str, dict[str, float]]  # by section, then by the title of a step


class Stopwatch:
    """All ranks walk one list of steps, so that their times are one vector, of which the maxima are taken."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._world = world
        rows = (row for row in rows_of(plan) if row.section != SETUP)
        self._places = tuple(dict.fromkeys((row.section, row.title) for row in rows))

    def slowest(self, done: Iteration) -> Times:
        """Collective. Steps that no rank took time for are left out."""
        mine = {ITERATION: done.seconds, **done.evals}
        spent = [mine.get(section, {}).get(title, 0.0) for section, title in self._places]
        most = self._world.reducer.all_reduce(torch.tensor(spent, dtype=torch.float64), "max").tolist()
        found: Times = {}
        for (section, title), seconds in zip(self._places, most):
            if seconds:
                found.setdefault(section, {})[title] = seconds
        return found
