"""The flow graph in the languages of other tools: Graphviz's DOT and Mermaid's flowcharts."""

from __future__ import annotations

from typing import Iterator

from compiler.drawing.model import Drawing, Node

LONGEST = 40  # characters of a line in a node
_SHAPES = {"data": "cylinder", "sample": "box", "model": "box", "metric": "note", "keep": "diamond", "action": "note"}


def dot(drawing: Drawing) -> str:
    """For `dot -Tsvg`: a cluster for each phase."""
    return "\n".join(_dot(drawing)) + "\n"


def _dot(drawing: Drawing) -> Iterator[str]:
    yield f"digraph {_dot_text(drawing.name)} {{"
    yield '  node [shape=box, style=rounded, fontname="monospace", fontsize=10];'
    yield '  edge [fontname="monospace", fontsize=9];'
    for i, phase in enumerate(drawing.phases):
        yield f"  subgraph cluster_{i} {{"
        yield f"    label={_dot_text(phase.title)}; style=dashed;"
        for node in phase.nodes:
            shape = f", shape={_SHAPES[node.group]}" if node.group in _SHAPES else ""
            yield f"    n{node.id} [label={_dot_text(caption(node))}{shape}];"
        yield "  }"
    for edge in drawing.edges:
        yield f"  n{edge.source} -> n{edge.target} [label={_dot_text(', '.join(edge.names))}];"
    yield "}"


def _dot_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def mermaid(drawing: Drawing) -> str:
    """A flowchart as Markdown pages show it in a block ```` ```mermaid ````."""
    return "\n".join(_mermaid(drawing)) + "\n"


def _mermaid(drawing: Drawing) -> Iterator[str]:
    yield "flowchart TD"
    for i, phase in enumerate(drawing.phases):
        yield f"  subgraph s{i} [{_mermaid_text(phase.title)}]"
        for node in phase.nodes:
            left, right = ("[(", ")]") if node.group == "data" else ("[", "]")
            yield f"    n{node.id}{left}{_mermaid_text(caption(node))}{right}"
        yield "  end"
    for edge in drawing.edges:
        yield f"  n{edge.source} -->|{_mermaid_text(', '.join(edge.names))}| n{edge.target}"


def _mermaid_text(text: str) -> str:
    """In quotes; what Mermaid reads as markup becomes an entity of its own syntax."""
    codes = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "`": "#96;", "\n": "<br/>"}
    return '"' + "".join(codes.get(char, char) for char in text) + '"'


def caption(node: Node) -> str:
    """The name, below it how it is made, and where, once that is known."""
    lines = [cut(node.title, LONGEST)]
    lines += [cut(node.text, LONGEST)] if node.text and node.text != node.title else []
    return "\n".join(lines + [f"@{node.layout}"] * bool(node.layout))


def cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[:longest - 1] + "…"
