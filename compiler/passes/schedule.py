"""Orders the operations of each phase so that calls of models on different ranks lie beside each other.

Every rank walks the same list, so that each send, receive and collective meets its peers in the same order; a rank
outside a call's layout skips it. What keeps it waiting is then a transfer home or a value of all rows. So rows leave for
every call that can begin, then the calls compute, and results come home just before something reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from compiler.ir import FlowGraph, Op
from compiler.steps import HOME

LEAVE, COMPUTE, READ, FENCE = range(4)  # in this order, where the choice is free
COMPUTING = frozenset(("reshard", "generate", "forward", "train"))


@dataclass(frozen=True)
class Schedule:
    name: str = "schedule"

    def __call__(self, graph: FlowGraph) -> FlowGraph:
        """A topological order: phases follow one another, no operation passes a `keep`, optimizers step last."""
        section = _sections(graph)
        ranks = [(section[i], _rank(op), i) for i, op in enumerate(graph.ops)]
        order = list(nx.lexicographical_topological_sort(graph.index(), key=lambda i: ranks[i]))
        return graph.with_ops(_late(graph, order, section))


def _sections(graph: FlowGraph) -> list[tuple[int, int, bool]]:
    """By operation, (phase, number of `keep`s above it in this phase, whether it is an optimizer's step)."""
    phases = {phase: i for i, phase in enumerate(graph.phases())}
    keeps = dict.fromkeys(phases, 0)
    found = []
    for op in graph.ops:
        found.append((phases[op.phase], keeps[op.phase], op.kind == "optimizer"))
        keeps[op.phase] += op.kind == "keep"
    return found


def _rank(op: Op) -> int:
    if op.kind == "transfer":
        return LEAVE if op.attr("src") == HOME else READ
    if op.kind in COMPUTING:
        return COMPUTE
    return FENCE if op.kind == "keep" else READ


def _late(graph: FlowGraph, order: list[int], section: list[tuple[int, int, bool]]) -> list[Op]:
    """Each transfer home stands just before the first operation that reads from it, or at the end of its section."""
    ops: list[Op] = []
    waiting: dict[int, Op] = {}
    for i in order:
        op = graph.ops[i]
        due = [j for j, w in waiting.items() if section[j] != section[i] or set(w.outputs) & set(op.inputs)]
        ops += [waiting.pop(j) for j in due]
        if op.kind == "transfer" and op.attr("dst") == HOME:
            waiting[i] = op
        else:
            ops.append(op)
    return [*ops, *waiting.values()]
