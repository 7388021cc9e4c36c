"""The gated MLP of a Llama-like layer (SwiGLU, arXiv 2002.05202) in few passes over its activations."""

from __future__ import annotations

from typing import Any, Optional

from runtime.engines import megatron_cpu  # noqa: F401  must precede megatron.core

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

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
    """Both gradients are written into one tensor."""

    @staticmethod
    def forward(ctx, wide: Tensor) -> Tensor:
        ctx.save_for_backward(wide)
        gate, up = wide.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (wide,) = ctx.saved_tensors
        gate, up = wide.chunk(2, -1)
        grad_wide = torch.empty_like(wide)
        grad_gate, grad_up = grad_wide.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        torch.ops.aten.silu.out(gate, out=grad_up).mul_(grad)
        return grad_wide
