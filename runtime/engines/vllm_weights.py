"""Weights as vLLM's loader wants them: whole tensors under Hugging Face's names, of which it takes its rank's part."""

from __future__ import annotations

from collections import defaultdict
from typing import Iterator, Mapping

from torch import Tensor

from compiler.weights import Piece, WeightLayout


def whole_tensors(weights: WeightLayout, rank: int, local: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every canonical tensor, in the order of the model's modules, one at a time.

    local: this rank's tensors by the names of `weights`, engine "vllm". Only their part of a whole tensor has values;
    the rest is memory that nobody has touched and that the loader does not read. The loader keeps what it gets until a
    layer is complete, so each tensor is memory of its own, or a view of `local`.
    """
    found: dict[str, list[Piece]] = defaultdict(list)
    for piece in weights.pieces(rank):
        found[piece.tensor].append(piece)
    for name, size in weights.tensors.items():
        yield name, _whole(size, found[name], local)


def _whole(size: tuple[int, ...], pieces: list[Piece], local: Mapping[str, Tensor]) -> Tensor:
    if len(pieces) == 1 and pieces[0].size == size:
        return _part(pieces[0], local)
    made = next(iter(local.values())).new_empty(size)
    for piece in pieces:
        made[tuple(map(slice, piece.start, piece.stop))] = _part(piece, local)
    return made


def _part(piece: Piece, local: Mapping[str, Tensor]) -> Tensor:
    return local[piece.local][tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.size))]
