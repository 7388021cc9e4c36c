"""Moves of a model's weights between two layouts of a plan."""

from __future__ import annotations

import functools
from typing import Mapping

from compiler.layout import ModelLayout, generation_layout, in_rank_order, vanilla_generation_layout
from compiler.plan import LayoutSpec
from compiler.resharding.gathers import ALL_GATHER, MINIMAL, VANILLA, ZERO_REDUNDANCY, transfer_by
from compiler.resharding.redistribute import WeightTransfer
from compiler.shapes import ModelShape
from compiler.weights import WeightLayout

# how a generation layout takes the ranks of its training layout, by the strategy that moves the weights
ORDERS = {ZERO_REDUNDANCY: generation_layout, MINIMAL: generation_layout, VANILLA: vanilla_generation_layout,
          ALL_GATHER: vanilla_generation_layout}
ITEMSIZE = {"fp32": 4, "bf16": 2}  # bytes of a number, by the precision of a layout
ENGINES = {"train": ("megatron",), "forward": ("megatron",), "generate": ("torch", "vllm")}  # by stage, the usual first


def resolve(layouts: Mapping[str, LayoutSpec], name: str) -> ModelLayout:
    """A layout with its order of ranks. Raises KeyError, ValueError."""
    spec = layouts[name]
    if spec.within:
        made = ORDERS[spec.strategy](resolve(layouts, spec.within), spec.tp)
        return in_rank_order(made) if spec.engine == "vllm" else made
    return ModelLayout(tuple(range(spec.first, spec.first + spec.ranks)), spec.tp, spec.pp, spec.dp, spec.chunks)


def engine_of(layouts: Mapping[str, LayoutSpec], name: str) -> str:
    """The engine of a layout: the one it names, else the usual one of its stage. Raises KeyError."""
    return layouts[name].engine or ENGINES[name.rsplit(".", 1)[1]][0]


def weight_layout(shape: ModelShape, role: str, layouts: Mapping[str, LayoutSpec], name: str) -> WeightLayout:
    """Raises KeyError and ValueError for layouts that do not fit the model."""
    return WeightLayout(shape, role, resolve(layouts, name), engine_of(layouts, name))


def weight_transfer(
    shape: ModelShape, role: str, layouts: Mapping[str, LayoutSpec], src: str, dst: str
) -> WeightTransfer:
    """Raises as `weight_layout`."""
    ends = (weight_layout(shape, role, layouts, name) for name in (src, dst))
    return _transfer(strategy_of(layouts, src, dst), *ends, ITEMSIZE[wire_precision(layouts, src, dst)])


def wire_precision(layouts: Mapping[str, LayoutSpec], src: str, dst: str) -> str:
    """What weights travel in between two layouts: the narrower of the two, as the other end has no more or keeps no more."""
    return min((layouts[name].precision for name in (src, dst)), key=ITEMSIZE.__getitem__)


def strategy_of(layouts: Mapping[str, LayoutSpec], src: str, dst: str) -> str:
    """How weights go from `src` to `dst`: as `dst` says if it lies within `src`, else point to point."""
    return layouts[dst].strategy if layouts[dst].within == src else MINIMAL


_transfer = functools.lru_cache(maxsize=64)(transfer_by)
