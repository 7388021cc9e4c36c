"""The flow graph for a terminal: what each section ends in, and below it what that is made of."""

from __future__ import annotations

from typing import Iterator

from compiler.drawing.model import Drawing, Node

LONGEST = 100  # characters of the text behind `=`


def tree(drawing: Drawing) -> str:
    """Every operation stands once, at its first reader; a value that stands above is only named, with an arrow."""
    return "\n".join(_Tree(drawing).lines()) + "\n"


class _Tree:
    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing
        self.phase_of = {node.id: phase for phase in drawing.phases for node in phase.nodes}
        self.by_id = {node.id: node for node in drawing.nodes}
        self.shown: set[int] = set()

    def lines(self) -> Iterator[str]:
        yield self.drawing.name
        for phase in self.drawing.phases:
            yield ""
            yield phase.title
            yield from self._branches([n for n in phase.nodes if not self._read_in(phase, n)], "")

    def _read_in(self, phase, node: Node) -> bool:
        return any(e.source == node.id and self.phase_of[e.target] is phase for e in self.drawing.edges)

    def _branches(self, nodes: list[Node], margin: str) -> Iterator[str]:
        for i, node in enumerate(nodes):
            last = i == len(nodes) - 1
            yield f"{margin}{'└─ ' if last else '├─ '}{label(node)}"
            yield from self._below(node, margin + ("   " if last else "│  "))

    def _below(self, node: Node, margin: str) -> Iterator[str]:
        """What `node` reads. Without recursion into what is shown: a drawing has each operation once."""
        self.shown.add(node.id)
        edges = [e for e in self.drawing.edges if e.target == node.id]
        for i, edge in enumerate(edges):
            source, last = self.by_id[edge.source], i == len(edges) - 1
            branch = margin + ("└─ " if last else "├─ ")
            if self.phase_of[source.id] is not self.phase_of[node.id]:
                yield f"{branch}{', '.join(edge.names)} (of {self.phase_of[source.id].title.split(',')[0]})"
            elif source.id in self.shown:
                yield f"{branch}{', '.join(edge.names)} ↑"
            else:
                yield branch + label(source)
                yield from self._below(source, margin + ("   " if last else "│  "))


def label(node: Node) -> str:
    """`kl: f32[b, t] = logp_old - ref.logprobs(y)`, with the layout behind it once it is known."""
    makes = ", ".join(f"{name}: {type}" for name, type in node.values)
    titled = node.title if node.group in ("train", "metric", "keep", "action") or not node.values else makes
    text = node.text if len(node.text) <= LONGEST else node.text[:LONGEST - 1] + "…"
    between = " " if node.kind == "train" else " = " if node.values or node.kind == "metric" else ": "
    said = titled if not text or text == titled else f"{titled}{between}{text}"
    return said + (f"  @{node.layout}" if node.layout else "")
