"""Tensor algorithms on packed data: segments (`seg[i]` is the segment of element i, in any order) and rows of tokens.

`seg` None means that everything is one segment. Elements that take no part are told by `part` (bool, None: all do).
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor


def grid_index(shape: tuple[int, ...], parts: list[Tensor]) -> Tensor:
    """int64 [product of shape]: at coordinates (i, j, ..), row-major, parts[0][i] + parts[1][j] + ..; [0] of none."""
    total = torch.zeros((1,) * len(shape), dtype=torch.int64)
    for axis, part in enumerate(parts):
        total = total + part.view([shape[axis] if a == axis else 1 for a in range(len(shape))])
    return total.flatten()


# ---- segments --------------------------------------------------------------------------------------

def segment_sum(x: Tensor, seg: Optional[Tensor], n: int) -> Tensor:
    """[n] sums; of nothing 0."""
    if seg is None:
        return x.sum().view(1)
    return x.new_zeros(n).scatter_add(0, seg, x)


def segment_extreme(x: Tensor, seg: Optional[Tensor], n: int, op: str) -> Tensor:
    """[n] "amin" or "amax"; of nothing inf or -inf. Ties share the gradient equally."""
    empty = float("inf" if op == "amin" else "-inf")
    if seg is None and x.numel():
        return getattr(torch, op)(x).view(1)
    init = x.new_full((n,), empty)
    return init if seg is None else init.scatter_reduce(0, seg, x, op)


def segment_starts(sorted_seg: Tensor) -> Tensor:
    """int64 [k]: for each element of ascending `sorted_seg`, where its run of equal numbers begins."""
    at = torch.arange(sorted_seg.numel())
    begins = torch.ones_like(sorted_seg, dtype=torch.bool)
    begins[1:] = sorted_seg[1:] != sorted_seg[:-1]
    return torch.where(begins, at, 0).cummax(0).values


def segment_order(x: Tensor, seg: Tensor) -> Tensor:
    """int64: positions by segment, within a segment by value, equal values as they stand."""
    order = x.argsort(stable=True)
    return order[seg[order].argsort(stable=True)]


def segment_rank(x: Tensor, seg: Tensor, part: Tensor) -> Tensor:
    """int64: for each element, how many that take part are less than it; equal values share the number."""
    order = segment_order(x, seg)
    seg_sorted, x_sorted, part_sorted = seg[order], x[order], part[order].long()
    before = part_sorted.cumsum(0) - part_sorted
    changes = torch.zeros_like(seg_sorted)
    changes[1:] = (seg_sorted[1:] != seg_sorted[:-1]) | (x_sorted[1:] != x_sorted[:-1])
    ties = segment_starts(changes.cumsum(0))
    rank = torch.empty_like(order)
    rank[order] = before[ties] - before[segment_starts(seg_sorted)]
    return rank


def segment_argmax(x: Tensor, seg: Tensor, n: int, part: Tensor) -> Tensor:
    """int64 [n]: the place of the first greatest among a segment's elements, counting all of them; of nothing 0."""
    top = segment_extreme(x.masked_fill(~part, float("-inf")), seg, n, "amax")
    order = seg.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel()) - segment_starts(seg[order])
    nowhere = torch.iinfo(torch.int64).max
    hits = torch.where(part & (x == top[seg]), place, nowhere)
    first = torch.full((n,), nowhere).scatter_reduce(0, seg, hits, "amin")
    return torch.where(first == nowhere, 0, first)


def segment_quantile(x: Tensor, seg: Tensor, n: int, part: Tensor, q: Tensor) -> Tensor:
    """[n]: linear between the two nearest order statistics, at q (count - 1) (numpy's default); of nothing 0.

    q: [1] or [n], held within 0 and 1. Differentiable in x.
    """
    seg = torch.where(part, seg, n)
    ordered = x[segment_order(x.detach(), seg)]
    ordered = torch.cat([ordered, ordered.new_zeros(1)])
    counts = torch.bincount(seg, minlength=n + 1)[:n]
    starts = counts.cumsum(0) - counts
    at = q.clamp(0, 1) * (counts - 1).clamp(min=0)
    low = at.floor()
    lower, upper = ordered[starts + low.long()], ordered[starts + at.ceil().long()]
    return torch.where(counts > 0, lower + (upper - lower) * (at - low), 0)


# ---- along rows of tokens --------------------------------------------------------------------------

def following(x: Tensor, remaining: Tensor, k: int = 1) -> Tensor:
    """The value k tokens later in the same row, 0 where there is none. remaining: tokens that follow in the row."""
    return torch.where(remaining >= k, x.roll(-k), 0)


def discounted_sum(x: Tensor, d: Tensor, remaining: Tensor, longest: int) -> Tensor:
    """A_t = x_t + d_t A_{t+1} in each row, A = 0 after its end. d: like x, or [1].

    Doubling (Hillis and Steele, CACM 1986): after step k each element covers the next 2^k tokens, so the longest row
    (`longest` tokens) takes log2 of it many steps of whole-tensor arithmetic.
    """
    reach = 1
    while reach < longest:
        x = x + d * following(x, remaining, reach)
        d = d * d if d.numel() == 1 else d * following(d, remaining, reach)
        reach *= 2
    return x
