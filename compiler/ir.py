"""The graph between a checked program and a plan: operations in the order of execution, values under the user's names.

A `FlowGraph` is never changed: a pass builds a new one. `networkx` serves as an index over it, where one is asked for.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Optional

from compiler.exprs import brief
from rlhf_dsl.ast import Span
from rlhf_dsl.typed import Expr, Type

if TYPE_CHECKING:
    from networkx import DiGraph

KINDS = (
    "data", "generate", "reply", "forward", "equation", "pyop", "keep", "metric", "state", "statistics", "train",
    "optimizer", "reshard", "transfer", "action",
)


@dataclass(frozen=True)
class Value:
    """What an operation makes. `layout`: "home", or that of a model, e.g. "actor.train"; "" until the pass `shard`.

    base: for a copy in another layout, the name of the value
    """

    name: str
    type: Type
    expr: Optional[Expr] = None
    layout: str = ""
    base: str = ""


@dataclass(frozen=True)
class Op:
    """One operation: `inputs` and `outputs` are names of values; `attrs` hold facts of its kind, among them `Expr`s.

    phase: "setup", "rollout", "before0" (of an update, what runs once), "update0" (its mini-batch), "commit", "eval0"
    """

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    model: str = ""
    phase: str = "rollout"
    attrs: tuple[tuple[str, Any], ...] = ()
    span: Span = Span()

    def attr(self, key: str, default: Any = None) -> Any:
        return dict(self.attrs).get(key, default)

    def with_attrs(self, **attrs: Any) -> "Op":
        return dataclasses.replace(self, attrs=tuple(sorted((dict(self.attrs) | attrs).items())))

    def replace(self, **changes: Any) -> "Op":
        return dataclasses.replace(self, **changes)


def make_op(name: str, kind: str, inputs: Iterable[str] = (), outputs: Iterable[str] = (), *, model: str = "",
            phase: str = "rollout", span: Span = Span(), **attrs: Any) -> Op:
    inputs = tuple(dict.fromkeys(inputs))
    return Op(name, kind, inputs, tuple(outputs), model, phase, tuple(sorted(attrs.items())), span)


@dataclass(frozen=True)
class FlowGraph:
    """`ops` in the order of execution; `values` by name, in the order of their making.

    side: facts that passes leave for later ones: "layouts" (name -> LayoutSpec), "batching" (model -> Batching).
    """

    name: str
    ops: tuple[Op, ...]
    values: dict[str, Value]
    side: dict[str, Any] = field(default_factory=dict)

    def reads(self) -> list[set[int]]:
        """By operation, those above it whose values it reads."""
        maker: dict[str, int] = {}
        found = []
        for i, op in enumerate(self.ops):
            found.append({maker[name] for name in op.inputs if name in maker})
            maker.update(dict.fromkeys(op.outputs, i))
        return found

    def needed(self, roots: Iterable[int]) -> set[int]:
        """Operations and all that stand above them for their sake."""
        found, reads = set(roots), self.reads()
        for i in reversed(range(len(self.ops))):
            if i in found:
                found |= reads[i]
        return found

    def index(self) -> DiGraph:
        """Operations as nodes 0, 1, ...; an edge for each value, with its name as `value`."""
        import networkx as nx

        graph, maker = nx.DiGraph(), {}
        for i, op in enumerate(self.ops):
            graph.add_node(i, op=op)
            for name in op.inputs:
                if name in maker:
                    graph.add_edge(maker[name], i, value=name)
            maker.update({name: i for name in op.outputs})
        return graph

    def producer(self, name: str) -> Optional[Op]:
        return next((op for op in self.ops if name in op.outputs), None)

    def phase(self, name: str) -> tuple[Op, ...]:
        return tuple(op for op in self.ops if op.phase == name)

    def phases(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(op.phase for op in self.ops))

    def models(self) -> frozenset[str]:
        """Those whose weights are needed: that compute, or that an action saves, reads or changes."""
        named = (arg for op in self.ops if op.kind == "action" for arg in op.attr("args") if isinstance(arg, str))
        return frozenset((*named, *(op.model for op in self.ops if op.model)))

    def with_ops(self, ops: Iterable[Op], values: Optional[dict[str, Value]] = None, **side: Any) -> "FlowGraph":
        """A graph of the given operations; values that none of them makes are left out."""
        ops = tuple(ops)
        known = values if values is not None else self.values
        made = dict.fromkeys(name for op in ops for name in op.outputs)
        return FlowGraph(self.name, ops, {n: known[n] for n in made}, self.side | side)

    def with_side(self, **side: Any) -> "FlowGraph":
        return dataclasses.replace(self, side=self.side | side)

    def verify(self) -> tuple[str, ...]:
        """What is wrong with the graph, one line each; empty if nothing."""
        return tuple(_faults(self))

    def __str__(self) -> str:
        return "\n".join(_lines(self)) + "\n"

    def to_json(self) -> str:
        known = _named(self)
        ops = [_op_json(op, known) for op in self.ops]
        values = {n: {"type": str(v.type), "layout": v.layout} for n, v in self.values.items()}
        return json.dumps({"name": self.name, "ops": ops, "values": values}, indent=1, ensure_ascii=False) + "\n"


def _faults(graph: FlowGraph) -> Iterator[str]:
    made: dict[str, Op] = {}
    for op in graph.ops:
        if op.kind not in KINDS:
            yield f"`{op.name}` has the unknown kind `{op.kind}`"
        for name in op.inputs:
            if name not in made:
                yield f"`{op.name}` reads `{name}`, which nothing above it makes"
        for name in op.outputs:
            if name in made:
                yield f"`{name}` is made by `{made[name].name}` and by `{op.name}`"
            if name not in graph.values:
                yield f"`{name}` has no type"
            made[name] = op
    for name in graph.values:
        if name not in made:
            yield f"`{name}` is made by nothing"


def _lines(graph: FlowGraph) -> Iterator[str]:
    known = _named(graph)
    yield f"flow {graph.name}"
    for phase in graph.phases():
        yield f"{phase}:"
        for op in graph.phase(phase):
            yield f"    {_line(graph, op, known)}"


def _named(graph: FlowGraph) -> dict[Expr, str]:
    return {v.expr: v.base or n for n, v in reversed(graph.values.items()) if v.expr is not None}


def _line(graph: FlowGraph, op: Op, known: dict[Expr, str]) -> str:
    outputs = ", ".join(_typed(graph.values[n]) for n in op.outputs if n in graph.values)
    left = f"{outputs} = " if outputs else ""
    model = f" {op.model}" if op.model else ""
    label = "" if op.name in op.outputs else f" `{op.name}`"
    facts = "".join(f" {key}={_fact(value, known)}" for key, value in op.attrs)
    return f"{left}{op.kind}{model}{label}({', '.join(op.inputs)}){facts}"


def _typed(value: Value) -> str:
    return f"{value.name}: {value.type}" + (f" @{value.layout}" if value.layout else "")


def _fact(value: Any, known: dict[Expr, str], inside: bool = False) -> str:
    if isinstance(value, Expr):
        return known[value] if inside and value in known else brief(value, known)
    if isinstance(value, tuple):
        return "(" + ", ".join(_fact(v, known, inside=True) for v in value) + ")"
    return str(value)


def _op_json(op: Op, known: dict[Expr, str]) -> dict[str, Any]:
    return {
        "name": op.name, "kind": op.kind, "inputs": list(op.inputs), "outputs": list(op.outputs), "model": op.model,
        "phase": op.phase, "attrs": {key: _fact(value, known) for key, value in op.attrs},
    }
