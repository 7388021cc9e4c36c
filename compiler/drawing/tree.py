"""The flow graph for a terminal: what each section ends in, and below it what that is made of."""

from __future__ import annotations

from typing import Iterator, Optional

from compiler.drawing.model import Drawing, Edge, Node, Phase

LONGEST = 100  # characters of the text behind `=`


def tree(drawing: Drawing) -> str:
    """Every operation stands once, at its first reader; a value that stands above is only named, with an arrow."""
    return "\n".join(_Tree(drawing).lines()) + "\n"


class _Tree:
    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing
        self.nodes = {node.id: node for node in drawing.nodes}
        self.phase_of = {node.id: phase for phase in drawing.phases for node in phase.nodes}
        self.read: dict[int, list[Edge]] = {}
        edges = [edge for edge in drawing.edges if self.nodes[edge.target].kind != "offload"]  # made of nothing
        for edge in edges:
            self.read.setdefault(edge.target, []).append(edge)
        self.inner = {e.source for e in edges if self.phase_of[e.source] is self.phase_of[e.target]}

    def lines(self) -> Iterator[str]:
        yield self.drawing.name
        for phase in self.drawing.phases:
            yield ""
            yield phase.title
            yield from self._below(phase)

    def _below(self, phase: Phase) -> Iterator[str]:
        """What nothing in the phase reads, and down from there. Without recursion: a chain may be long."""
        roots = [node for node in phase.nodes if node.id not in self.inner]
        stack: list[tuple[str, bool, Node, Optional[Edge]]] = _siblings("", [(node, None) for node in roots])
        shown: set[int] = set()
        while stack:
            margin, last, node, edge = stack.pop()
            branch = margin + ("└─ " if last else "├─ ")
            if self.phase_of[node.id] is not phase:
                yield f"{branch}{', '.join(edge.names)} (of {self.phase_of[node.id].title.split(',')[0]})"
            elif node.id in shown:
                yield f"{branch}{', '.join(edge.names)} ↑"
            else:
                shown.add(node.id)
                yield branch + label(node)
                sources = [(self.nodes[e.source], e) for e in self.read.get(node.id, ())]
                stack += _siblings(margin + ("   " if last else "│  "), sources)


def _siblings(margin: str, nodes: list[tuple[Node, Optional[Edge]]]) -> list[tuple[str, bool, Node, Optional[Edge]]]:
    """For a stack: the first is popped first."""
    return [(margin, i == 0, node, edge) for i, (node, edge) in enumerate(reversed(nodes))]


def label(node: Node) -> str:
    """`kl: f32[b, t] = logp_old - ref.logprobs(y)`, with the layout behind it once it is known."""
    makes = ", ".join(f"{name}: {type}" for name, type in node.values)
    titled = node.title if node.group in ("train", "metric", "keep", "action") or not node.values else makes
    text = node.text if len(node.text) <= LONGEST else node.text[:LONGEST - 1] + "…"
    between = " to " if node.kind == "train" else " = " if node.values or node.kind == "metric" else ": "
    said = titled if not text or node.text == node.title else f"{titled}{between}{text}"
    return said + (f"  @{node.layout}" if node.layout else "")
