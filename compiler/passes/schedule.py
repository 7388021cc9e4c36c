"""Orders the operations of each phase so that calls of models on different ranks lie beside each other.

Every rank walks the same list, so that each send, receive and collective meets its peers in the same order; a rank
outside a call's layout skips it. What keeps it waiting is then a transfer home or a value of all rows. So rows leave
for every call that can begin, then the calls compute, then comes what a further call waits for, and then the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from compiler.ir import FlowGraph, Op
from compiler.steps import HOME

Section = tuple[int, int, bool]
LEAVE, COMPUTE, READ, FENCE = range(4)  # in this order, where the choice is free
COMPUTING = frozenset(("reshard", "generate", "forward", "train"))


@dataclass(frozen=True)
class Schedule:
    name: str = "schedule"

    def __call__(self, graph: FlowGraph) -> FlowGraph:
        """A topological order: phases follow one another, no operation passes a `keep`, optimizers step last."""
        index, sections = graph.index(), _sections(graph)
        waits = _awaited_by(graph, index, sections)
        keys = [(sections[i], _rank(op), waits[i], i) for i, op in enumerate(graph.ops)]
        order = list(nx.lexicographical_topological_sort(index, key=lambda i: keys[i]))
        return graph.with_ops(_late(graph, order, sections))


def _sections(graph: FlowGraph) -> list[Section]:
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


def _awaited_by(graph: FlowGraph, index: nx.DiGraph, sections: list[Section]) -> list[int]:
    """By operation, the first call of its section that cannot begin without it; after all others, if there is none."""
    found = [len(graph.ops)] * len(graph.ops)
    for i in reversed(range(len(graph.ops))):
        after = [j for j in index.successors(i) if sections[j] == sections[i]]
        found[i] = min([i] if graph.ops[i].kind in COMPUTING else [found[j] for j in after], default=found[i])
    return found


def _late(graph: FlowGraph, order: list[int], sections: list[Section]) -> list[Op]:
    """Each transfer home stands just before the first operation that reads from it, or at the end of its section."""
    ops: list[Op] = []
    waiting: dict[int, Op] = {}
    for i in order:
        op = graph.ops[i]
        due = [j for j, w in waiting.items() if sections[j] != sections[i] or set(w.outputs) & set(op.inputs)]
        ops += [waiting.pop(j) for j in due]
        if op.kind == "transfer" and op.attr("dst") == HOME:
            waiting[i] = op
        else:
            ops.append(op)
    return [*ops, *waiting.values()]
