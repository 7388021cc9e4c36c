"""Reductions over named dims: of real, own tokens and kept rows alone, over all shards if a root dim is reduced.

A shard reduces its own elements; what it finds is joined through the reducer. Denominators are counts of elements that
take part, so no result depends on how rows are spread. Of nothing, every reduction but `all` is 0 (false).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Optional

import torch
from torch import Tensor

from rlhf_dsl.typed import Expr
from runtime.context import Context
from runtime.ragged import (
    segment_argmax, segment_extreme, segment_quantile, segment_rank, segment_sum,
)
from runtime.values import Dims, Value


@dataclass(frozen=True)
class Segments:
    """The elements of `dims` that a reduction sorts into one segment for each element of `rest`.

    seg: int64, the segment of each element, None: there is one; n: number of segments
    part: bool, which elements take part, None: all
    crosses: other shards have elements of the same segments
    """

    context: Context
    dims: Dims
    rest: Dims
    seg: Optional[Tensor]
    n: int
    part: Optional[Tensor]
    crosses: bool

    @staticmethod
    def of(context: Context, expr: Expr, value: Value, where: Optional[Value]) -> "Segments":
        dims = value.dims if where is None or set(where.dims) <= set(value.dims) else where.dims
        over = expr.attr("over")
        rest = tuple(d for d in dims if d not in over)
        frame = context.frame
        part = context.kept(expr.attr("keep", 0), dims)
        if where is not None:
            chosen = context.truths(where, dims)
            part = chosen.expand(frame.numel(dims)) if part is None else part & chosen
        seg = frame.index(rest, dims) if rest else None
        crosses = bool(frame.roots(over)) and not context.partial and context.reducer.size > 1
        return Segments(context, dims, rest, seg, frame.numel(rest), part, crosses)

    def numbers(self, value: Value) -> Tensor:
        return self.context.full(value, self.dims)

    def masked(self, x: Tensor, fill: float) -> Tensor:
        return x if self.part is None else torch.where(self.part, x, fill)

    def back(self, per_segment: Tensor) -> Tensor:
        """[n] or one value to each element of a segment."""
        return per_segment if self.seg is None else per_segment.index_select(0, self.seg)

    def local_sum(self, x: Tensor) -> Tensor:
        """Of elements that are 0 where they take no part."""
        return segment_sum(x, self.seg, self.n)

    def sum(self, x: Tensor) -> Tensor:
        total = self.local_sum(x)
        return self.context.reducer.all_reduce(total, "sum") if self.crosses else total

    def local_counts(self) -> Tensor:
        """[n] in the arithmetic's type: elements here that take part."""
        frame, dtype = self.context.frame, self.context.dtype
        if self.part is not None:
            return self.local_sum(self.part.to(dtype))
        ones = torch.ones(1, dtype=dtype).expand(frame.numel(self.dims))
        return frame.memo(("counts", self.rest, self.dims, dtype), lambda: self.local_sum(ones))

    def counts(self) -> Tensor:
        counts = self.local_counts()
        return self.context.reducer.all_reduce(counts, "sum") if self.crosses else counts


def zero_safe_sqrt(x: Tensor) -> Tensor:
    """sqrt with gradient 0 at 0."""
    if not x.requires_grad:
        return x.sqrt()
    zero = x == 0
    return x.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


# ---- sums and moments ------------------------------------------------------------------------------

def _sum(segments: Segments, expr: Expr, value: Value) -> Tensor:
    return segments.sum(segments.masked(segments.numbers(value), 0))


def _mean(segments: Segments, expr: Expr, value: Value) -> Tensor:
    counts, mean = _local_mean(segments, segments.numbers(value))
    return _joined_moments(segments, counts, mean, torch.zeros_like(mean))[1]


def _std(segments: Segments, expr: Expr, value: Value) -> Tensor:
    x = segments.numbers(value)
    counts, mean = _local_mean(segments, x)
    # The mean as a constant: deviations sum to 0, so its own gradient adds nothing.
    deviation = segments.masked(x - segments.back(mean.detach()), 0)
    counts, _, squares = _joined_moments(segments, counts, mean, segments.local_sum(deviation * deviation))
    freedom = counts - 1 if expr.attr("unbiased", True) else counts
    return zero_safe_sqrt(squares / freedom.clamp(min=1))


