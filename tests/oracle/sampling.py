"""One response, a token at a time: each from a full forward pass over everything before it, at a number with a name."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Callable, Optional, Sequence

import torch
from torch import Tensor


@dataclass(frozen=True)
class Options:
    """As `generate` takes them; ends: the end tokens; stop: texts that end a response."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_tokens: int
    ends: tuple[int, ...]
    stop: tuple[str, ...]


@dataclass
class Response:
    """margins: where the response was told to leave the tokens drawn here, how far that was from a tie."""

    prompt: list[int]
    tokens: list[int]
    truncated: bool = False
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)


def sample(logits_after: Callable[[list[int]], Tensor], prompt: list[int], options: Options,
           draw: Callable[[int], float], decode: Callable[[list[int]], str], context: int,
           told: Optional[Sequence[int]] = None) -> Response:
    """logits_after: tokens → f32 [V]; draw: position → [0, 1).

    told: tokens that some other sampler drew. They are followed; where they differ from the ones drawn here, the margin
    says by how little (see `margin`), and a response that ends elsewhere has an infinite one.
    """
    found = Response(prompt, [])
    limit = min(options.max_tokens, context - len(prompt))
    while True:
        place = len(found.tokens)
        logits = logits_after(prompt + found.tokens).double()
        weights = distribution(logits, options, place)
        token = invert(weights, draw(place)) if options.temperature else first_greatest(weights)
        if told is not None:
            token = _follow(found, told, token, weights, draw(place) if options.temperature else None)
        plain = torch.log_softmax(logits, 0).tolist()
        found.logprobs.append(math.log(weights[token]) if options.temperature and weights[token] > 0 else plain[token])
        found.tokens.append(token)
        ended = token in options.ends or _is_stopped(decode(found.tokens), found, options)
        if ended or len(found.tokens) == limit:
            found.truncated = not ended
            break
    if told is not None and len(told) != len(found.tokens):
        found.margins.append(math.inf)
    return found


def _is_stopped(text: str, found: Response, options: Options) -> bool:
    return len(found.tokens) >= options.min_tokens and any(stop in text for stop in options.stop)


def _follow(found: Response, told: Sequence[int], drawn: int, weights: list[float], u: Optional[float]) -> int:
    place = len(found.tokens)
    if place >= len(told):
        return drawn
    if told[place] != drawn:
        found.margins.append(margin(weights, drawn, told[place], u))
    return told[place]


def distribution(logits: Tensor, options: Options, place: int) -> list[float]:
    """Probabilities after temperature, then of the k most likely, then of the fewest that reach p (ties: lower ids)."""
    if place < options.min_tokens:
        logits = logits.clone()
        logits[list(options.ends)] = -math.inf
    p = torch.softmax(logits / (options.temperature or 1), 0).tolist()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    order = order[: options.top_k or len(p)]
    mass = sum(p[i] for i in order)
    if options.top_p < 1:
        reached = list(accumulate(p[i] / mass for i in order))
        order = order[: next((n for n, r in enumerate(reached, 1) if r >= options.top_p), len(order))]
        mass = sum(p[i] for i in order)
    chosen = set(order)
    return [x / mass if i in chosen else 0.0 for i, x in enumerate(p)]


def invert(weights: list[float], u: float) -> int:
    """The first token at which the cumulative probability, in the order of ids, exceeds u."""
    above = (i for i, c in enumerate(accumulate(weights)) if c > u)
    return next(above, max(i for i, w in enumerate(weights) if w > 0))


def first_greatest(weights: list[float]) -> int:
    return max(range(len(weights)), key=lambda i: (weights[i], -i))


def margin(weights: list[float], drawn: int, other: int, u: Optional[float]) -> float:
    """How far `u` is from the nearest number that draws `other`; without `u`, by how much `drawn` is more likely."""
    if u is None:
        return weights[drawn] - weights[other]
    if weights[other] == 0:
        return math.inf
    reached = [0.0, *accumulate(weights)]
    return reached[other] - u if other > drawn else u - reached[other + 1]
