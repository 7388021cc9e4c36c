"""Whole weights, cut as a layout cuts them."""

from __future__ import annotations

from typing import Iterable, Mapping

from compiler.weights import Piece


def fill(local: Mapping, pieces: Iterable[Piece], whole: Mapping) -> None:
    """Puts each piece of the canonical tensors `whole` where a rank keeps it. Tensors or arrays; dtypes may differ."""
    for piece in pieces:
        place = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.size))
        local[piece.local][place] = whole[piece.tensor][tuple(map(slice, piece.start, piece.stop))]
