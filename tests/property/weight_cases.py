"""Random models and layouts, and weights whose every element has a number of its own."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from compiler.layout import ModelLayout
from compiler.shapes import ModelShape
from compiler.weights import WeightLayout, misfit
from tests.filling import fill


@st.composite
def shapes(draw) -> ModelShape:
    """Models of a few hundred parameters: grouped queries, bias, tying and a vocabulary that divides, or not."""
    kv_heads, group = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 4]))
    return ModelShape(
        family="qwen2", hidden=draw(st.integers(1, 6)), layers=draw(st.integers(1, 5)), heads=kv_heads * group,
        kv_heads=kv_heads, head_dim=draw(st.sampled_from([1, 2, 4])), ffn=draw(st.sampled_from([4, 8, 12])),
        vocab=draw(st.integers(1, 17)), tied=draw(st.booleans()), qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )


@st.composite
def model_layouts(draw, shape: ModelShape, engine: str) -> ModelLayout:
    """A layout that fits, over ranks in random order out of 0 .. 15."""
    degrees = st.sampled_from([1, 2, 3, 4])
    fits = [
        (tp, pp, chunks) for tp in (1, 2, 3, 4) for pp in (1, 2, 3, 4) for chunks in ((1, 2) if pp > 1 else (1,))
        if not misfit(shape, ModelLayout(tuple(range(tp * pp)), tp, pp, chunks=chunks), engine)
    ]
    tp, pp, chunks = draw(st.sampled_from(fits))
    dp = draw(degrees.filter(lambda d: tp * pp * d <= 16))
    return ModelLayout(tuple(draw(st.permutations(range(16)))[: tp * pp * dp]), tp, pp, dp, chunks)


def numbered(weights: WeightLayout) -> dict[str, np.ndarray]:
    """The canonical tensors, holding 0, 1, 2, ..."""
    made, first = {}, 0
    for name, size in weights.tensors.items():
        made[name] = np.arange(first, first + math.prod(size)).reshape(size)
        first += math.prod(size)
    return made


def box(start, stop) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(start, stop))


def local_arrays(weights: WeightLayout, rank: int, whole: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The local tensors of a rank as its pieces say, padding being -1."""
    made = {name: np.full(size, -1) for name, size in weights.local_tensors(rank).items()}
    fill(made, weights.pieces(rank), whole)
    return made
