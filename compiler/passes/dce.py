"""Dead code: what no metric, state, training, keep, action or Python op needs is left out.

A Python op stays whatever becomes of its value: it may be there to write something down.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir import FlowGraph, Op
from rlhf_dsl.typed import Expr

ROOTS = frozenset(("metric", "state", "train", "optimizer", "keep", "action", "reshard", "pyop"))


@dataclass(frozen=True)
class DeadCode:
    """wanted: expressions whose values somebody wants to see."""

    wanted: frozenset[Expr] = frozenset()
    name: str = "dce"

    def __call__(self, graph: FlowGraph) -> FlowGraph:
        alive = graph.needed(i for i, op in enumerate(graph.ops) if op.kind in ROOTS or self._is_wanted(graph, op))
        return graph.with_ops(op for i, op in enumerate(graph.ops) if i in alive)

    def _is_wanted(self, graph: FlowGraph, op: Op) -> bool:
        return any(graph.values[name].expr in self.wanted for name in op.outputs)
