"""Where nodes and lines of a picture stand: a layered drawing (Sugiyama, Tagawa and Toda, 1981), top to bottom.

A node's layer is one below the lowest of what it reads, and below all earlier phases. A line over several layers gets
a place in each of them, shared by all lines from one node. Barycentres order a layer; then every place goes as near to
the middle of its neighbours as its order and the distances allow, which is isotonic regression, solved exactly.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Mapping, Sequence

SWEEPS, ROUNDS = 12, 24
MOST_CROSSED = 10_000  # places of lines in layers; a drawing with more has lines that go straight
GAP, LINE_GAP = 22.0, 14.0  # between nodes, and around a line
LAYER_GAP, PHASE_GAP = 40.0, 84.0
MARGIN = 28.0


@dataclass(frozen=True)
class Box:
    """A node to be placed: its phase (0, 1, ...) and size."""

    id: int
    phase: int
    width: float
    height: float


@dataclass(frozen=True)
class Layout:
    """Middles of nodes, corners of lines from bottom of the source to top of the target, top and bottom of phases."""

    places: Mapping[int, tuple[float, float]]
    lines: Mapping[tuple[int, int], tuple[tuple[float, float], ...]]
    phases: tuple[tuple[float, float], ...]
    width: float
    height: float


@dataclass
class _Place:
    """A node, or the place of `box`'s lines in a layer that they cross."""

    box: Box
    layer: int
    is_line: bool
    x: float = 0.0

    @property
    def width(self) -> float:
        return LINE_GAP if self.is_line else self.box.width


def layered(boxes: Sequence[Box], edges: Sequence[tuple[int, int]]) -> Layout:
    """boxes: in an order in which readers stand below what they read, phases ascending; edges: (source, target) ids."""
    if not boxes:
        return Layout({}, {}, (), 2 * MARGIN, 2 * MARGIN)
    by_id = {box.id: box for box in boxes}
    layers = _layers(boxes, edges)
    places, links, routes = _with_lines(by_id, layers, edges)
    rows = _ordered(places, links)
    _spread(rows, links)
    shift = MARGIN - min(p.x - p.width / 2 for row in rows for p in row)
    for place in places:
        place.x += shift
    tops, phases, height = _heights(rows)
    width = max(p.x + p.width / 2 for p in places) + MARGIN
    return _result(places, routes, tops, phases, (width, height))


# ---- layers ----------------------------------------------------------------------------------------------

def _layers(boxes: Sequence[Box], edges: Sequence[tuple[int, int]]) -> dict[int, int]:
    """The layer of each node: the longest path, with phases below each other."""
    read: dict[int, list[int]] = {}
    for source, target in edges:
        read.setdefault(target, []).append(source)
    found: dict[int, int] = {}
    phase, first = boxes[0].phase, 0
    for box in boxes:
        if box.phase != phase:
            phase, first = box.phase, 1 + max(found.values())
        found[box.id] = max([first, *(found[i] + 1 for i in read.get(box.id, ()))])
    return found


def _with_lines(by_id, layers, edges):
    """All places; which are joined from one layer to the next; the places that each edge passes."""
    lowest: dict[int, int] = {}
    for source, target in edges:
        lowest[source] = max(layers[target], lowest.get(source, 0))
    straight = sum(low - layers[source] - 1 for source, low in lowest.items()) > MOST_CROSSED
    nodes = {i: _Place(box, layers[i], False) for i, box in by_id.items()}
    crossed: dict[tuple[int, int], _Place] = {}
    links: dict[tuple[int, int], tuple[_Place, _Place]] = {}
    routes: dict[tuple[int, int], list[_Place]] = {}
    for source, target in edges:
        route = [nodes[source]]
        for layer in () if straight else range(layers[source] + 1, layers[target]):
            route.append(crossed.setdefault((source, layer), _Place(by_id[source], layer, True)))
        route.append(nodes[target])
        routes[source, target] = route
        links.update({(id(a), id(b)): (a, b) for a, b in zip(route, route[1:]) if b.layer == a.layer + 1})
    return [*nodes.values(), *crossed.values()], list(links.values()), routes


# ---- order -----------------------------------------------------------------------------------------------

def _ordered(places: list[_Place], links: list[tuple[_Place, _Place]]) -> list[list[_Place]]:
    """The layers, each ordered so that few lines cross: the best of some sweeps down and up."""
    rows = [[p for p in places if p.layer == i] for i in range(1 + max(p.layer for p in places))]
    above, below = _neighbours(links)
    best, fewest = [list(row) for row in rows], _crossings(rows, below)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        at = {id(place): i for row in rows for i, place in enumerate(row)}
        for row in rows if down else reversed(rows):
            _by_barycentre(row, above if down else below, at)
            at.update({id(place): i for i, place in enumerate(row)})
        crossings = _crossings(rows, below)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    return best


