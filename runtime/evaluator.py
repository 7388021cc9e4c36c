"""Evaluates graphs of checked expressions on the rows that live here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Iterable, MutableMapping, Optional

import torch
from torch import Tensor

from rlhf_dsl.typed import Expr
from runtime.context import Context
from runtime.guarded import Guarded
from runtime.kernels import ARITHMETIC, KERNELS
from runtime.reducers import Reducer
from runtime.reductions import REDUCTIONS
from runtime.values import Frame, Value

Env = MutableMapping[Expr, Value]


@dataclass(frozen=True)
class NotFinite:
    """The first element of a value that is not finite. place: coordinate by dim (of a root dim the global row)."""

    number: float
    place: dict[str, int]


class Evaluator:
    """Equations over one frame.

    dtype: of the arithmetic, torch.float64 or float32
    keeps: index of a keep (from 1) -> its condition, a bool value over the frame
    partial: the frame is a micro-batch of an update. A reduction of trained outputs over a root dim is then the local
        sum (only `sum` may be asked for), and every other reduction over a root dim must be known in `env`, since it
        is a statistic of the whole mini-batch.
    """

    def __init__(self, frame: Frame, reducer: Reducer, dtype: torch.dtype = torch.float64,
                 keeps: Optional[dict[int, Value]] = None, partial: bool = False) -> None:
        self.context = Context(frame, reducer, dtype, dict(keeps or {}), partial)

    def evaluate(self, expr: Expr, env: Env) -> Value:
        """The value of `expr`. `env` holds the leaves; what is found on the way is added to it, so it is found once.

        Collective where a root dim is reduced: every shard evaluates the same expressions in the same order.
        """
        order = _pending(expr, env)
        guarded = self._guarded(order) if torch.is_grad_enabled() else frozenset()
        for node in order:
            env[node] = self._apply(node, [env[arg] for arg in node.args], node in guarded)
        return env[expr]

    def check_finite(self, value: Value, keep: int = 0) -> Optional[NotFinite]:
        """The first place where a number is NaN or infinite, among the rows that keeps 1..`keep` leave; else None."""
        data = value.data
        if not isinstance(data, Tensor) or not data.is_floating_point():
            return None
        # One pass over finite data: a sum is finite only if its terms are.
        if math.isfinite(data.detach().sum(dtype=torch.float64).item()):
            return None
        wrong = ~data.detach().isfinite()
        kept = self.context.kept(keep, value.dims)
        places = (wrong if kept is None else wrong & kept).nonzero()
        if not places.numel():
            return None
        first = int(places[0])
        return NotFinite(float(data[first]), self.context.frame.place(value.dims, first))

    def _apply(self, expr: Expr, values: list[Value], guarded: bool) -> Value:
        dims = expr.type.dims
        if expr.op == "const":
            return constant(expr.attr("value"), self.context.dtype)
        if expr.op not in KERNELS:
            raise RuntimeError(f"`{expr.op}` ({_name(expr)}) must be known before equations are evaluated")
        if expr.op in REDUCTIONS:
            self._check_reduction(expr, values)
        if guarded and any(v.data.requires_grad for v in values):
            return Value(dims, Guarded.apply(ARITHMETIC[expr.op], *(self.context.full(v, dims) for v in values)))
        data = KERNELS[expr.op](self.context, expr, values)
        return Value(dims, data if data.dtype in (torch.bool, self.context.dtype) else data.to(self.context.dtype))

    def _check_reduction(self, expr: Expr, values: list[Value]) -> None:
        frame, over = self.context.frame, expr.attr("over")
        if not self.context.partial:
            return
        if not frame.roots(over):
            lost = [d for d in over if d in frame.folded]
            if lost:
                raise RuntimeError(f"`{expr.op}` over {lost} in a micro-batch of single samples")
            return
        if expr.op != "sum" or not expr.grad:
            raise RuntimeError(f"`{expr.op}` over {over} must be known before a micro-batch is evaluated")
        if not set(frame.folded) <= set(values[0].dims):
            raise RuntimeError(f"`sum` over {over} would count rows once for each sample of theirs")

    def _guarded(self, order: list[Expr]) -> frozenset:
        """Arithmetic under a mask: in a branch of `where`, or below a reduction of which not every element is part."""
        under: set[Expr] = set()
        for node in reversed(order):
            masked = () if not node.grad else self._masked_args(node, node in under)
            under.update(arg for arg in masked if arg.grad)
        return frozenset(node for node in under if node.op in ARITHMETIC)

    def _masked_args(self, node: Expr, under: bool) -> Iterable[Expr]:
        if under:
            return node.args
        if node.op == "where":
            return node.args[1:]
        if node.op not in REDUCTIONS:
            return ()
        has_where = len(node.args) > (2 if node.op == "quantile" else 1)
        dropped = self.context.kept(node.attr("keep", 0), node.args[0].type.dims) is not None
        return node.args[:1] if has_where or dropped else ()


def constant(value: Any, dtype: torch.dtype) -> Value:
    """A scalar value of a Python number, bool or str."""
    if isinstance(value, str):
        return Value((), [value])
    return Value((), torch.tensor([value], dtype=torch.bool if isinstance(value, bool) else dtype))


def _pending(root: Expr, env: Env) -> list[Expr]:
    """What must be evaluated for `root`, arguments first. Without recursion: graphs may be deep."""
    order: list[Expr] = []
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif node not in seen and node not in env:
            seen.add(node)
            stack.append((node, True))
            if node.op in KERNELS:
                stack.extend((arg, False) for arg in reversed(node.args))
    return order


def _name(expr: Expr) -> str:
    return ".".join(str(value) for key, value in expr.attrs if key in ("name", "model", "column", "operation", "field"))
