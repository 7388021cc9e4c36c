"""The gated MLP of a Llama-like layer (SwiGLU, arXiv 2002.05202) in few passes over its activations."""

from __future__ import annotations

from typing import Any, Iterator, Optional

from runtime.engines import megatron_cpu  # noqa: F401  must precede megatron.core

import torch
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from runtime.engines.megatron_linear import ColumnLinear, RowLinear

_BLOCK = 1 << 17  # numbers of a block, of one half


class GatedMLP(MLP):
    """W_down (silu(gate) * up), where one product gives gate and up, one beside the other."""

    def __init__(self, config: TransformerConfig) -> None:
        parts = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
        super().__init__(config, parts, ffn_hidden_size=config.ffn_hidden_size)

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, Optional[Tensor]]:
        wide, _ = self.linear_fc1(hidden)
        return self.linear_fc2(swiglu(wide))


def swiglu(wide: Tensor) -> Tensor:
    """[.., 2 f] → silu(first half) * second half, [.., f]."""
    return _SwiGLU.apply(wide)


class _SwiGLU(torch.autograd.Function):
    """Both gradients are written into one tensor. On a CPU some rows at a time, which stay in a core's cache."""

    @staticmethod
    def forward(ctx, wide: Tensor) -> Tensor:
        ctx.save_for_backward(wide)
        active = wide.new_empty(*wide.shape[:-1], wide.shape[-1] // 2)
        for (gate, up), out in zip(_halves(wide), _blocks(active)):
            torch.ops.aten.silu.out(gate, out=out).mul_(up)
        return active

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (wide,) = ctx.saved_tensors
        grad_wide = wide.new_empty(wide.shape)
        for (gate, up), (grad_gate, grad_up), some in zip(_halves(wide), _halves(grad_wide), _blocks(grad)):
            torch.ops.aten.silu_backward.grad_input(some * up, gate, grad_input=grad_gate)
            torch.ops.aten.silu.out(gate, out=grad_up).mul_(some)
        return grad_wide


def _halves(wide: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(gate, up) of the rows of each block of one half."""
    return (block.chunk(2, -1) for block in _blocks(wide, halves=2))


def _blocks(x: Tensor, halves: int = 1) -> tuple[Tensor, ...]:
    rows = x.flatten(0, -2)
    size = max(1, _BLOCK * halves // rows.shape[1]) if x.device.type == "cpu" else max(1, len(rows))
    return rows.split(size)
