"""Attention over short rows by plain products, for training in 32 bits on a CPU.

The fused kernel is made for long rows; over short ones it took a third longer, forward and backward together. Here the
probabilities are kept for the gradient, 4 bytes for each pair of tokens of a row and head.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from runtime.engines.blocks import blocks

_SHORT = 128  # tokens


def suits(query: Tensor, longest: int) -> bool:
    """Whether `attended` is made for these queries, in rows of up to `longest` tokens."""
    return query.requires_grad and query.device.type == "cpu" and query.dtype == torch.float32 and longest <= _SHORT


def attended(query: Tensor, key: Tensor, value: Tensor, mask: Optional[Tensor], scale: float) -> Tensor:
    """softmax(scale query key^T) value, as scaled_dot_product_attention gives it.

    query [rows, heads, longest, d], key and value [rows, kv heads, longest, d]
    mask: bool [longest, longest], which keys a query sees; None: all up to its own
    """
    seen = query.new_ones(query.shape[2], query.shape[2], dtype=torch.bool).tril_() if mask is None else mask
    bias = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
    return _Attention.apply(query, key, value, bias, scale)


class _Attention(torch.autograd.Function):
    """With P the probabilities, S the scores and g the gradient of P V: dV = P^T g, dP = g V^T,
    dS = P (dP - sum(P dP)), dQ = scale dS K and dK = scale dS^T Q.

    The query heads that share a key head are rows of one product, so its gradient comes summed over them. A few rows and
    heads at a time.
    """

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
        (rows, heads, longest, d), kv_heads = query.shape, key.shape[1]
        q, k, v = (x.reshape(rows * kv_heads, -1, d) for x in (query, key, value))
        bias = bias.repeat(heads // kv_heads, 1).unsqueeze(0)
        p, mixed = q.new_empty(*q.shape[:2], longest), torch.empty_like(q)
        for some in blocks(p.flatten(1), 2):
            scores = torch.baddbmm(bias, q[some], k[some].transpose(1, 2), alpha=scale)
            torch.softmax(scores, -1, out=p[some])
            torch.bmm(p[some], v[some], out=mixed[some])
        ctx.save_for_backward(q, k, v, p)
        ctx.scale, ctx.rows = scale, rows
        return mixed.view(rows, heads, longest, d)

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, p = ctx.saved_tensors
        grad = grad.reshape(q.shape)
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        for some in blocks(p.flatten(1), 2):
            torch.bmm(p[some].transpose(1, 2), grad[some], out=grad_v[some])
            grad_p = torch.bmm(grad[some], v[some].transpose(1, 2))
            scores = torch.ops.aten._softmax_backward_data(grad_p, p[some], -1, p.dtype)
            torch.baddbmm(q[some], scores, k[some], beta=0, alpha=ctx.scale, out=grad_q[some])
            torch.baddbmm(k[some], scores.transpose(1, 2), q[some], beta=0, alpha=ctx.scale, out=grad_k[some])
        longest, d = k.shape[1:]
        return *(x.view(ctx.rows, -1, longest, d) for x in (grad_q, grad_k, grad_v)), None, None
