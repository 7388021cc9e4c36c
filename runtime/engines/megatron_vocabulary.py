"""Log-probabilities and entropies of logits whose vocabulary is cut over tensor-parallel ranks."""

from __future__ import annotations

from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor


PADDING = -1e30  # a logit whose probability is 0, finite so that products with it are


def logprobs_and_entropy(
    logits: Tensor, targets: Tensor, vocab: int, temperature: float, group: dist.ProcessGroup, with_entropy: bool
) -> tuple[Tensor, Optional[Tensor]]:
    """Of softmax(logits / temperature), in 32 bits, without gathering logits; differentiable in both results.

    logits: [k, padded vocabulary / tp], this rank's columns, of which those from `vocab` on are padding
    targets: int64 [k], the same on all ranks of `group`; temperature 0 leaves logits unscaled
    Returns f32 [k] log-probabilities of the targets and, if `with_entropy`, f32 [k] entropies.
    """
    scale = 1.0 / temperature if temperature else 1.0
    logprobs, entropy = _Distribution.apply(logits, targets, vocab, scale, group, with_entropy)
    return logprobs, entropy if with_entropy else None


class _Distribution(torch.autograd.Function):
    """With z = logits / temperature, p = softmax(z), H the entropy and y the target:
    d logprob / dz_j = [j = y] - p_j and dH / dz_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, vocab: int, scale: float, group, with_entropy: bool):
        z = logits.float() * scale
        z[:, max(vocab - z.shape[1] * group.rank(), 0):] = PADDING
        top = z.amax(-1, keepdim=True)
        if group.size() > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        z.sub_(top)
        column, here = _local(targets, z.shape[1], group)
        exp = z.exp()
        sums = [exp.sum(-1), z.gather(1, column).squeeze(1) * here]
        if with_entropy:
            sums.append(exp.mul_(z).sum(-1))
        sums = torch.stack(sums)
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        log_total = sums[0].log()
        entropy = log_total - sums[2] / sums[0] if with_entropy else sums.new_empty(0)
        ctx.save_for_backward(z.sub_(log_total.unsqueeze(1)), column, here, entropy)
        ctx.scale, ctx.with_entropy, ctx.dtype = scale, with_entropy, logits.dtype
        return sums[1] - log_total, entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor):
        log_p, column, here, entropy = ctx.saved_tensors
        if ctx.with_entropy:
            inner = torch.addcmul(grad_logprobs.unsqueeze(1), grad_entropy.unsqueeze(1), log_p + entropy.unsqueeze(1))
            grad = log_p.exp().mul_(inner.neg_())
        else:
            grad = log_p.exp().mul_(-grad_logprobs.unsqueeze(1))
        grad.scatter_add_(1, column, (grad_logprobs * here).unsqueeze(1))
        return grad.mul_(ctx.scale).to(ctx.dtype), None, None, None, None, None


def _local(targets: Tensor, width: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Column of each target here, int64 [k, 1] (0 if elsewhere), and f32 [k], 1 where it is here."""
    column = targets - width * group.rank()
    here = (column >= 0) & (column < width)
    return torch.where(here, column, 0).unsqueeze(1), here.float()
