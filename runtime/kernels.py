"""One table: a primitive's name to the function that computes it on packed values.

A kernel is `kernel(context, expr, values) -> Tensor`, flat over `expr.type.dims`. Conventions:
- arithmetic is in `context.dtype`, booleans count as 0 and 1; gradients are torch's
- ties of minimum and maximum share the gradient equally; clip passes at its bounds; abs and sqrt have gradient 0 at 0
  (that of sqrt is infinite there: 0 is the choice that keeps `std`-like formulas finite)
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_dsl.typed import Expr
from runtime.context import Context
from runtime.ragged import discounted_sum, following
from runtime.reductions import REDUCTIONS, zero_safe_sqrt
from runtime.values import Value

Kernel = Callable[[Context, Expr, list[Value]], Tensor]


# ---- elementwise -----------------------------------------------------------------------------------

def _pow(x: Tensor, y: Tensor) -> Tensor:
    # A number as exponent takes torch's fast paths (x * x for 2).
    return x.pow(y.item()) if y.numel() == 1 and not y.requires_grad else x.pow(y)


def _extreme(pair: Callable, many: Callable) -> Callable:
    def kernel(*values: Tensor) -> Tensor:
        if len(values) == 2:
            return pair(*values)
        # Folding pairs would give three equal values 1/2, 1/4, 1/4 of the gradient.
        return many(torch.stack(torch.broadcast_tensors(*values)), 0)

    return kernel


ARITHMETIC: dict[str, Callable] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": _pow,
    "neg": torch.neg,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": zero_safe_sqrt,
    "abs": torch.abs,
    "sign": torch.sign,
    "sigmoid": torch.sigmoid,
    "log_sigmoid": logsigmoid,
    "minimum": _extreme(torch.minimum, torch.amin),
    "maximum": _extreme(torch.maximum, torch.amax),
    "clip": torch.clamp,
}

COMPARISONS: dict[str, Callable] = {
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}

LOGIC: dict[str, Callable] = {
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
}


def _arithmetic(fn: Callable) -> Kernel:
    def kernel(context: Context, expr: Expr, values: list[Value]) -> Tensor:
        return fn(*[context.numbers(v, expr.type.dims) for v in values])

    return kernel


def _comparison(fn: Callable) -> Kernel:
    def kernel(context: Context, expr: Expr, values: list[Value]) -> Tensor:
        if isinstance(values[0].data, list):
            left, right = (context.texts(v, expr.type.dims) for v in values)
            return torch.tensor([a == b for a, b in zip(left, right)], dtype=torch.bool) ^ (expr.op == "ne")
        return fn(*[context.numbers(v, expr.type.dims).detach() for v in values])

    return kernel


def _logic(fn: Callable) -> Kernel:
    def kernel(context: Context, expr: Expr, values: list[Value]) -> Tensor:
        return fn(*[context.truths(v, expr.type.dims) for v in values])

    return kernel


def _where(context: Context, expr: Expr, values: list[Value]) -> Tensor:
    condition = context.truths(values[0], expr.type.dims)
    take = context.spread if expr.type.elem == "bool" else context.numbers
    return torch.where(condition, take(values[1], expr.type.dims), take(values[2], expr.type.dims))


def _stop(context: Context, expr: Expr, values: list[Value]) -> Tensor:
    return values[0].data.detach()


# ---- along a ragged dim ----------------------------------------------------------------------------

def _next(context: Context, expr: Expr, values: list[Value]) -> Tensor:
    return following(context.numbers(values[0], expr.type.dims), context.frame.remaining(expr.type.dims))


def _togo(context: Context, expr: Expr, values: list[Value]) -> Tensor:
    dims = expr.type.dims
    x, d = (context.numbers(v, dims) for v in values)
    return discounted_sum(x, d, context.frame.remaining(dims), context.frame.longest(dims))


def _at_end(context: Context, expr: Expr, values: list[Value]) -> Tensor:
    dims = expr.type.dims
    return torch.where(context.frame.remaining(dims) == 0, context.numbers(values[0], dims), 0)


def _length(context: Context, expr: Expr, values: list[Value]) -> Tensor:
    return context.frame.row_lengths(values[0].dims).to(context.dtype)


KERNELS: dict[str, Kernel] = {
    **{op: _arithmetic(fn) for op, fn in ARITHMETIC.items()},
    **{op: _comparison(fn) for op, fn in COMPARISONS.items()},
    **{op: _logic(fn) for op, fn in LOGIC.items()},
    "where": _where,
    "stop": _stop,
    "next": _next,
    "togo": _togo,
    "at_end": _at_end,
    "length": _length,
    **REDUCTIONS,
}
