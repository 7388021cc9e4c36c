"""The steps of a plan as a drawing: what is computed of what. Moves are left out, they have a table of their own."""

from __future__ import annotations

import re
from typing import Any, Iterator

from compiler.drawing.model import Drawing, Edge, Node, Phase, short
from compiler.exprs import brief
from compiler.plan import Plan
from compiler.reading.tables import ITERATION, MAKERS, SETUP, Tables, layout_of, made_by, title_of
from compiler.reading.units import degrees_text, plural
from compiler.steps import UpdateLoop, exprs_of

KINDS = {"load": "data", "record": "metric", "next_state": "state"}
LEFT_OUT = ("transfer", "reshard", "reload", "offload", "commit_states", "update")


def dataflow_of(plan: Plan) -> Drawing:
    return _Flow(plan).drawing()


class _Flow:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.tables = plan, Tables(plan)
        self.exprs = plan.expr_table()
        self.known = {self.exprs[expr]: short(name) for expr, name in self.tables.names.items()}
        self.nodes: list[tuple[Node, Any]] = []

    def drawing(self) -> Drawing:
        phases = tuple(Phase(title, tuple(self._nodes(steps))) for title, steps in self._sections())
        phases = tuple(phase for phase in phases if phase.nodes)
        return Drawing(self.plan.program.name, phases, tuple(self._edges()))

    def _sections(self) -> Iterator[tuple[str, tuple]]:
        yield SETUP, self.plan.setup
        rollout: list[Any] = []
        for step in self.plan.steps:
            if not isinstance(step, UpdateLoop):
                rollout += [] if getattr(step, "ahead", 0) else [step]
                continue
            yield ITERATION if len(rollout) else "", tuple(rollout)
            rollout = []
            yield f"{step.name}, once", step.before
            yield f"{step.name}, {plural(step.epochs * step.minibatches, 'mini-batch', 'mini-batches')}", step.body
        yield "for the next iteration", tuple(step for step in self.plan.steps if getattr(step, "ahead", 0))
        updates = any(isinstance(step, UpdateLoop) for step in self.plan.steps)
        yield "after the updates" if updates else ITERATION, tuple(rollout)
        for section in self.plan.evals:
            yield section.name, section.steps

    def _nodes(self, steps: tuple) -> Iterator[Node]:
        for step in steps:
            if step.op not in LEFT_OUT:
                node = self._node(len(self.nodes), step)
                self.nodes.append((node, step))
                yield node

    def _node(self, number: int, step: Any) -> Node:
        made = sorted(made_by(self.plan, step)) if step.op in MAKERS else []
        values = tuple((short(self.tables.names[e]), _type(self.plan, e)) for e in made if e in self.tables.names)
        named = step.op in ("train", "optimizer", "record", "keep", "action", "statistics", "next_state") or not values
        title = short(title_of(step)) if named else ", ".join(name for name, _ in values)
        layout = layout_of(step)
        where = f"{layout} {degrees_text(self.plan.layouts[layout])}" if layout else ""
        return Node(number, KINDS.get(step.op, step.op), title, values, self._text(step), where, step.line)

    def _text(self, step: Any) -> str:
        """How it is made: as the program has it, where its line binds the value, else as an expression."""
        if step.op in ("load", "optimizer", "action", "statistics"):
            return "data" if step.op == "load" else ""
        line = self.plan.line_text(step.line).partition("#")[0].strip()
        if step.op == "train":
            return line.partition(" to ")[2] or line
        targets, _, value = line.partition(" = ")
        if value and step.op != "record" and short(step.name) in re.findall(r"\w+", targets):
            return value.strip()
        own = self.exprs[exprs_of(step)[0]]
        return brief(own, {expr: name for expr, name in self.known.items() if expr is not own})

    def _edges(self) -> Iterator[Edge]:
        makers: dict[int, int] = {}
        for node, step in self.nodes:
            read: dict[int, list[str]] = {}
            for expr in sorted(self.tables.inputs(step)):
                if makers.get(expr, node.id) != node.id:
                    read.setdefault(makers[expr], []).append(short(self.tables.names[expr]))
            yield from (Edge(source, node.id, tuple(names)) for source, names in sorted(read.items()))
            if step.op == "optimizer":
                yield from (Edge(other.id, node.id, ("gradient",)) for other, made in self.nodes[:node.id]
                            if made.op == "train" and made.model == step.model)
            if step.op in MAKERS:
                makers.update(dict.fromkeys(made_by(self.plan, step), node.id))


def _type(plan: Plan, expr: int) -> str:
    row = plan.exprs[expr]
    return f"{row.elem}[{', '.join(row.dims)}]" if row.dims else row.elem
