"""Places models: the layouts of a placement become facts of the graph."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir import FlowGraph
from compiler.placement import Placement


@dataclass(frozen=True)
class Place:
    placement: Placement
    name: str = "place"

    def __call__(self, graph: FlowGraph) -> FlowGraph:
        used = graph.models()
        layouts = {n: spec for n, spec in self.placement.layouts.items() if n.split(".")[0] in used}
        return graph.with_side(layouts=layouts, batching=self.placement.batching)
