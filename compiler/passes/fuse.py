"""Model calls that one forward can serve become one operation: same model, weights, response, temperature and rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Hashable

from compiler.exprs import call_temperature
from compiler.ir import FlowGraph, Op


@dataclass(frozen=True)
class FuseCalls:
    name: str = "fuse"

    def __call__(self, graph: FlowGraph) -> FlowGraph:
        """The forward stands where its first call stood: it reads nothing but the response, which is there already."""
        groups: dict[Hashable, list[Op]] = {}
        for op in graph.ops:
            if op.kind == "forward":
                groups.setdefault(_key(op), []).append(op)
        ops = []
        for op in graph.ops:
            group = groups[_key(op)] if op.kind == "forward" else [op]
            if op is group[0]:
                ops.append(_merge(group))
        return graph.with_ops(ops)


def _key(op: Op) -> Hashable:
    call = op.attr("calls")[0]
    return op.model, op.phase, call.args[0], call.attr("phase"), call_temperature(call), call.attr("keep", 0)


def _merge(group: list[Op]) -> Op:
    outputs = tuple(name for op in group for name in op.outputs)
    calls = tuple(call for op in group for call in op.attr("calls", ()))
    merged = group[0].replace(name=", ".join(outputs), outputs=outputs) if len(group) > 1 else group[0]
    return merged.with_attrs(calls=calls) if calls else merged
