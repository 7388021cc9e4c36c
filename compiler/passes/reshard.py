"""Makes every move explicit: rows between home and a model's layout, weights between training and generation."""

from __future__ import annotations

import dataclasses
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
            src = graph.side["layouts"][dst].within
            name = f"weights of {op.model}"
            yield make_op(name, "reshard", model=op.model, phase=phase, span=op.span, src=src, dst=dst)


def _first(ops: list[Op], phase: str, model: str) -> int:
    """Where the transfer before the first `generate` of `model` in `phase` stands."""
    at = next(i for i, op in enumerate(ops) if op.kind == "generate" and op.phase == phase and op.model == model)
    return at - 1 if at and ops[at - 1].kind == "transfer" else at


class _Mover:
    """Wraps model calls in transfers. What has been moved to a layout in a phase is not moved again."""

    def __init__(self, graph: FlowGraph) -> None:
        self.graph = graph
        self.values: dict[str, Value] = {}

    def around(self, op: Op) -> Iterator[Op]:
        if op.kind not in MODEL_OPS:
            self._note(op.outputs, HOME)
            yield op
            return
        layout = layout_of(op, self.graph.side["layouts"])
        rows = [n for n in op.inputs if self.graph.values[n].type.dims and not n.startswith("keep ")]
        there = {n: self._moved(n, layout, op.phase) for n in rows}
        missing = [n for n in rows if there[n] not in self.values]
        if missing:
            yield self._transfer(missing, [there[n] for n in missing], HOME, layout, op)
        results = [n for n in op.outputs if self.graph.values[n].expr is not None]
        raw = {n: f"{n}@{layout}" for n in results}
        outputs = tuple(raw.get(n, n) for n in op.outputs)
        for name, made in zip(op.outputs, outputs):
            self.values[made] = dataclasses.replace(self.graph.values[name], name=made, layout=layout, base=name)
        yield op.replace(inputs=tuple(there.get(n, n) for n in op.inputs), outputs=outputs)
        if results:
            yield self._transfer([raw[n] for n in results], results, layout, HOME, op)

    def _moved(self, name: str, layout: str, phase: str) -> str:
        """The name of a copy; rows of a mini-batch are others than those of the iteration."""
        return f"{name}@{layout}" + ("" if phase == names.ROLLOUT else f" in {phase}")

    def _note(self, outputs: Iterable[str], layout: str) -> None:
        self.values.update({n: dataclasses.replace(self.graph.values[n], layout=layout) for n in outputs})

    def _transfer(self, inputs: list[str], outputs: list[str], src: str, dst: str, op: Op) -> Op:
        moved = inputs if src == HOME else outputs
        for name, made in zip(moved, outputs):
            base = name if made != name else ""
            self.values[made] = dataclasses.replace(self.graph.values[name], name=made, layout=dst, base=base)
        label = f"{', '.join(moved)} to {dst}"
        return make_op(label, "transfer", inputs, outputs, model=op.model, phase=op.phase, span=op.span,
                       src=src, dst=dst, moved=tuple(moved))
