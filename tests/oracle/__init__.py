"""A reference for checked programs: one process, one row at a time, loops, Hugging Face models, torch's optimizer.

It shares no equation, sampling, batching, optimizer or data-order code with the compiler and the runtime: what a plan
computes must equal it. Python ops are called directly.
"""

from tests.oracle.program import Iteration, Oracle

__all__ = ["Iteration", "Oracle"]
