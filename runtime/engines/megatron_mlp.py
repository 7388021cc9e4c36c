"""The gated MLP of a Llama-like layer (SwiGLU, arXiv 2002.05202) in few passes over its activations."""

from __future__ import annotations

from typing import Any, Optional

from runtime.engines import megatron_cpu  # noqa: F401  must precede megatron.core

import torch
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from runtime.engines.blocks import blocks
from runtime.engines.megatron_linear import ColumnLinear, RowLinear


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
    """Both gradients are written into one tensor, some rows at a time."""

    @staticmethod
    def forward(ctx, wide: Tensor) -> Tensor:
        ctx.save_for_backward(wide)
        rows, active = wide.flatten(0, -2), wide.new_empty(*wide.shape[:-1], wide.shape[-1] // 2)
        out = active.flatten(0, -2)
        for some in blocks(rows, 2):
            gate, up = rows[some].chunk(2, -1)
            torch.ops.aten.silu.out(gate, out=out[some]).mul_(up)
        return active

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (wide,) = ctx.saved_tensors
        rows, grads, grad_wide = wide.flatten(0, -2), grad.flatten(0, -2), wide.new_empty(wide.shape)
        out = grad_wide.flatten(0, -2)
        for some in blocks(rows, 2):
            (gate, up), (grad_gate, grad_up) = rows[some].chunk(2, -1), out[some].chunk(2, -1)
            torch.ops.aten.silu_backward.grad_input(grads[some] * up, gate, grad_input=grad_gate)
            torch.ops.aten.silu.out(gate, out=grad_up).mul_(grads[some])
        return grad_wide
