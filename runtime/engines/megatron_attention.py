"""Causal attention over packed sequences, for Megatron's layers.

Everything but attention treats tokens one by one, so a micro-batch stays packed, [tokens, 1, hidden], from the
embedding to the head. Only here queries, keys and values are laid out as a padded grid, [rows, longest], for torch's
fused kernel or for plain products. Rows are padded at their end: under a causal mask no real token sees padding. No
other mask is needed, unless a sliding window cuts off what is far.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Optional

from runtime.engines import megatron_cpu  # noqa: F401  must precede megatron.core

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from runtime.engines.megatron_scores import attended, suits


@dataclass
class PackedRows(PackedSeqParams):
    """How the packed tokens of a micro-batch fall into rows.

    slots: int64 [tokens], the place of each token in the flattened grid of rows × longest
    cos, sin: f32 [longest, head_dim], rotation of each position; the sine of a first half is negated
    mask: bool [longest, longest], which keys a query sees; None: all up to its own
    read: int64 [m], ascending, the tokens whose results are wanted; None: all
    """

    rows: int = 0
    longest: int = 0
    slots: Optional[Tensor] = None
    cos: Optional[Tensor] = None
    sin: Optional[Tensor] = None
    mask: Optional[Tensor] = None
    read: Optional[Tensor] = None

    def reading(self, read: Optional[Tensor]) -> "PackedRows":
        """The same rows, of whose tokens these are wanted."""
        return replace(self, read=read)

    def taken(self, x: Tensor) -> Tensor:
        """x [tokens, ..] → of the tokens that are wanted."""
        return x if self.read is None else take(x, self.read)


class PackedAttention(torch.nn.Module):
    """The `core_attention` of a layer: rotary positions, padding, attention, unpadding."""

    def __init__(self, config, layer_number: int, softmax_scale: Optional[float] = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: None, *, packed_seq_params: PackedRows, **_: Any
    ) -> Tensor:
        """query [tokens, heads, head_dim], key, value [tokens, kv_heads, head_dim] → [m, 1, heads * head_dim]."""
        packed = packed_seq_params
        grids = [self._pad(x, packed) for x in (query, key, value)]
        grids[:2] = (_Rotate.apply(x, packed.cos, packed.sin) for x in grids[:2])
        if suits(query, packed.longest):
            grid = attended(*grids, packed.mask, self.scale or query.shape[2] ** -0.5)
        else:
            grid = F.scaled_dot_product_attention(
                *grids, attn_mask=packed.mask, is_causal=packed.mask is None, scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1])
        flat = grid.transpose(1, 2).reshape(packed.rows * packed.longest, -1)
        return take(flat, packed.slots if packed.read is None else packed.slots[packed.read]).unsqueeze(1)

    @staticmethod
    def _pad(x: Tensor, packed: PackedRows) -> Tensor:
        """[tokens, heads, head_dim] → [rows, heads, longest, head_dim]; of rows without padding a view."""
        if x.shape[0] < packed.rows * packed.longest:
            x = _Pad.apply(x, packed.slots, packed.rows * packed.longest)
        return x.unflatten(0, (packed.rows, packed.longest)).transpose(1, 2)


class _Pad(torch.autograd.Function):
    """Scatters packed rows into zeros. Unlike indexing its gradient is a gather, without accumulation."""

    @staticmethod
    def forward(ctx, packed: Tensor, slots: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(slots)
        return packed.new_zeros(size, *packed.shape[1:]).index_copy_(0, slots, packed)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (slots,) = ctx.saved_tensors
        return grad.index_select(0, slots), None, None


def take(x: Tensor, places: Tensor) -> Tensor:
    """The rows of x at `places`, which are different ones and ascend; the inverse of `_Pad`."""
    return x if x.shape[0] == places.numel() else _Take.apply(x, places)


class _Take(torch.autograd.Function):
    """Its gradient copies, as no row is taken twice."""

    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = x.shape[0]
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (places,) = ctx.saved_tensors
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, places, grad), None


class _Rotate(torch.autograd.Function):
    """Rotary position embedding (arXiv 2104.09864) in the half-split form of Llama; its gradient rotates backwards.

    [rows, heads, longest, head_dim], whatever its strides → the same, contiguous, as the products of attention read it
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first half of head_dim is the real part, the second the imaginary part."""
    turned = torch.mul(x, cos, out=cos.new_empty(x.shape))
    return turned.addcmul_(x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)
