"""Orders the operations of each phase so that calls of models on different ranks lie beside each other.

Every rank walks the same list, so that each send, receive and collective meets its peers in the same order; a rank
outside a call's layout skips it. What keeps it waiting is then a transfer home or a value of all rows. So rows leave
for every call that can begin, then the calls compute, then comes what a further call waits for, and then the rest. An
optimizer steps as soon as its model has computed all that it has to: other ranks are no part of that.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Iterator, Sequence

from compiler.ir import FlowGraph, Op
from compiler.steps import HOME

Section = tuple[int, int]
LEAVE, COMPUTE, READ, FENCE = range(4)  # in this order, where the choice is free
CALLING = frozenset(("generate", "forward", "train"))
COMPUTING = CALLING | {"reshard", "optimizer"}


@dataclass(frozen=True)
class Schedule:
    name: str = "schedule"

    def __call__(self, graph: FlowGraph) -> FlowGraph:
        """A topological order: phases follow one another, no operation passes a `keep`, and a model computes nothing
        in a mini-batch after its optimizer's step."""
        needs, sections = _needs(graph), _sections(graph)
        turns = _turns(graph, needs, sections)
        keys = [(sections[i], _rank(op), turns[i], i) for i, op in enumerate(graph.ops)]
        return graph.with_ops(_late(graph, list(_sorted(needs, keys)), sections))


def _needs(graph: FlowGraph) -> list[set[int]]:
    """By operation, those before it: whose values it reads; before an optimizer's step, all calls of its model."""
    calls: dict[tuple[str, str], set[int]] = {}
    needs = graph.reads()
    for i, op in enumerate(graph.ops):
        if op.kind in CALLING:
            calls.setdefault((op.phase, op.model), set()).add(i)
        if op.kind == "optimizer":
            needs[i] |= calls.get((op.phase, op.model), set())
    return needs


def _sections(graph: FlowGraph) -> list[Section]:
    """By operation, (phase, number of `keep`s above it in this phase)."""
    phases = {phase: i for i, phase in enumerate(graph.phases())}
    keeps = dict.fromkeys(phases, 0)
    found = []
    for op in graph.ops:
        found.append((phases[op.phase], keeps[op.phase]))
        keeps[op.phase] += op.kind == "keep"
    return found


def _rank(op: Op) -> int:
    if op.kind == "transfer":
        return LEAVE if op.attr("src") == HOME else READ
    if op.kind in COMPUTING:
        return COMPUTE
    return FENCE if op.kind == "keep" else READ


def _turns(graph: FlowGraph, needs: Sequence[set[int]], sections: Sequence[Section]) -> list[int]:
    """By operation, the first call of its section that cannot begin without it; after all others, if there is none.

    An optimizer's turn is that of its model's last call, so that models which share ranks have gradients and states in
    memory one after the other.
    """
    found = [len(graph.ops)] * len(graph.ops)
    for i in reversed(range(len(graph.ops))):
        if graph.ops[i].kind in COMPUTING:
            found[i] = i
        for j in (j for j in needs[i] if sections[j] == sections[i]):
            found[j] = min(found[j], found[i])
    steps = (i for i, op in enumerate(graph.ops) if op.kind == "optimizer")
    return [*map({i: max(needs[i]) for i in steps}.get, range(len(found)), found)]


def _sorted(needs: Sequence[set[int]], keys: Sequence[tuple]) -> Iterator[int]:
    """The topological order that takes the least key of those that can come next."""
    left = [len(before) for before in needs]
    after: list[list[int]] = [[] for _ in needs]
    for i, before in enumerate(needs):
        for j in before:
            after[j].append(i)
    ready = [keys[i] for i, count in enumerate(left) if not count]
    heapq.heapify(ready)
    while ready:
        i = heapq.heappop(ready)[-1]
        yield i
        for j in after[i]:
            left[j] -= 1
            if not left[j]:
                heapq.heappush(ready, keys[j])


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
