"""Common subexpressions: equal equations and equal model calls are evaluated once, under the name of the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Hashable, Optional

from compiler import names
from compiler.ir import FlowGraph, Op

MERGED = frozenset(("equation", "forward"))  # a draw and a Python op are events, never merged


@dataclass(frozen=True)
class CommonSubexpressions:
    name: str = "cse"

    def __call__(self, graph: FlowGraph) -> FlowGraph:
        """Expressions are interned, so equal ones are identical. Evaluation sections read other rows and stay apart."""
        first: dict[Hashable, Op] = {}
        renamed: dict[str, str] = {}
        ops = []
        for op in graph.ops:
            op = op.replace(inputs=tuple(dict.fromkeys(renamed.get(n, n) for n in op.inputs)))
            twin = first.setdefault(_key(op), op) if _key(op) else op
            if twin is op:
                ops.append(op)
            else:
                renamed.update(zip(op.outputs, twin.outputs))
        return graph.with_ops(ops)


def _key(op: Op) -> Optional[Hashable]:
    if op.kind not in MERGED:
        return None
    return op.kind, op.attr("expr"), op.attr("calls"), op.phase if names.is_eval(op.phase) else ""
