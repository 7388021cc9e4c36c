"""Counts the memory of tensors while something runs, allocation by allocation."""

from __future__ import annotations

import time
from typing import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

PATIENCE = 500


class Peak(TorchDispatchMode):
    """most: bytes of the memory of `watched`, whatever it is at each moment, and of all tensors that were made since.

    Threads of gloo let go of a buffer a moment after its collective: what is above `expected` is looked at again, but
    for what comes after too much.
    """

    def __init__(self, watched: Iterable[Tensor], expected: int) -> None:
        super().__init__()
        self._expected = expected
        self._watched = {tensor.untyped_storage()._cdata: tensor for tensor in watched}.values()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = self.now()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage()._cdata for tensor in self._watched}
        for value in tree_flatten(result)[0]:
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in known:
                store = value.untyped_storage()
                self._made[store._cdata] = StorageWeakRef(store), store.nbytes()
        for _ in range(PATIENCE):
            if self.now() <= self._expected or self.most > self._expected:
                break
            time.sleep(0.001)
        self.most = max(self.most, self.now())
        return result

    def now(self) -> int:
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(t.untyped_storage().nbytes() for t in self._watched) + sum(size for _, size in self._made.values())
