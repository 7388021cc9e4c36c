"""What comes from the host's memory and goes there, among the operations of a drawing: steps of the plan alone."""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator, Sequence

from compiler import names
from compiler.drawing.model import Drawing, Edge, Node, Phase, phase_title
from compiler.ir import FlowGraph
from compiler.offloading import Offloading
from compiler.plan import Plan
from compiler.reading.units import bytes_text
from compiler.steps import CommitStates, Offload, Reload, UpdateLoop
from rlhf_dsl.typed import Checked

HostMove = (Reload, Offload)
Walk = list[tuple[str, Any]]  # (phase, step), in the order of execution


def with_host_moves(drawing: Drawing, graph: FlowGraph, plan: Plan, checked: Checked) -> Drawing:
    """`drawing`, of the `graph` that `plan` was emitted from, with the plan's reloads and offloads where they happen.

    A reload is read by the first operation that computes with what it brings; an offload reads the last.
    """
    walks = list(_walks(plan, graph))
    if not any(isinstance(step, HostMove) for walk in walks for _, step in walk):
        return drawing
    ids = {phase: iter([node.id for node in one.nodes]) for phase, one in zip(graph.phases(), drawing.phases)}
    fresh, facts = len(drawing.nodes), Offloading(plan)
    nodes, edges, order = {node.id: node for node in drawing.nodes}, [*drawing.edges], {}
    for walk in walks:
        placed = []
        for phase, step in walk:
            moves = isinstance(step, HostMove)
            placed.append(fresh if moves else next(ids[phase]))
            nodes |= {fresh: _node(fresh, step)} if moves else {}
            order.setdefault(phase, []).append(placed[-1])
            fresh += moves
        edges += _edges(facts, [step for _, step in walk], placed)
    phases = [(phase_title(phase, checked), order[phase]) for phase in _phases(graph, order)]
    return _numbered(drawing, phases, nodes, edges)


def _walks(plan: Plan, graph: FlowGraph) -> Iterator[Walk]:
    """The lists of steps that begin and end with nothing there; steps that no operation stands for are left out."""
    yield [(names.SETUP, step) for step in plan.setup]
    yield _iteration(plan, len(graph.phase(names.ROLLOUT)))
    for index, section in enumerate(plan.evals):
        yield [(names.evaluation(index), step) for step in section.steps]


def _iteration(plan: Plan, rollout: int) -> Walk:
    """rollout: how many operations it has; what follows them at the end of an iteration is the commit."""
    walk: Walk = []
    for step in plan.steps:
        if isinstance(step, UpdateLoop):
            walk += [(names.before(step.index), inner) for inner in step.before]
            walk += [(names.update(step.index), inner) for inner in step.body]
        elif isinstance(step, HostMove):
            walk.append(("", step))
        elif not isinstance(step, CommitStates):
            ahead = getattr(step, "ahead", 0)
            rollout -= not ahead
            walk.append((names.AHEAD if ahead else names.ROLLOUT if rollout >= 0 else names.COMMIT, step))
    return [(phase or _beside(walk, i), step) for i, (phase, step) in enumerate(walk)]


def _beside(walk: Walk, at: int) -> str:
    """The phase of a move between sections: that of what a reload is for, and of what an offload is after."""
    later = walk[at + 1:] if isinstance(walk[at][1], Reload) else reversed(walk[:at])
    return next(phase for phase, _ in later if phase)


def _phases(graph: FlowGraph, order: dict[str, list[int]]) -> Iterator[str]:
    """Those of the graph, and those of moves alone: what an update needs once."""
    for phase in graph.phases():
        before = names.before(names.phase_index(phase)) if names.is_update(phase) else ""
        if before in order and before not in graph.phases():
            yield before
        yield phase


def _node(id: int, step: Any) -> Node:
    text = ", ".join(step.parts) + (f"; {bytes_text(step.bytes)}" if step.bytes else "")
    return Node(id, step.op, f"{step.op} {step.layout}", (), text, "", step.line)


def _edges(facts: Offloading, steps: Sequence[Any], ids: Sequence[int]) -> Iterator[Edge]:
    """From a reload to the next step that computes with its layout, and from the last one to an offload."""
    users = [facts.needs(step) for step in steps]
    for i, step in enumerate(steps):
        if isinstance(step, Reload):
            user = next((j for j in range(i + 1, len(steps)) if step.layout in users[j]), None)
            yield from [] if user is None else [Edge(ids[i], ids[user], (step.layout,))]
        if isinstance(step, Offload):
            user = next((j for j in reversed(range(i)) if step.layout in users[j]), None)
            yield from [] if user is None else [Edge(ids[user], ids[i], (step.layout,))]


def _numbered(drawing: Drawing, phases: list[tuple[str, list[int]]], nodes: dict[int, Node],
              edges: list[Edge]) -> Drawing:
    """Nodes have the numbers of their places."""
    number = {id: i for i, id in enumerate(id for _, ids in phases for id in ids)}
    made = tuple(Phase(title, tuple(dataclasses.replace(nodes[id], id=number[id]) for id in ids))
                 for title, ids in phases)
    moved = (Edge(number[e.source], number[e.target], e.names) for e in edges)
    return dataclasses.replace(drawing, phases=made, edges=tuple(sorted(moved, key=lambda e: (e.source, e.target))))