def _neighbours(links) -> tuple[dict[int, list[_Place]], dict[int, list[_Place]]]:
    above: dict[int, list[_Place]] = {}
    below: dict[int, list[_Place]] = {}
    for upper, lower in links:
        above.setdefault(id(lower), []).append(upper)
        below.setdefault(id(upper), []).append(lower)
    return above, below


def _by_barycentre(row: list[_Place], near: Mapping[int, list[_Place]], at: Mapping[int, int]) -> None:
    """Sorts by the mean position of neighbours; what has none keeps its own."""
    def middle(place: _Place) -> float:
        others = [at[id(other)] for other in near.get(id(place), ())]
        return sum(others) / len(others) if others else at[id(place)]

    row.sort(key=middle)


def _crossings(rows: list[list[_Place]], below: Mapping[int, list[_Place]]) -> int:
    total = 0
    for row, lower in zip(rows, rows[1:]):
        at = {id(p): i for i, p in enumerate(lower)}
        seen: list[int] = []  # ends of lines from places further left
        for place in row:
            ends = [at[id(other)] for other in below.get(id(place), ())]
            total += sum(len(seen) - bisect.bisect_right(seen, end) for end in ends)
            seen = sorted(seen + ends)
    return total


# ---- places ----------------------------------------------------------------------------------------------

def _spread(rows: list[list[_Place]], links: list[tuple[_Place, _Place]]) -> None:
    """Sets every `x`, from both directions in turn; lines pull harder, so that they are straight."""
    above, below = _neighbours(links)
    for row in rows:
        _settle(row, [0.0] * len(row))
    for turn in range(ROUNDS):
        near, order = (above, rows) if turn % 2 == 0 else (below, reversed(rows))
        for row in order:
            _settle(row, [_wanted(p, near) for p in row])


def _wanted(place: _Place, near: Mapping[int, list[_Place]]) -> float:
    others = near.get(id(place), [])
    pulls = [4.0 if place.is_line and other.is_line else 1.0 for other in others]
    return sum(w * o.x for w, o in zip(pulls, others)) / sum(pulls) if others else place.x


def _settle(row: list[_Place], wanted: Sequence[float]) -> None:
    """The x nearest to `wanted` in the least squares that keep order and distances: pool adjacent violators."""
    offsets = [0.0]
    for left, right in zip(row, row[1:]):
        offsets.append(offsets[-1] + (left.width + right.width) / 2 + GAP)
    blocks: list[list[float]] = []  # [sum, count] of pooled neighbours
    for want, offset in zip(wanted, offsets):
        blocks.append([want - offset, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    means = [total / count for total, count in blocks for _ in range(int(count))]
    for place, mean, offset in zip(row, means, offsets):
        place.x = mean + offset


# ---- heights ---------------------------------------------------------------------------------------------

def _heights(rows: list[list[_Place]]):
    """Top and height of each layer, top and bottom of each phase, the height of all."""
    tops: list[tuple[float, float]] = []
    phases: dict[int, tuple[float, float]] = {}
    y = MARGIN + PHASE_GAP / 2
    previous = rows[0][0].box.phase
    for row in rows:
        nodes = [p.box for p in row if not p.is_line]
        phase, tall = nodes[0].phase, max(box.height for box in nodes)
        y += PHASE_GAP - LAYER_GAP if phase != previous else 0.0
        first = phases.get(phase, (y, y))[0]
        tops.append((y, tall))
        phases[phase] = (first, y + tall)
        y, previous = y + tall + LAYER_GAP, phase
    return tops, tuple(phases.values()), y - LAYER_GAP + MARGIN


def _result(places, routes, tops, phases, size) -> Layout:
    middles = {p.box.id: (p.x, tops[p.layer][0] + tops[p.layer][1] / 2) for p in places if not p.is_line}
    lines = {edge: tuple(_corners(route, tops)) for edge, route in routes.items()}
    return Layout(middles, lines, phases, *size)


def _corners(route: list[_Place], tops):
    """From the bottom of the source, straight through the layers between, to the top of the target."""
    first, *between, last = route
    top, tall = tops[first.layer]
    yield first.x, top + (tall + first.box.height) / 2
    for place in between:
        top, tall = tops[place.layer]
        yield place.x, top
        yield place.x, top + tall
    top, tall = tops[last.layer]
    yield last.x, top + (tall - last.box.height) / 2
