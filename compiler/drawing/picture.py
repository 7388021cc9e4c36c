"""The flow graph as a picture, and as a page around it: no other tool, no network, light and dark."""

from __future__ import annotations

from typing import Any, Iterator

from compiler.drawing.layout import Box, Layout, layered
from compiler.drawing.model import Drawing, Node
from compiler.drawing.text_formats import cut
from compiler.templating import environment

LONGEST = 38  # characters of a line in a node
TITLE, TEXT = 7.3, 6.7  # widths of a character of the two sizes of type, px
HEIGHTS = (28.0, 44.0)  # of nodes with one and two lines
_TEMPLATES = environment()


def svg(drawing: Drawing) -> str:
    """A picture that stands alone."""
    return _TEMPLATES.get_template("graph.svg.j2").render(picture(drawing))


def html(drawing: Drawing) -> str:
    """The picture beside the program: who reads what shows at a touch."""
    nodes = {node.id: _told(node) for node in drawing.nodes}
    edges = [[edge.source, edge.target] for edge in drawing.edges]
    return _TEMPLATES.get_template("graph.html.j2").render(
        picture(drawing), facts={"nodes": nodes, "edges": edges}, program=drawing.program.splitlines())


def picture(drawing: Drawing) -> dict[str, Any]:
    boxes = [_box(node, i) for i, phase in enumerate(drawing.phases) for node in phase.nodes]
    layout = layered(boxes, [(edge.source, edge.target) for edge in drawing.edges])
    sizes = {box.id: box for box in boxes}
    return {
        "name": drawing.name, "width": _px(layout.width), "height": _px(layout.height),
        "bands": [{"title": phase.title, "top": _px(top - 34), "height": _px(bottom - top + 50)}
                  for phase, (top, bottom) in zip(drawing.phases, layout.phases)],
        "lines": [{"source": e.source, "target": e.target, "names": ", ".join(e.names),
                   "path": _path(layout.lines[e.source, e.target])} for e in drawing.edges],
        "nodes": [_node(node, sizes[node.id], layout) for node in drawing.nodes],
    }


def _box(node: Node, phase: int) -> Box:
    title, text = _captions(node)
    wide = max(TITLE * len(title) + TEXT * len(_type(node)) + 8, TEXT * len(text))
    return Box(node.id, phase, wide + 22, HEIGHTS[bool(text)])


def _captions(node: Node) -> tuple[str, str]:
    """The two lines of a node; one that is named by its text has one."""
    return cut(node.title, LONGEST), "" if node.text == node.title else cut(node.text, LONGEST)


def _type(node: Node) -> str:
    return node.values[0][1] if len(node.values) == 1 and node.group != "train" else ""


def _node(node: Node, box: Box, layout: Layout) -> dict[str, Any]:
    x, y = layout.places[node.id]
    title, text = _captions(node)
    return {
        "id": node.id, "group": node.group, "title": title, "type": _type(node), "text": text,
        "tip": "\n".join(_told(node).values()), "left": _px(x - box.width / 2), "top": _px(y - box.height / 2),
        "wide": _px(box.width), "tall": _px(box.height), "middle": _px(box.width / 2), "line": node.line,
    }


def _told(node: Node) -> dict[str, str]:
    """All there is to say of a node."""
    makes = ", ".join(f"{name}: {type}" for name, type in node.values)
    facts = {"makes": makes or node.title, "by": node.text, "on": node.layout,
             "kind": node.kind, "line": f"line {node.line}" if node.line else ""}
    return {key: value for key, value in facts.items() if value}


def _path(corners: tuple[tuple[float, float], ...]) -> str:
    """A curve through the corners that leaves and arrives straight down."""
    return "".join(_pieces(corners))


def _pieces(corners: tuple[tuple[float, float], ...]) -> Iterator[str]:
    (x, y), *rest = corners
    yield f"M{_px(x)} {_px(y)}"
    for at, (to_x, to_y) in enumerate(rest):
        half = (y + to_y) / 2
        crosses_layer = at % 2 == 1
        yield (f"V{_px(to_y)}" if crosses_layer
               else f"C{_px(x)} {_px(half)} {_px(to_x)} {_px(half)} {_px(to_x)} {_px(to_y)}")
        x, y = to_x, to_y


def _px(value: float) -> str:
    """Half a pixel is exact enough, and the same on every machine."""
    return f"{round(2 * value) / 2:g}"
