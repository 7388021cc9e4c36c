"""Proves of a move of weights that every element of every destination tensor arrives exactly once."""

from __future__ import annotations

from collections import defaultdict
from typing import Iterable, Iterator

from compiler.redistribute import Move, WeightTransfer, volume
from compiler.weights import Piece


def arrival_faults(transfer: WeightTransfer) -> Iterator[str]:
    """What does not arrive as it should, on the ranks of one replica: others get the same boxes, if from other ranks."""
    for rank in transfer.dst.layout.replica(0):
        faults = faults_at(transfer.dst.pieces(rank), transfer.moves_to(rank))
        yield from (f"rank {rank} {fault}" for fault in faults)


def faults_at(wanted: Iterable[Piece], moves: Iterable[Move]) -> Iterator[str]:
    """The tensors of one rank, which wants those pieces, that `moves` do not bring whole and once."""
    arriving: dict[str, list] = defaultdict(list)
    for move in moves:
        arriving[move.tensor].append((move.start, move.stop))
    elements: dict[str, int] = defaultdict(int)
    for piece in wanted:
        elements[piece.tensor] += piece.elements
    for tensor, number in elements.items():
        boxes = arriving.pop(tensor, [])
        if sum(volume(*box) for box in boxes) != number or _overlap(boxes):
            yield f"does not get each element of `{tensor}` once"
    for tensor in arriving:
        yield f"gets `{tensor}`, which it does not hold"


def _overlap(boxes: list[tuple]) -> bool:
    ordered = sorted(boxes)
    return any(_meet(a, b) for i, a in enumerate(ordered) for b in ordered[i + 1:])


def _meet(a: tuple, b: tuple) -> bool:
    return all(max(p, q) < min(r, s) for p, r, q, s in zip(a[0], a[1], b[0], b[1]))
