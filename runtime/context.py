"""What the kernels see: the local rows, who holds the others, the arithmetic, and which rows `keep` has dropped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

import torch
from torch import Tensor

from runtime.ragged import segment_sum
from runtime.reducers import Reducer
from runtime.values import Dims, Frame, Value


@dataclass(frozen=True)
class Context:
    """keeps: index of a keep (from 1) -> its condition, a bool value; partial: see `runtime.evaluator.Evaluator`."""

    frame: Frame
    reducer: Reducer
    dtype: torch.dtype
    keeps: dict[int, Value] = field(default_factory=dict)
    partial: bool = False
    masks: dict = field(default_factory=dict, compare=False, repr=False)

    def spread(self, value: Value, dims: Dims) -> Tensor:
        """The data broadcast by name to `dims`, flat; a scalar stays [1], which torch broadcasts for free."""
        if value.dims == dims or not value.dims:
            return value.data
        return value.data.index_select(0, self.frame.index(value.dims, dims))

    def numbers(self, value: Value, dims: Dims) -> Tensor:
        """As `spread`, in the arithmetic's type: booleans count as 0 and 1."""
        if value.data.dtype == self.dtype:
            return self.spread(value, dims)
        return self.spread(Value(value.dims, value.data.to(self.dtype)), dims)

    def full(self, value: Value, dims: Dims) -> Tensor:
        """As `numbers`, with one element for each of `dims`, also of a scalar."""
        data = self.numbers(value, dims)
        return data if value.dims == dims else data.expand(self.frame.numel(dims))

    def truths(self, value: Value, dims: Dims) -> Tensor:
        """As `spread`, as booleans."""
        return self.spread(value, dims).bool()

    def texts(self, value: Value, dims: Dims) -> list[str]:
        index = self.frame.index(value.dims, dims)
        return value.data if index is None else [value.data[i] for i in index.tolist()]

    def kept(self, keep: int, dims: Dims) -> Optional[Tensor]:
        """bool [numel(dims)]: what the keeps 1..`keep` leave of `dims`; None: all of it.

        A row of which every sample is dropped is dropped. A keep over another root dim has no say.
        """
        if not keep or not self.keeps:
            return None
        if (keep, dims) not in self.masks:
            self.masks[keep, dims] = self._kept(keep, dims)
        return self.masks[keep, dims]

    def _kept(self, keep: int, dims: Dims) -> Optional[Tensor]:
        frame = self.frame
        masks = [v for i, v in self.keeps.items() if i <= keep and set(frame.roots(v.dims)) <= set(dims)]
        joint_dims = tuple(dict.fromkeys(d for v in masks for d in v.dims))
        # Together first: no sample of a row may be left although each keep alone leaves one.
        joint = torch.ones(frame.numel(joint_dims), dtype=torch.bool)
        for mask in masks:
            joint = joint & self.truths(mask, joint_dims)
        if joint.all():
            return None
        shared = tuple(d for d in joint_dims if d in dims)
        if shared != joint_dims:
            joint = segment_sum(joint.long(), frame.index(shared, joint_dims), frame.numel(shared)) > 0
        return self.spread(Value(shared, joint), dims).expand(frame.numel(dims))
