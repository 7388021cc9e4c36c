"""Dead code: what no metric, state, training, keep, action or Python op needs is left out.

A Python op stays whatever becomes of its value: it may be there to write something down.
"""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from compiler.ir import FlowGraph

ROOTS = frozenset(("metric", "state", "train", "optimizer", "keep", "action", "reshard", "pyop"))


@dataclass(frozen=True)
class DeadCode:
    name: str = "dce"

    def __call__(self, graph: FlowGraph) -> FlowGraph:
        index = graph.index()
        roots = [i for i, op in enumerate(graph.ops) if op.kind in ROOTS]
        alive = set(roots).union(*(nx.ancestors(index, i) for i in roots))
        return graph.with_ops(op for i, op in enumerate(graph.ops) if i in alive)
