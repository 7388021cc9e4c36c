"""Elementwise arithmetic under a mask: where no gradient arrives none leaves, even if the derivative is not finite.

`where(x > 0, log(x), 0)` ignores `log` at 0, but the chain rule would multiply its gradient 0 by infinity.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor


class Guarded(torch.autograd.Function):
    """`fn(*inputs)` of inputs of equal size, elementwise."""

    @staticmethod
    def forward(ctx, fn: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
            ctx.result = fn(*ctx.inputs)
        return ctx.result.detach()

    @staticmethod
    def backward(ctx, grad: Tensor):
        wanted = [x for x in ctx.inputs if x.requires_grad]
        found = iter(torch.autograd.grad(ctx.result, wanted, grad))
        nothing = grad == 0
        return None, *(next(found).masked_fill(nothing, 0) if x.requires_grad else None for x in ctx.inputs)
