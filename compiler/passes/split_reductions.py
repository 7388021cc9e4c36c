"""Training over micro-batches: objectives become local parts and statistics; train steps make their model's outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Iterator

from compiler import names
from compiler.exprs import is_root_reduction, walk
from compiler.ir import FlowGraph, Op, Value, make_op
from compiler.separate import Separated, Separator, joint_unit
from rlhf_dsl.typed import Dim, Expr, Interner

LONGEST_NAME = 60


@dataclass(frozen=True)
class SplitReductions:
    """dims: of the program."""

    dims: dict[str, Dim]
    name: str = "split_reductions"

    def __call__(self, graph: FlowGraph) -> FlowGraph:
        for phase in filter(names.is_update, graph.phases()):
            graph = self._update(graph, phase)
        return graph

    def _update(self, graph: FlowGraph, phase: str) -> FlowGraph:
        known = {v.expr: n for n, v in reversed(graph.values.items()) if v.expr and _exists_before(graph, n, phase)}
        known = dict(reversed(known.items()))
        trains = [op for op in graph.phase(phase) if op.kind == "train"]
        interner = Interner()
        parts = {}
        for op in trains:
            separator = Separator(op.model, phase, self.dims, known, interner)
            parts[op.model] = separator.separate(op.attr("objective"))
        loop = _Loop(graph, phase, known, parts, self.dims)
        return loop.rebuilt()


def _exists_before(graph: FlowGraph, value: str, phase: str) -> bool:
    """Whether a value is there when the update `phase` begins; those of a mini-batch are gone after it."""
    maker, order = graph.producer(value), graph.phases()
    earlier = maker is not None and order.index(maker.phase) < order.index(phase)
    return earlier and not names.is_update(maker.phase)


class _Loop:
    """Rebuilds the operations of one update in the order of a mini-batch."""

    def __init__(self, graph: FlowGraph, phase: str, known: dict[Expr, str], parts: dict[str, Separated],
                 dims: dict[str, Dim]) -> None:
        self.graph, self.phase, self.known, self.parts, self.dims = graph, phase, known, parts, dims
        self.roots = frozenset(d.name for d in dims.values() if d.root)
        self.prefix = names.prefix("update", names.phase_index(phase))
        self.values = dict(graph.values)
        self.value_of = {v.expr: n for n, v in reversed(graph.values.items()) if v.expr is not None}
        self.early = self._early()

    def rebuilt(self) -> FlowGraph:
        old = self.graph.phase(self.phase)
        constants = [op for phase in (names.before(names.phase_index(self.phase)), self.phase)
                     for op in self._constants(phase)]
        parts = self.parts.values()
        needed = {self.value_of[e] for part in parts for e in part.constants}
        needed.update(self._inputs(arg for part in parts for e in part.statistics for arg in e.args))
        needed.update(name for op in constants for name in op.inputs)
        first = self._ancestors(needed, old)
        early = [op for op in old if op.kind == "forward" and self._is_early(op)]
        ahead = [op for op in old if op.kind in ("equation", "pyop") and op.name in first]
        trains = [self._train(op) for op in old if op.kind == "train"]
        moved = {op.name for op in (*early, *ahead)}
        after = [op for op in old if op.kind not in ("train", "forward", "optimizer") and op.name not in moved]
        steps = [op for op in old if op.kind == "optimizer"]
        before = [op for op in constants if op.phase != self.phase]
        body = [op for op in constants if op.phase == self.phase]
        loop = [*before, *early, *ahead, *body, *trains, *after, *steps]
        at = self.graph.ops.index(old[0])
        rest = [op for op in self.graph.ops if op.phase != self.phase]
        return self.graph.with_ops([*rest[:at], *loop, *rest[at:]], self.values)

    # ---- what must be known before training --------------------------------------------------------

    def _early(self) -> frozenset[Expr]:
        """Current outputs that some training takes as constants: another model's, or this one's in a statistic."""
        constants = [e for part in self.parts.values() for e in part.constants]
        return frozenset(e for e in walk(*constants, stop=self.known.__contains__)
                         if e.op == "call" and e not in self.known and e.attr("phase") == self.phase)

    def _is_early(self, op: Op) -> bool:
        return op.model not in self.parts or any(call in self.early for call in op.attr("calls"))

    def _ancestors(self, needed: set[str], ops: Iterable[Op]) -> set[str]:
        """Operations of the mini-batch that make `needed`, directly or not."""
        found: set[str] = set()
        for op in reversed(tuple(ops)):
            if needed & set(op.outputs):
                found.add(op.name)
                needed = needed | set(op.inputs)
        return found

    def _constants(self, phase: str) -> Iterator[Op]:
        """Operations for constants that the program does not bind: those of one phase."""
        statistics = dict.fromkeys(e for part in self.parts.values() for e in part.statistics if e not in self.value_of)
        if statistics and phase == self.phase:
            yield self._statistics(tuple(statistics))
        for expr in dict.fromkeys(e for part in self.parts.values() for e in part.constants):
            if expr not in self.value_of and self._phase_of(expr) == phase:
                yield self._made("equation", (expr,), phase).with_attrs(expr=expr)

    def _statistics(self, exprs: tuple[Expr, ...]) -> Op:
        return self._made("statistics", exprs, self.phase).replace(name=f"{self.prefix}statistics")

    def _phase_of(self, expr: Expr) -> str:
        varies = any(e not in self.known and (is_root_reduction(e, self.roots) or e in self.early)
                     for e in walk(expr, stop=self.known.__contains__))
        return self.phase if varies else names.before(names.phase_index(self.phase))

    def _made(self, kind: str, exprs: tuple[Expr, ...], phase: str) -> Op:
        inputs = self._inputs(arg for e in exprs for arg in e.args)
        outputs = [self._defined(e) for e in exprs]
        return make_op(outputs[0], kind, inputs, outputs, phase=phase, span=exprs[0].span)

    def _defined(self, expr: Expr) -> str:
        """The name of a value that is made here: its text, with a number behind it where that is taken."""
        text = names.default_name(expr, self.value_of)
        stem = self.prefix + (text if len(text) <= LONGEST_NAME else f"{expr.op}(...)")
        name, count = stem, 1
        while name in self.values:
            count += 1
            name = f"{stem} #{count}"
        self.value_of[expr] = name
        self.values[name] = Value(name, expr.type, expr)
        return name

    def _inputs(self, exprs: Iterable[Expr]) -> tuple[str, ...]:
        inside = walk(*exprs, stop=self.value_of.__contains__)
        return tuple(dict.fromkeys(self.value_of[e] for e in inside if e in self.value_of))

    # ---- train steps -------------------------------------------------------------------------------

    def _train(self, op: Op) -> Op:
        """The train step makes all outputs of its model that the mini-batch needs and that are not there yet."""
        part = self.parts[op.model]
        served = [f for f in self.graph.phase(self.phase) if f.kind == "forward" and f.model == op.model]
        late = [f for f in served if not self._is_early(f)]
        calls = tuple(dict.fromkeys((*part.calls, *(c for f in late for c in f.attr("calls")))))
        responses = [self.value_of[e.args[0]] for e in calls]
        constants = [self.value_of[e] for e in part.constants]
        keeps = [name for name in op.inputs if name.startswith("keep ")]
        outputs = (*(n for f in late for n in f.outputs), *op.outputs)
        return op.replace(inputs=tuple(dict.fromkeys((*responses, *constants, *keeps))), outputs=outputs).with_attrs(
            partial=part.partial, calls=calls, constants=part.constants, statistics=part.statistics,
            unit=joint_unit(self.dims, part.unit, calls))