def _local_mean(segments: Segments, x: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and means of the elements here, around the least value: that of equal values is exactly their value."""
    least = segment_extreme(segments.masked(x.detach(), float("inf")), segments.seg, segments.n, "amin")
    least = least.nan_to_num(0, 0, 0)
    counts = segments.local_counts()
    total = segments.local_sum(segments.masked(x - segments.back(least), 0))
    return counts, least + total / counts.clamp(min=1)


def _joined_moments(segments: Segments, counts: Tensor, mean: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, means and sums of squared deviations over all shards from those of each, in 64 bit.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979, around
    the least of the shards' means: equal values stay exact.
    """
    if not segments.crosses:
        return counts, mean, squares
    table = segments.context.reducer.all_gather(torch.stack([counts, mean, squares]).double())
    counts_s, means_s, squares_s = table.unbind(1)
    counts = counts_s.sum(0)
    base = means_s.masked_fill(counts_s == 0, float("inf")).amin(0).nan_to_num(0, 0, 0)
    mean = base + (counts_s * (means_s - base)).sum(0) / counts.clamp(min=1)
    squares = (squares_s + counts_s * (means_s - mean) ** 2).sum(0)
    dtype = segments.context.dtype
    return counts.to(dtype), mean.to(dtype), squares.to(dtype)


# ---- extremes, counts, truths ----------------------------------------------------------------------

def _max(segments: Segments, expr: Expr, value: Value) -> Tensor:
    return _greatest(segments, segments.numbers(value))


def _min(segments: Segments, expr: Expr, value: Value) -> Tensor:
    return -_greatest(segments, -segments.numbers(value))


def _greatest(segments: Segments, x: Tensor) -> Tensor:
    top = segment_extreme(segments.masked(x, float("-inf")), segments.seg, segments.n, "amax")
    some = segments.local_counts() > 0
    if segments.crosses:
        top, some = segments.context.reducer.all_reduce(torch.stack([top, some.to(top.dtype)]), "max")
    return torch.where(some > 0, top, 0)


def _count(segments: Segments, expr: Expr, value: Value) -> Tensor:
    if not isinstance(value.data, Tensor) or value.data.dtype != torch.bool:
        return segments.counts()
    return segments.sum(segments.masked(segments.numbers(value), 0))


def _any(segments: Segments, expr: Expr, value: Value) -> Tensor:
    return segments.sum(segments.masked(segments.numbers(value) != 0, False).long()) > 0


def _all(segments: Segments, expr: Expr, value: Value) -> Tensor:
    return segments.sum(segments.masked(segments.numbers(value) == 0, False).long()) == 0


# ---- order statistics ------------------------------------------------------------------------------

@dataclass(frozen=True)
class _Gathered:
    """All elements of the segments in the global order of rows. own: which of them stand here, in the local order."""

    x: Tensor
    seg: Tensor
    part: Tensor
    own: Tensor


def _gathered(segments: Segments, x: Tensor) -> _Gathered:
    frame, n = segments.context.frame, x.numel()
    seg = torch.zeros(n, dtype=torch.int64) if segments.seg is None else segments.seg
    part = torch.ones(n, dtype=torch.bool) if segments.part is None else segments.part
    roots = [d for d in frame.roots(segments.dims) if d not in segments.rest]
    if not roots:
        return _Gathered(x, seg, part, torch.arange(n))
    index = frame.index((roots[0],), segments.dims)
    rows = frame.rows[roots[0]] if index is None else frame.rows[roots[0]][index]
    local = torch.stack([x.double(), seg.double(), part.double(), rows.double()], 1)
    shards = segments.context.reducer.all_gather_rows(local) if segments.crosses else [local]
    table = torch.cat(shards)
    order = table[:, 3].argsort(stable=True)
    rank = segments.context.reducer.rank if segments.crosses else 0
    start = sum(shard.shape[0] for shard in shards[:rank])
    own = torch.empty_like(order)
    own[order] = torch.arange(order.numel())
    x_sorted, seg_sorted, part_sorted, _ = table[order].unbind(1)
    return _Gathered(x_sorted, seg_sorted.long(), part_sorted > 0, own[start:start + n])


def _argmax(segments: Segments, expr: Expr, value: Value) -> Tensor:
    """Of a root dim: the place among all rows in ascending global order."""
    g = _gathered(segments, segments.numbers(value).detach())
    return segment_argmax(g.x, g.seg, segments.n, g.part)


def _rank(segments: Segments, expr: Expr, value: Value) -> Tensor:
    """From 0, the number of values that take part and are less: equal values share it."""
    g = _gathered(segments, segments.numbers(value).detach())
    return segment_rank(g.x, g.seg, g.part)[g.own]


def _quantile(segments: Segments, expr: Expr, value: Value, q: Value) -> Tensor:
    g = _gathered(segments, segments.numbers(value))
    level = segments.context.numbers(q, segments.rest).to(g.x.dtype)
    return segment_quantile(g.x, g.seg, segments.n, g.part, level)


def _kernel(reduce: Callable, operands: int = 1) -> Callable:
    """operands: arguments before the optional `where`."""
    def kernel(context: Context, expr: Expr, values: list[Value]) -> Tensor:
        where = values[operands] if len(values) > operands else None
        segments = Segments.of(context, expr, values[0], where)
        return reduce(segments, expr, *values[:operands])

    return kernel


REDUCTIONS: dict[str, Callable] = {
    "sum": _kernel(_sum),
    "mean": _kernel(_mean),
    "std": _kernel(_std),
    "max": _kernel(_max),
    "min": _kernel(_min),
    "argmax": _kernel(_argmax),
    "rank": _kernel(_rank),
    "quantile": _kernel(_quantile, 2),
    "count": _kernel(_count),
    "any": _kernel(_any),
    "all": _kernel(_all),
}
