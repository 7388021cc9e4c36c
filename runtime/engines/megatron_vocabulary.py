"""Log-probabilities and entropies of logits whose vocabulary is cut over tensor-parallel ranks.

A few rows at a time, which stay in a core's cache: logits are read once, and nothing else of their size is ever there,
as their gradient takes their place.
"""

from __future__ import annotations

from typing import Iterator, Optional

import torch
import torch.distributed as dist
from torch import Tensor


PADDING = -1e30  # a logit whose probability is 0, finite so that products with it are
_BLOCK = {"cpu": 1 << 17, "cuda": 1 << 27}  # numbers of a block


def logprobs_and_entropy(
    logits: Tensor, targets: Tensor, vocab: int, temperature: float, group: dist.ProcessGroup, with_entropy: bool
) -> tuple[Tensor, Optional[Tensor]]:
    """Of softmax(logits / temperature), in 32 bits, without gathering logits; differentiable in both results.

    logits: [k, padded vocabulary / tp], this rank's columns, of which those from `vocab` on are padding
    targets: int64 [k], the same on all ranks of `group`; temperature 0 leaves logits unscaled
    Returns f32 [k] log-probabilities of the targets and, if `with_entropy`, f32 [k] entropies.
    """
    scale = 1.0 / temperature if temperature else 1.0
    real = max(vocab - logits.shape[1] * group.rank(), 0)
    logprobs, entropy = _Distribution.apply(logits, targets, real, scale, group, with_entropy)
    return logprobs, entropy if with_entropy else None


class _Distribution(torch.autograd.Function):
    """With z = logits / temperature, p = softmax(z), H the entropy and y the target:
    d logprob / dz_j = [j = y] - p_j and dH / dz_j = -p_j (log p_j + H). real: columns that are no padding

    Nobody else may need the logits for a gradient: backward writes over them.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, real: int, scale: float, group, with_entropy: bool):
        column, here = _local(targets, logits.shape[1], group)
        top = logits.new_empty(len(logits), dtype=torch.float32)
        sums = top.new_zeros(3 if with_entropy else 2, len(logits))
        for rows, z in _blocks(logits, real, scale):
            torch.amax(z, -1, out=top[rows])
            z.sub_(top[rows].unsqueeze(1))
            sums[1, rows] = z.gather(1, column[rows]).squeeze(1)
            if with_entropy:
                exp = z.exp()
                torch.sum(z.mul_(exp), -1, out=sums[2, rows])
            else:
                exp = z.exp_()
            torch.sum(exp, -1, out=sums[0, rows])
        top = _joined(top, sums, here, group)
        log_total = sums[0].log()
        entropy = log_total - sums[2] / sums[0] if with_entropy else top.new_empty(0)
        ctx.save_for_backward(logits, top, log_total, column, here, entropy)
        ctx.real, ctx.scale, ctx.with_entropy = real, scale, with_entropy
        return sums[1] - log_total, entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor):
        logits, top, log_total, column, here, entropy = ctx.saved_tensors
        own = (grad_logprobs * here).mul_(ctx.scale).unsqueeze(1)
        factor = grad_logprobs.mul(-ctx.scale).unsqueeze(1)
        for rows, z in _blocks(logits, ctx.real, ctx.scale):
            z.sub_(top[rows].unsqueeze(1)).sub_(log_total[rows].unsqueeze(1))  # log p
            p = z.exp() if ctx.with_entropy else z.exp_()
            if ctx.with_entropy:
                weight = (grad_entropy[rows] * -ctx.scale).unsqueeze(1)
                p.mul_(z.add_(entropy[rows].unsqueeze(1)).mul_(weight).add_(factor[rows]))
            else:
                p.mul_(factor[rows])
            logits[rows] = p.scatter_add_(1, column[rows], own[rows])
        return logits, None, None, None, None, None


def _blocks(logits: Tensor, real: int, scale: float) -> Iterator[tuple[slice, Tensor]]:
    """Some rows at a time and their z, f32 [rows, columns], in memory that the next rows get again."""
    count, width = logits.shape
    size = max(1, min(count, _BLOCK.get(logits.device.type, count * width) // width))
    room = logits.new_empty(size, width, dtype=torch.float32)
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        z = room[:rows.stop - start].copy_(logits[rows])
        if scale != 1:
            z.mul_(scale)
        z[:, real:] = PADDING
        yield rows, z


def _joined(top: Tensor, sums: Tensor, here: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The top of all ranks, relative to which `sums` become those of all ranks.

    sums: of exp(z - top), of z - top of the target, and perhaps of (z - top) exp(z - top)
    """
    if group.size() == 1:
        return top
    whole = top.clone()
    dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
    lower = top - whole
    sums[1].add_(lower).mul_(here)
    if len(sums) == 3:
        sums[2].add_(sums[0] * lower)
    sums[[0, *range(2, len(sums))]] *= lower.exp()
    dist.all_reduce(sums, group=group)
    return whole


def _local(targets: Tensor, width: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Column of each target here, int64 [k, 1] (0 if elsewhere), and f32 [k], 1 where it is here."""
    column = targets - width * group.rank()
    here = (column >= 0) & (column < width)
    return torch.where(here, column, 0).unsqueeze(1), here.float()
