"""Proves of a move of weights that every element of every destination tensor arrives exactly once."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Iterable, Iterator

from compiler.resharding.redistribute import Box, WeightTransfer, volume
from compiler.weights import Piece


def arrival_faults(transfer: WeightTransfer) -> Iterator[str]:
    """What does not arrive as it should, on one rank of each kind: others get the same boxes, if from other ranks."""
    for rank in transfer.one_of_each_kind():
        faults = faults_at(transfer.dst.pieces(rank), transfer.boxes_to(rank))
        yield from (f"rank {rank} {fault}" for fault in faults)


def faults_at(wanted: Iterable[Piece], boxes: Iterable[Box]) -> Iterator[str]:
    """The tensors of one rank, which wants those pieces, that `boxes` do not make up, each element once."""
    arriving: dict[str, list] = defaultdict(list)
    for tensor, start, stop in boxes:
        arriving[tensor].append((start, stop))
    elements: dict[str, int] = defaultdict(int)
    for piece in wanted:
        elements[piece.tensor] += piece.elements
    for tensor, number in elements.items():
        found = arriving.pop(tensor, [])
        if sum(volume(*box) for box in found) != number or _overlap(found):
            yield f"does not get each element of `{tensor}` once"
    for tensor in arriving:
        yield f"gets `{tensor}`, which it does not hold"


def _overlap(boxes: list[tuple]) -> bool:
    ordered = sorted(boxes)
    for i, a in enumerate(ordered):
        rows = itertools.takewhile(lambda b: b[0][0] < a[1][0], ordered[i + 1:])  # later ones begin below it
        if any(_meet(a, b) for b in rows):
            return True
    return False


def _meet(a: tuple, b: tuple) -> bool:
    return all(max(p, q) < min(r, s) for p, r, q, s in zip(a[0], a[1], b[0], b[1]))
