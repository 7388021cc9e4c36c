"""One-step asynchrony: an iteration samples the next one's batch, by the weights that its own update starts with.

What the batch is made of (rows of data, responses, texts that their prompts are made of) leaves the rollout for a phase
of its own. `compiler.unexecuted` refuses programs in which that is more.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler import names
from compiler.ir import FlowGraph

MADE_AHEAD = ("data", "generate")


@dataclass(frozen=True)
class Pipeline:
    """lag: of the program's `run:`."""

    lag: int
    name: str = "pipeline"

    def __call__(self, graph: FlowGraph) -> FlowGraph:
        if not self.lag:
            return graph
        ahead = graph.needed(i for i, op in enumerate(graph.ops) if op.phase == names.ROLLOUT and op.kind in MADE_AHEAD)
        first = [graph.ops[i].replace(phase=names.AHEAD) for i in sorted(ahead)]
        return graph.with_ops([*first, *(op for i, op in enumerate(graph.ops) if i not in ahead)])
