"""Moves of a model's weights between two layouts of a plan."""

from __future__ import annotations

import functools
from typing import Mapping

from compiler.layout import ModelLayout, generation_layout
from compiler.plan import LayoutSpec
from compiler.redistribute import WeightTransfer, redistribute
from compiler.shapes import ModelShape
from compiler.weights import WeightLayout

ENGINES = {"train": "megatron", "forward": "megatron", "generate": "torch"}


def resolve(layouts: Mapping[str, LayoutSpec], name: str) -> ModelLayout:
    """A layout with its order of ranks. Raises KeyError, ValueError."""
    spec = layouts[name]
    if spec.within:
        return generation_layout(resolve(layouts, spec.within), spec.tp)
    return ModelLayout(tuple(range(spec.first, spec.first + spec.ranks)), spec.tp, spec.pp, spec.dp)


def engine_of(layout: str) -> str:
    """The engine of a layout by its stage."""
    return ENGINES[layout.rsplit(".", 1)[1]]


def weight_layout(shape: ModelShape, role: str, layouts: Mapping[str, LayoutSpec], name: str) -> WeightLayout:
    """Raises KeyError and ValueError for layouts that do not fit the model."""
    return WeightLayout(shape, role, resolve(layouts, name), engine_of(name))


def weight_transfer(
    shape: ModelShape, role: str, layouts: Mapping[str, LayoutSpec], src: str, dst: str
) -> WeightTransfer:
    """As `weight_layout`."""
    return _transfer(weight_layout(shape, role, layouts, src), weight_layout(shape, role, layouts, dst))


_transfer = functools.lru_cache(maxsize=64)(redistribute)
