"""Gives every value its layout: results of a model call lie where the model runs, everything else is at home."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from compiler import names
from compiler.ir import FlowGraph, Op
from compiler.steps import HOME

MODEL_OPS = frozenset(("generate", "forward", "train"))


@dataclass(frozen=True)
class Shard:
    name: str = "shard"

    def __call__(self, graph: FlowGraph) -> FlowGraph:
        layouts = graph.side["layouts"]
        values = {}
        for op in graph.ops:
            where = layout_of(op, layouts) or HOME
            values.update({n: dataclasses.replace(graph.values[n], layout=where) for n in op.outputs})
        return graph.with_ops(graph.ops, values)


def layout_of(op: Op, layouts: dict) -> str:
    """The layout in which a model call computes, "" for other operations. A trained model scores where it trains."""
    if op.kind == "generate":
        return names.layout_name(op.model, "generate")
    if op.kind not in MODEL_OPS:
        return ""
    trained = names.layout_name(op.model, "train")
    return trained if trained in layouts else names.layout_name(op.model, "forward")
