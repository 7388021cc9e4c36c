"""Keys and values of the rows that are being decoded.

Every row has a slot. Slots lengthen together as their rows do, so memory follows the tokens that are there, not those
that may come. They stay contiguous: one product over all of them needs no gathering.

Legend: s slots, k key/value heads and d their width on this rank, c capacity of a slot in tokens, n rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64  # tokens


def grown(tokens: int) -> int:
    """The capacity to give to slots whose longest row has `tokens`: whole blocks, room for a quarter more."""
    return (tokens * 5 // 4 // BLOCK + 1) * BLOCK


@dataclass(frozen=True)
class Places:
    """Where the tokens of one step go: rows of a layer's store seen as [s * k * 2 * c, d]. int64 [n * k] each."""

    keys: Tensor
    values: Tensor


class Cache:
    """layers stores, each [s, k, 2, c, d]: of every head its keys, then its values. What was not written is finite."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kv_heads = kv_heads
        empty = torch.zeros(0, kv_heads, 2, 0, head_dim, dtype=dtype, device=device)
        self._stores = [empty] * layers

    @property
    def slots(self) -> int:
        return self._stores[0].shape[0]

    @property
    def capacity(self) -> int:
        return self._stores[0].shape[3]

    def resize(self, slots: int, capacity: int) -> None:
        """Other sizes for the same content, as far as it fits. One layer at a time: more than one is never there twice."""
        for i, old in enumerate(self._stores):
            new = old.new_zeros(slots, *old.shape[1:3], capacity, old.shape[4])
            s, c = min(slots, old.shape[0]), min(capacity, old.shape[3])
            new[:s, :, :, :c] = old[:s, :, :, :c]
            self._stores[i] = new

    def move(self, source: Tensor, target: Tensor, tokens: int) -> None:
        """Copies the first `tokens` places of the slots `source` into the slots `target` (int64 [m], disjoint)."""
        for store in self._stores:
            store[:, :, :, :tokens][target] = store[source, :, :, :tokens]

    def fill(self, layer: int, slots: slice, keys: Tensor, values: Tensor) -> None:
        """Whole prompts, [slots, k, tokens, d] each, from place 0 on."""
        store = self._stores[layer][slots, :, :, :keys.shape[2]]
        store[:, :, 0], store[:, :, 1] = keys, values

    def places(self, positions: Tensor) -> Places:
        """Of the tokens at `positions` (int64 [n]) in the slots 0 .. n-1."""
        device = self._stores[0].device
        heads = torch.arange(positions.numel() * self._kv_heads, device=device).view(-1, self._kv_heads)
        keys = (heads * (2 * self.capacity) + positions.to(device)[:, None]).flatten()
        return Places(keys, keys + self.capacity)

    def write(self, layer: int, places: Places, keys: Tensor, values: Tensor) -> None:
        """One token a row, keys and values [n, k, d]."""
        rows = self._stores[layer].view(-1, keys.shape[-1])
        rows.index_copy_(0, places.keys, keys.reshape(-1, keys.shape[-1]))
        rows.index_copy_(0, places.values, values.reshape(-1, keys.shape[-1]))

    def read(self, layer: int, n: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the places before `end` in the slots 0 .. n-1, views [n * k, end, d]."""
        heads = self._stores[layer].flatten(0, 1)[:n * self._kv_heads, :, :end]
        return heads[:, 0], heads[:, 1]
