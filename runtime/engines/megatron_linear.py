"""Megatron's linear layers; in 32 bits on a CPU their products are oneDNN's.

Where both were measured, of large products oneDNN took a tenth less time than torch for y = x W^T and for the gradient
of x, not for that of W. That one is added to Megatron's `main_grad` by the product itself, not as a tensor of its own.

oneDNN compiles a product for each number of rows, half a megabyte of code, and keeps the last of them. Packed
micro-batches all have their own: of the thousand that are usual a rank would grow by hundreds of megabytes.
"""

from __future__ import annotations

import os
from typing import Any, Optional

from runtime.engines import megatron_cpu  # noqa: F401  must precede megatron.core

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor


_LARGE = 1 << 26  # multiplications: with fewer, what oneDNN saves is less than the 4 ms that it compiles for
KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}  # oneDNN's products, and torch's of it
for _name, _count in KEPT.items():
    os.environ.setdefault(_name, _count)  # read at the first product


def linear(
    x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, group: Optional[dist.ProcessGroup] = None
) -> Tensor:
    """x [.., in], weight [out, in], bias [out] → x W^T + bias [.., out].

    group: of the ranks over which the gradient of x is summed
    """
    return _Linear.apply(x, weight, bias, group)


def native(x: Tensor) -> bool:
    """Whether `linear` is made for x."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()


class _Linear(torch.autograd.Function):
    """With g the gradient of y: dx = g W, dW = g^T x and the gradient of the bias is the sum of g."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Optional[Tensor], group: Optional[dist.ProcessGroup]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.main_grad = group, getattr(weight, "main_grad", None)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x, weight), grad, summing = ctx.saved_tensors, grad.contiguous(), None
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        grad_x = _product(grad, weight.t()) if wants_x else None
        if wants_x and ctx.group is not None:
            summing = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        rows, grad_weight = grad.flatten(0, -2), None
        if wants_weight and ctx.main_grad is not None:
            ctx.main_grad.addmm_(rows.t(), x.flatten(0, -2))
        elif wants_weight:
            grad_weight = rows.t() @ x.flatten(0, -2)
        grad_bias = rows.sum(0) if wants_bias else None
        if summing is not None:
            summing.wait()
        return grad_x, grad_weight, grad_bias, None


def _product(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    if x.numel() * weight.shape[0] < _LARGE:
        return torch.nn.functional.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Products:
    """Takes the products from Megatron's layers where `linear` is made for them."""

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Optional[Tensor] = None, *, allreduce_dgrad: bool = False,
        sequence_parallel: bool = False, tp_group: Optional[dist.ProcessGroup] = None, **others: Any,
    ) -> Tensor:
        if native(input) and not sequence_parallel:
            return linear(input, weight, bias, tp_group if allreduce_dgrad else None)
        return super()._forward_impl(
            input=input, weight=weight, bias=bias, allreduce_dgrad=allreduce_dgrad, sequence_parallel=sequence_parallel,
            tp_group=tp_group, **others)


class ColumnLinear(_Products, ColumnParallelLinear):
    """Cut over the outputs."""


class RowLinear(_Products, RowParallelLinear):
    """Cut over the inputs; the parts are summed."""
