"""From logits to tokens: temperature, top-k, top-p, and one uniform number a row.

A token is the inverse of the cumulative distribution in vocabulary order at the row's number, so equal logits and equal
numbers give equal tokens, whatever the batch. Exponentials are taken in f32 and summed in f64; what a temperature, top-k
or top-p does is computed in f64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_dsl.diagnostics import fault

_CHUNK = 1 << 23  # elements of f64 that one pass over the vocabulary works on


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are drawn.

    temperature: logits are divided by it; 0 takes the most likely token
    top_k: only the k most likely tokens, 0 = all; top_p: of those, the smallest set of the most likely whose total
    reaches p; 1 = all. Ties go to the lower id
    stop_ids: tokens that end a response and belong to it; stop_strings: texts that end it once it contains one of them
    min_tokens: no end before so many tokens; max_tokens: the bound
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0


def check_prompts(prompts: Sequence[np.ndarray], rows: np.ndarray, context: int) -> None:
    """Raises R0313 for a prompt that leaves a context of so many tokens no room, R0314 for one without tokens."""
    for prompt, row in zip(prompts, rows.tolist()):
        if not len(prompt):
            raise fault("R0314", row=row)
        if len(prompt) > context - 1:
            raise fault("R0313", row=row, tokens=len(prompt), context=context)


def completes_stop(tokens: np.ndarray, options: SamplingOptions, decode: Callable[[list[int]], str]) -> bool:
    """Whether the last token of a response completes a text of `options.stop_strings`, of which there is one."""
    # A token is at least a byte of text, so this many hold a stop text that ends in the last of them.
    tail = tokens[-max(len(s.encode()) for s in options.stop_strings) - 4:].tolist()
    before, after = decode(tail[:-1]), decode(tail)
    return any(after.count(s) > before.count(s) for s in options.stop_strings)


def choose(logits: Tensor, u: Tensor, options: SamplingOptions, may_end: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draws one token a row.

    logits: [n, V]; u: f64 [n] in [0, 1); may_end: bool [n], False forbids the end tokens in that row, None allows all
    Returns the tokens, int64 [n], and the log-probabilities at which they were drawn, f32 [n]: of the distribution
    after everything above, renormalised; at temperature 0 of the plain softmax of the logits.
    """
    rows = max(1, _CHUNK // logits.shape[1])
    if logits.shape[0] <= rows:
        return _choose(logits, u, options, may_end)
    ends = (None,) * -(-logits.shape[0] // rows) if may_end is None else may_end.split(rows)
    parts = [_choose(x, y, options, e) for x, y, e in zip(logits.split(rows), u.split(rows), ends)]
    return torch.cat([t for t, _ in parts]), torch.cat([p for _, p in parts])


def _choose(logits: Tensor, u: Tensor, options: SamplingOptions, may_end: Tensor | None) -> tuple[Tensor, Tensor]:
    allowed = logits if may_end is None else _forbid_ends(logits, options.stop_ids, may_end)
    if options.temperature == 0:
        plain, tokens = logits.double(), allowed.argmax(-1)
        return tokens, (_at(plain, tokens) - plain.logsumexp(-1)).float()
    if options.temperature != 1:
        allowed = allowed.double() / options.temperature
    if options.top_k or options.top_p < 1:
        allowed = keep_top_p(keep_top_k(allowed.double().log_softmax(-1), options.top_k), options.top_p)
    # One exponential serves the draw and the total: log_softmax would take another.
    shifted = allowed - allowed.amax(-1, keepdim=True)
    tokens, totals = invert(shifted.float().exp(), u)
    return tokens, (_at(shifted, tokens) - totals.log()).float()


def _at(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(-1, tokens[:, None])[:, 0]


def keep_top_k(logp: Tensor, k: int) -> Tensor:
    """Log-probabilities [n, V] of the k most likely tokens, renormalised; -inf elsewhere. k = 0 keeps all."""
    if not 0 < k < logp.shape[-1]:
        return logp
    least = logp.topk(k, dim=-1).values[:, -1:]
    above, ties = logp > least, logp == least
    room = k - above.sum(-1, keepdim=True)
    keep = above | ties & (ties.cumsum(-1) <= room)
    return logp.masked_fill(~keep, -torch.inf).log_softmax(-1)


def keep_top_p(logp: Tensor, p: float) -> Tensor:
    """Log-probabilities [n, V] of the smallest set of most likely tokens whose total reaches p, renormalised."""
    if p >= 1:
        return logp
    ordered, order = logp.sort(dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(-1).roll(1, -1)
    before[:, 0] = 0
    keep = torch.empty_like(before, dtype=torch.bool).scatter_(-1, order, before < p)
    return logp.masked_fill(~keep, -torch.inf).log_softmax(-1)


def invert(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """(the first index of each row whose cumulative weight exceeds u times the total, the totals).

    weights: [n, V]; u: f64 [n]. Returns int64 [n], f64 [n].
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    found = torch.searchsorted(cumulative, u[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total)  # rounding may lift u * total to the total itself
    return torch.minimum(found, last)[:, 0], total[:, 0]


def _forbid_ends(logits: Tensor, stop_ids: tuple[int, ...], may_end: Tensor) -> Tensor:
    ends, allowed = [i for i in stop_ids if i < logits.shape[1]], logits.clone()
    allowed[:, ends] = allowed[:, ends].masked_fill(~may_end[:, None], -torch.inf)
    return allowed
