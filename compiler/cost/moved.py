"""Bytes of values, and of what a transfer or a change of layout moves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from compiler.plan import Plan
from compiler.proof.wellformed import shape_of
from compiler.resharding.transitions import weight_transfer
from compiler.steps import HOME

WIDTH = {"f32": 4, "bool": 1, "tokens": 8, "text": 16}  # bytes of an element; a text is counted by 16 bytes a token
PROMPT = 64  # tokens, where nothing is assumed


@dataclass(frozen=True)
class Moved:
    """Bytes of one transfer: the most that a rank receives, what all receive, and what no plan could do without."""

    per_rank: float
    total: float
    lower_bound: float


@dataclass(frozen=True)
class Lengths:
    """Sizes of a plan's values under the lengths that it assumes."""

    plan: Plan

    def samples(self, dims: tuple[str, ...]) -> int:
        return math.prod(self.plan.dims[d].size for d in dims if not self.plan.dims[d].ragged)

    def response(self, dims: tuple[str, ...]) -> float:
        """Tokens of a response on average."""
        bound = self._bound(dims)
        return min(self.plan.assume.get("response", bound), bound)

    def longest(self, dims: tuple[str, ...]) -> float:
        return max(min(self.plan.assume.get("longest", 0), self._bound(dims)), self.response(dims))

    def _bound(self, dims: tuple[str, ...]) -> float:
        return next((self.plan.dims[d].size for d in dims if self.plan.dims[d].ragged), 1)

    @property
    def prompt(self) -> float:
        return self.plan.assume.get("prompt", PROMPT)

    def tokens(self, response: int) -> float:
        """Prompt and response tokens of all samples of a response (an id of an expression)."""
        dims = self.plan.exprs[response].dims
        return self.samples(dims) * (self.prompt + self.response(dims))

    def bytes(self, expr: int) -> float:
        row = self.plan.exprs[expr]
        if row.elem == "tokens":
            return self.tokens(expr) * WIDTH["tokens"]
        each = self.response(row.dims) if any(self.plan.dims[d].ragged for d in row.dims) else 1
        if row.elem == "text":
            each = self.prompt
        return self.samples(row.dims) * each * WIDTH[row.elem]


def moved(lengths: Lengths, step: Any) -> Moved:
    """Of a transfer of rows (over the iteration), or of weights."""
    plan = lengths.plan
    if step.op == "reshard":
        shape, role = shape_of(plan, step.model), plan.models[step.model].role
        transfer = weight_transfer(shape, role, plan.layouts, step.src, step.dst)
        most = max(transfer.bytes_received(r) for r in transfer.ranks)
        return Moved(most, transfer.total_bytes, transfer.lower_bound_bytes)
    parts = [_rows(lengths, step, v.expr) for v in step.values]
    return Moved(*(sum(getattr(p, f) for p in parts) for f in ("per_rank", "total", "lower_bound")))


def _rows(lengths: Lengths, step: Any, expr: int) -> Moved:
    """Rows go where tokens balance, so that a row stays where it is by chance: one in `world`.

    Out, every rank of a shard gets its rows (numbers: the last stage alone); home, each row leaves one rank.
    """
    plan, size = lengths.plan, lengths.bytes(expr)
    world = plan.world
    stays = 1 - 1 / world
    if step.dst == HOME:
        dp = plan.layouts[step.src].dp
        return Moved(size / world * stays, size * stays, size * (1 - dp / world))
    spec = plan.layouts[step.dst]
    ranks = spec.ranks if plan.exprs[expr].elem == "tokens" else spec.ranks // spec.pp
    share = size / spec.dp
    return Moved(share * stays, ranks * share * stays, max(ranks * (share - size / world), 0))
