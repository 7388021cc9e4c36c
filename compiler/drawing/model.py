"""What is drawn: the operations of a flow graph with words for people, and who reads what of whom."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterator, Mapping

from compiler import names
from compiler.exprs import brief
from compiler.ir import FlowGraph, Op
from compiler.plan import LayoutSpec
from compiler.reading.units import cut_text, ranks_text
from rlhf_dsl import ast
from rlhf_dsl.ast import Span
from rlhf_dsl.builtins import call_text
from rlhf_dsl.diagnostics import Diagnostics
from rlhf_dsl.format_expr import Printer
from rlhf_dsl.parser import parse
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Checked, Expr

# What kinds of operations have in common, for colours: where values come from, where they are computed, what is kept.
GROUPS = {
    "data": "data", "generate": "sample", "reply": "sample", "forward": "model", "equation": "equation",
    "statistics": "equation", "pyop": "python", "keep": "keep", "metric": "metric", "state": "state", "train": "train",
    "optimizer": "train", "reshard": "move", "transfer": "move", "reload": "move", "offload": "move",
    "action": "action",
}
_SECTION = re.compile(r"^(update|eval)\d*/")


@dataclass(frozen=True)
class Node:
    """One operation. values: (name, type) of what it makes; text: how it is made; line: in the program, 0 for none."""

    id: int
    kind: str
    title: str
    values: tuple[tuple[str, str], ...]
    text: str
    layout: str
    line: int

    @property
    def group(self) -> str:
        return GROUPS[self.kind]


@dataclass(frozen=True)
class Edge:
    """`target` reads the values `names` of `source`; both are ids of nodes."""

    source: int
    target: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Phase:
    """A section of the program, or a part of one. nodes: in the order of execution."""

    title: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Drawing:
    """phases, and the nodes in them, in the order of execution; program: its text."""

    name: str
    phases: tuple[Phase, ...]
    edges: tuple[Edge, ...]
    program: str = ""

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for phase in self.phases for node in phase.nodes)


def drawing_of(graph: FlowGraph, checked: Checked) -> Drawing:
    """The drawing of a graph that was made from `checked`."""
    words = _Words(graph, checked)
    index = graph.index()
    nodes = [words.node(i, op) for i, op in enumerate(graph.ops)]
    phases = tuple(
        Phase(phase_title(phase, checked), tuple(n for n, op in zip(nodes, graph.ops) if op.phase == phase))
        for phase in graph.phases())
    edges = []
    for source, target in sorted(index.edges):
        made = graph.ops[source].outputs
        read = tuple(short(name) for name in graph.ops[target].inputs if name in made)
        edges.append(Edge(source, target, read))
    return Drawing(graph.name, phases, tuple(edges), checked.text)


def phase_title(phase: str, checked: Checked) -> str:
    """`update, for each mini-batch`: when the operations of a phase run."""
    if not (names.is_update(phase) or names.is_before(phase) or names.is_eval(phase)):
        return {names.SETUP: "once, before the first iteration", names.COMMIT: "after the updates",
                names.AHEAD: "ahead, for the next iteration"}.get(phase, phase)
    index = names.phase_index(phase)
    section = names.prefix("eval" if names.is_eval(phase) else "update", index)[:-1]
    if names.is_eval(phase):
        every = checked.evals[index].every
        return f"{section}, every {every} iterations" if every else f"{section}, before and after the run"
    if names.is_before(phase):
        return f"{section}, once"
    loop = checked.updates[index]
    times = f"{loop.epochs} x {loop.minibatches}" if loop.epochs > 1 else str(loop.minibatches)
    return f"{section}, {times} mini-batches" if loop.epochs * loop.minibatches > 1 else section


def short(name: str) -> str:
    """A value's name as the program has it: without its section, which the phase tells."""
    return _SECTION.sub("", name)


class _Words:
    """How operations of a graph are written in the program."""

    def __init__(self, graph: FlowGraph, checked: Checked) -> None:
        self.graph = graph
        self.source = Source(checked.path, checked.text)
        self.written = dict(_written(self.source))
        self.known = {v.expr: short(v.base or n) for n, v in reversed(graph.values.items()) if v.expr is not None}
        self.layouts: Mapping[str, LayoutSpec] = graph.side.get("layouts", {})

    def node(self, index: int, op: Op) -> Node:
        values = tuple((short(self.graph.values[n].base or n), str(self.graph.values[n].type)) for n in op.outputs)
        line = self.source.position(op.span.start)[0] if op.span != Span() else 0
        return Node(index, op.kind, self._title(op, values), values, self._text(op), self._layout(op), line)

    def _title(self, op: Op, values: tuple[tuple[str, str], ...]) -> str:
        if op.kind in ("train", "optimizer", "metric", "keep", "action", "statistics"):
            return short(op.name) if op.kind != "metric" else f"metric {short(op.attr('metric'))}"
        if op.kind == "reshard":
            return op.name
        return ", ".join(name for name, _ in values) or short(op.name)

    def _text(self, op: Op) -> str:
        if op.kind == "data":
            return "data"
        if op.kind == "forward":
            return ", ".join(map(call_text, op.attr("calls")))
        if op.kind == "generate":
            prompts = self.known.get(op.attr("expr").args[0], "")
            return f"{op.model}.generate({prompts})"
        if op.kind == "train":
            objective = self.written.get(op.span) or self._brief(op.attr("objective"))
            return f"{'maximize' if op.attr('maximize') else 'minimize'} {objective}"
        if op.kind in ("transfer", "reshard"):
            return f"{op.attr('src')} to {op.attr('dst')}"
        if op.kind == "statistics":
            return ", ".join(short(name) for name in op.outputs)
        expr = op.attr("expr")
        return "" if expr is None else self.written.get(op.span) or self._brief(expr)

    def _brief(self, expr: Expr) -> str:
        text = call_text(expr) if expr.op in ("call", "pyop") else brief(expr, self.known)
        return text[1:-1] if _wrapped(text) else text

    def _layout(self, op: Op) -> str:
        """`actor.train tp1 pp1 dp2 on ranks 2-3`, "" before layouts are known."""
        name = next((self.graph.values[n].layout for n in op.outputs), "")
        if op.kind in ("optimizer", "train") and self.layouts:
            name = names.layout_name(op.model, "train")
        spec = self.layouts.get(name)
        return f"{name} {cut_text(spec)}{self._ranks(spec)}" if spec else name

    def _ranks(self, spec: LayoutSpec) -> str:
        """` on ranks 2-3`, where not all layouts have the same."""
        if len({(one.first, one.ranks) for one in self.layouts.values()}) < 2:
            return ""
        return f" on {ranks_text(range(spec.first, spec.first + spec.ranks))}"


def _wrapped(text: str) -> bool:
    """Whether one pair of parentheses holds all of the text."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return i == len(text) - 1 and text.startswith("(")
    return False


def _written(source: Source) -> Iterator[tuple[Span, str]]:
    """The right sides of the program's statements, as `fmt` prints them, by the spans that operations carry."""
    program = parse(source, Diagnostics(source))
    printed = Printer(source).flat
    for item in program.items:
        if isinstance(item, ast.State):
            yield item.span, printed(item.next)
        for line in item.body if isinstance(item, ast.Section) else ():
            match line:
                case ast.Bind(targets=targets, value=value):
                    yield from ((target.span, printed(value)) for target in targets)
                case ast.Metric(value=value, span=span) | ast.Train(objective=value, span=span):
                    yield span, printed(value)
                case ast.Keep(condition=value, span=span):
                    yield span, printed(value)
