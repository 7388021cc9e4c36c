"""Makes every move explicit: rows between home and a model's layout, weights between training and generation."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Iterable, Iterator

from compiler import names
from compiler.ir import FlowGraph, Op, Value, make_op
from compiler.passes.shard import MODEL_OPS, layout_of
from compiler.steps import HOME


@dataclass(frozen=True)
class Reshard:
    """changing: models whose weights change during a run; those of others are moved once, before it."""

    changing: frozenset[str]
    name: str = "reshard"

    def __call__(self, graph: FlowGraph) -> FlowGraph:
        mover = _Mover(graph)
        ops = [new for op in graph.ops for new in mover.around(op)]
        weights = tuple(self._weights(graph))
        once = [op for op in weights if op.phase == names.SETUP]
        for op in weights:
            if op.phase != names.SETUP:
                ops.insert(_first(ops, op.phase, op.model), op)
        return graph.with_ops([*once, *ops], mover.values)

    def _weights(self, graph: FlowGraph) -> Iterator[Op]:
        """A move for each model that generates in a phase, if its weights may have changed since the last."""
        seen = set()
        for op in graph.ops:
            if op.kind != "generate":
                continue
            phase = op.phase if op.model in self.changing else names.SETUP
            if (op.model, phase) in seen:
                continue
            seen.add((op.model, phase))
            dst = layout_of(op, graph.side["layouts"])
            src = _kept_in(op.model, graph.side["layouts"])
            name = f"weights of {op.model}"
            yield make_op(name, "reshard", model=op.model, phase=phase, span=op.span, src=src, dst=dst)


def _kept_in(model: str, layouts: dict) -> str:
    """The layout that the weights of a model are kept in."""
    return next(name for name in (names.layout_name(model, s) for s in ("train", "forward")) if name in layouts)


def _first(ops: list[Op], phase: str, model: str) -> int:
    """Where the transfer before the first `generate` of `model` in `phase` stands."""
    at = next(i for i, op in enumerate(ops) if op.kind == "generate" and op.phase == phase and op.model == model)
    return at - 1 if at and ops[at - 1].kind == "transfer" else at


class _Mover:
    """Wraps model calls in transfers: what a call reads goes to its layout, what it makes comes home."""

    def __init__(self, graph: FlowGraph) -> None:
        self.graph = graph
        self.values: dict[str, Value] = {}

    def around(self, op: Op) -> Iterator[Op]:
        if op.kind not in MODEL_OPS:
            self.values.update({n: dataclasses.replace(self.graph.values[n], layout=HOME) for n in op.outputs})
            yield op
            return
        layout = layout_of(op, self.graph.side["layouts"])
        keeps = [n for n in op.inputs if n.startswith("keep ")]  # the split of rows follows from them
        rows = [n for n in op.inputs if self.graph.values[n].type.dims and n not in keeps]
        there = {n: self._copy(n, f"{n}@{layout}", layout) for n in rows}
        yield self._transfer([*rows, *keeps], there.values(), rows, (HOME, layout), op)
        results = [n for n in op.outputs if self.graph.values[n].expr is not None]
        raw = {n: self._copy(n, f"{n}@{layout}", layout) for n in results}
        self.values.update({n: self.graph.values[n] for n in op.outputs if n not in raw})
        outputs = tuple(raw.get(n, n) for n in op.outputs)
        yield op.replace(inputs=tuple(there.get(n, n) for n in op.inputs), outputs=outputs)
        if results:
            self.values.update({n: dataclasses.replace(self.graph.values[n], layout=HOME) for n in results})
            yield self._transfer(raw.values(), results, results, (layout, HOME), op)

    def _copy(self, name: str, stem: str, layout: str) -> str:
        """The name of a copy of a value; each call has copies of its own, as it splits rows in its own way."""
        numbered = (f"{stem} #{i}" for i in itertools.count(2))
        copy = next(n for n in itertools.chain([stem], numbered) if n not in self.values)
        self.values[copy] = dataclasses.replace(self.graph.values[name], name=copy, layout=layout, base=name)
        return copy

    def _transfer(self, inputs: Iterable[str], outputs: Iterable[str], moved: list[str], way: tuple[str, str],
                  op: Op) -> Op:
        src, dst = way
        return make_op(f"{', '.join(moved)} to {dst}", "transfer", inputs, outputs, model=op.model, phase=op.phase,
                       span=op.span, src=src, dst=dst, moved=tuple(moved), call=op.name)
