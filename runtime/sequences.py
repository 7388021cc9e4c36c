"""A packed batch of prompts with their responses: what models read and `generate` makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """n sequences, one after the other, without padding.

    tokens:            int64 [sum(prompt_lengths + response_lengths)], each prompt followed by its response
    prompt_lengths:    int64 [n]
    response_lengths:  int64 [n], every token of the response, also those that are not the model's own
    own:               bool [sum(response_lengths)] or None: all are the model's own
    logprobs:          f32 [own tokens] at which the sampler drew them, or None
    truncated:         bool [n], the bound was hit without an end token, or None
    """

    tokens: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    own: Optional[Tensor] = None
    logprobs: Optional[Tensor] = None
    truncated: Optional[Tensor] = None

    def __len__(self) -> int:
        return self.prompt_lengths.numel()

    @property
    def lengths(self) -> Tensor:
        """int64 [n]: prompt and response together."""
        return self.prompt_lengths + self.response_lengths

    @property
    def own_lengths(self) -> Tensor:
        """int64 [n]: the model's own tokens, which is what a ragged dim counts."""
        if self.own is None:
            return self.response_lengths
        row = torch.repeat_interleave(torch.arange(len(self)), self.response_lengths)
        return torch.zeros(len(self), dtype=torch.int64).index_add_(0, row, self.own.long())

    def select(self, rows: Tensor) -> "Sequences":
        """The given sequences (int64 [m], any order, repeats allowed)."""
        def pick(values: Optional[Tensor], lengths: Tensor) -> Optional[Tensor]:
            return None if values is None else values[ragged_index(lengths, rows)]

        return Sequences(
            pick(self.tokens, self.lengths), self.prompt_lengths[rows], self.response_lengths[rows],
            pick(self.own, self.response_lengths), pick(self.logprobs, self.own_lengths),
            None if self.truncated is None else self.truncated[rows],
        )

    @staticmethod
    def concat(parts: list["Sequences"]) -> "Sequences":
        """All sequences of `parts` in order; an optional field survives where any part has it and it can be completed."""
        if len(parts) == 1:
            return parts[0]
        owns = [p.own for p in parts]
        if any(o is not None for o in owns):
            owns = [torch.ones(int(p.response_lengths.sum()), dtype=torch.bool) if p.own is None else p.own for p in parts]

        def cat(values: list[Optional[Tensor]]) -> Optional[Tensor]:
            return None if any(v is None for v in values) else torch.cat(values)

        return Sequences(
            torch.cat([p.tokens for p in parts]), torch.cat([p.prompt_lengths for p in parts]),
            torch.cat([p.response_lengths for p in parts]), cat(owns),
            cat([p.logprobs for p in parts]), cat([p.truncated for p in parts]),
        )


def ragged_index(lengths: Tensor, rows: Tensor) -> Tensor:
    """Positions, in a packed tensor whose rows have `lengths`, of the elements of `rows`, row after row (int64)."""
    starts = torch.cumsum(lengths, 0) - lengths
    chosen = lengths[rows]
    ends = torch.cumsum(chosen, 0)
    if not ends.numel():
        return torch.zeros(0, dtype=torch.int64)
    within = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends - chosen, chosen)
    return torch.repeat_interleave(starts[rows], chosen) + within
