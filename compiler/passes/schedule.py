"""Orders the operations of each phase: the source's order, but for reads that can wait until what they need is there.

Every rank walks the same list, so that each send, receive and collective meets its peers in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from compiler.ir import FlowGraph


@dataclass(frozen=True)
class Schedule:
    name: str = "schedule"

    def __call__(self, graph: FlowGraph) -> FlowGraph:
        """A topological order that keeps the given order wherever it may; phases follow one another."""
        index = graph.index()
        phases = {phase: i for i, phase in enumerate(graph.phases())}
        order = nx.lexicographical_topological_sort(index, key=lambda i: (phases[graph.ops[i].phase], i))
        return graph.with_ops(graph.ops[i] for i in order)
