"""What the language says of a response that was sampled, and whether one is that: plain loops over logits."""

from __future__ import annotations

from typing import Any, Callable, Optional

import numpy as np
import torch

from runtime.engines.base import Engine
from runtime.engines.sampling import SamplingOptions
from runtime.sequences import Sequences

TEXT = {i: chr(ord("a") + i % 26) for i in range(200)}
ROWS_A_FORWARD = 512
# (prompt, response) to f64 [token, vocabulary]: what each token was drawn by, up to a constant
Logits = Callable[[list[int], list[int]], np.ndarray]


def of_hugging_face(model: Any) -> Logits:
    def logits(prompt: list[int], tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1:-1].double().numpy()

    return logits


def of_training(engine: Engine, vocabulary: int) -> Logits:
    """Of an engine of one stage, whose forward is asked for each token that might have been drawn. Collective."""
    def logits(prompt: list[int], tokens: list[int]) -> np.ndarray:
        rows = [[*prompt, *tokens[:i], v] for i in range(len(tokens)) for v in range(vocabulary)]
        lengths = torch.tensor([len(row) for row in rows])
        batch = Sequences(torch.tensor(sum(rows, [])), lengths - 1, torch.ones_like(lengths))
        runs = [(i, min(i + ROWS_A_FORWARD, len(rows))) for i in range(0, len(rows), ROWS_A_FORWARD)]
        found = engine.forward(batch, ("logprobs",), 1.0, runs)["logprobs"]
        return found.view(len(tokens), vocabulary).double().numpy()

    return logits


def _defined(logits: np.ndarray, token: int, position: int, options: SamplingOptions) -> float:
    """The log-probability of a token by the language; -inf if it is not among those to draw from."""
    def logsumexp(x: np.ndarray) -> float:
        return x.max() + np.log(np.exp(x - x.max()).sum())

    plain = logits[token] - logsumexp(logits)
    if position < options.min_tokens:
        logits[[i for i in options.stop_ids if i < len(logits)]] = -np.inf
    if not options.temperature:
        return plain if logits[token] > logits.max() - 1e-4 else -np.inf
    p = np.exp(logits / options.temperature - logsumexp(logits / options.temperature))
    ranked = sorted(range(len(p)), key=lambda i: -p[i])[:options.top_k or None]
    kept, total = [], sum(p[i] for i in ranked)
    for i in ranked:
        if sum(p[j] for j in kept) / total < options.top_p:
            kept.append(i)
    return float(np.log(p[token] / sum(p[i] for i in kept))) if token in kept else -np.inf


def ends_well(tokens: list[int], truncated: bool, limit: int, options: SamplingOptions) -> bool:
    """Whether a response ends with the first token that may end it, or at its bound, as `truncated` says."""
    def ends(count: int) -> bool:
        text, last = "".join(TEXT[t] for t in tokens[:count]), TEXT[tokens[count - 1]]
        stops = any(text.count(s) > text[:-len(last)].count(s) for s in options.stop_strings)
        return count >= max(options.min_tokens, 1) and (tokens[count - 1] in options.stop_ids or stops)

    early = any(ends(count) for count in range(1, len(tokens)))
    return not early and len(tokens) <= limit and truncated == (not ends(len(tokens))) and (
        not truncated or len(tokens) == limit)


def judged(logits: Logits, drawn: Sequences, options: SamplingOptions, context: int) -> Optional[float]:
    """The largest difference of log-probabilities from the definition's.

    None where tokens could not have been drawn, or a response does not end as it says. context: most tokens of a row
    """
    worst = 0.0
    for i in range(len(drawn)):
        one = drawn.select(torch.tensor([i]))
        cut = int(one.prompt_lengths)
        prompt, tokens = one.tokens[:cut].tolist(), one.tokens[cut:].tolist()
        if not ends_well(tokens, bool(one.truncated), min(options.max_tokens, context - cut), options):
            return None
        drawn_by = zip(logits(prompt, tokens), tokens)
        right = np.array([_defined(row.copy(), token, at, options) for at, (row, token) in enumerate(drawn_by)])
        worst = max(worst, float(np.abs(right - one.logprobs.numpy()).max()))
    return worst if np.isfinite(worst) else None
