"""Causal attention over packed sequences, for Megatron's layers.

Everything but attention treats tokens one by one, so a micro-batch stays packed, [tokens, 1, hidden], from the
embedding to the head. Only here queries, keys and values are laid out as a padded grid, [rows, longest], for torch's
fused kernel. Rows are padded at their end: under a causal mask no real token sees padding, so no other mask is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Mapping, Optional

from runtime.engines import megatron_cpu  # noqa: F401  must precede megatron.core

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from compiler.shapes import ModelShape


@dataclass
class PackedRows(PackedSeqParams):
    """How the packed tokens of a micro-batch fall into rows.

    slots: int64 [tokens], the place of each token in the flattened grid of rows × longest
    cos, sin: f32 [tokens, 1, head_dim / 2], rotation of each token's position
    """

    rows: int = 0
    longest: int = 0
    slots: Optional[Tensor] = None
    cos: Optional[Tensor] = None
    sin: Optional[Tensor] = None


class PackedAttention(torch.nn.Module):
    """The `core_attention` of a layer: rotary positions, padding, attention, unpadding."""

    def __init__(self, config, layer_number: int, softmax_scale: Optional[float] = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: None, *, packed_seq_params: PackedRows, **_: Any
    ) -> Tensor:
        """query [tokens, heads, head_dim], key, value [tokens, kv_heads, head_dim] → [tokens, 1, heads * head_dim]."""
        packed = packed_seq_params
        query = _Rotate.apply(query, packed.cos, packed.sin)
        key = _Rotate.apply(key, packed.cos, packed.sin)
        grid = F.scaled_dot_product_attention(
            *(self._pad(x, packed) for x in (query, key, value)),
            is_causal=True, scale=self.scale, enable_gqa=query.shape[1] != key.shape[1],
        )
        flat = grid.transpose(1, 2).reshape(packed.rows * packed.longest, -1)
        return _Unpad.apply(flat, packed.slots).unsqueeze(1)

    @staticmethod
    def _pad(x: Tensor, packed: PackedRows) -> Tensor:
        """[tokens, heads, head_dim] → [rows, heads, longest, head_dim]."""
        grid = _Pad.apply(x, packed.slots, packed.rows * packed.longest)
        return grid.view(packed.rows, packed.longest, *x.shape[1:]).transpose(1, 2)


class _Pad(torch.autograd.Function):
    """Scatters packed rows into zeros. Unlike indexing its gradient is a gather, without accumulation."""

    @staticmethod
    def forward(ctx, packed: Tensor, slots: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(slots)
        if packed.shape[0] == size:
            return packed.contiguous()
        return packed.new_zeros(size, *packed.shape[1:]).index_copy_(0, slots, packed)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (slots,) = ctx.saved_tensors
        return (grad if grad.shape[0] == slots.numel() else grad.index_select(0, slots)), None, None


class _Unpad(torch.autograd.Function):
    """The inverse of `_Pad`."""

    @staticmethod
    def forward(ctx, grid: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.size = grid.shape[0]
        return grid if ctx.size == slots.numel() else grid.index_select(0, slots)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (slots,) = ctx.saved_tensors
        if ctx.size == slots.numel():
            return grad, None
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, slots, grad), None


class _Rotate(torch.autograd.Function):
    """Rotary position embedding (arXiv 2104.09864) in the half-split form of Llama; its gradient rotates backwards."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim]; the first half of head_dim is the real part, the second the imaginary part."""
    real, imaginary = x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_real, out_imaginary = out.chunk(2, dim=-1)
    torch.mul(real, cos, out=out_real).addcmul_(imaginary, sin, value=-1)
    torch.mul(imaginary, cos, out=out_imaginary).addcmul_(real, sin)
    return out


def rotary_frequencies(shape: ModelShape) -> Tensor:
    """f32 [head_dim / 2]: radians per position of each pair, theta^(-2i / head_dim), scaled as `rope_scaling` says."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    plain = 1.0 / shape.rope_theta**exponents
    scaling = dict(shape.rope_scaling or {})
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        return plain / scaling["factor"]
    return _llama3(plain, scaling) if kind == "llama3" else plain


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's scaling: long waves are slowed by `factor`, short ones kept, those between interpolated."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)  # in the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / factor + kept * plain
