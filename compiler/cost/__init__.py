"""Estimates of time and memory.

`rough` serves plans of the local machine; everything else is the analytic model with which the search places models.
"""

from compiler.cost.rough import CostModel, Memory, Moved

__all__ = ["CostModel", "Memory", "Moved"]
