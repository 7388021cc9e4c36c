"""Estimates of time and memory: one analytic model, by which the search places models and `explain` tells of plans.

`machine` says what is there, `workload` what is asked; `compute`, `links`, `training`, `generation` and `calls` hold
the formulas, `model.CostModel` applies them to the steps of a plan.
"""

from compiler.cost.memory import Memory
from compiler.cost.model import CostModel
from compiler.cost.moved import Moved
from compiler.cost.timeline import iteration_seconds, timeline

__all__ = ["CostModel", "Memory", "Moved", "iteration_seconds", "timeline"]
