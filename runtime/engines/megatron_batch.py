"""Turns the calls of a micro-batch into one packed input and says where each call reads the hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

import torch
from torch import Tensor

from runtime.engines.base import SITES, Call
from runtime.engines.megatron_attention import PackedRows
from runtime.engines.positions import window_mask
from runtime.sequences import Sequences


@dataclass(frozen=True)
class Reading:
    """What one call reads.

    at: int64 [results], tokens of the micro-batch whose hidden states it needs
    targets: int64 [results], for each of them the token that follows
    """

    call: Call
    at: Tensor
    targets: Tensor


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. tokens: int64 [1, tokens]; readings by the name of the call."""

    tokens: Tensor
    packed: PackedRows
    readings: Mapping[str, Reading]


class Rotary:
    """cos and sin, f32 [tokens, 1, head_dim / 2], of any positions; the table grows as longer sequences come."""

    def __init__(self, frequencies: Tensor) -> None:
        self._frequencies = frequencies
        self._cos = self._sin = frequencies.new_empty(0, 1, frequencies.numel())

    def __call__(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        if longest > self._cos.shape[0]:
            self._grow(2 * longest)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _grow(self, size: int) -> None:
        steps = torch.arange(size, dtype=torch.float32, device=self._frequencies.device)
        angles = torch.outer(steps, self._frequencies).unsqueeze(1)
        self._cos, self._sin = angles.cos(), angles.sin()


def pack(calls: Mapping[str, Call], rotary: Rotary, window: int, device: torch.device, multiple: int = 1) -> MicroBatch:
    """Batches that several calls share go through the model once, filled up to a multiple of tokens, at least one.

    window: of `ModelShape`
    """
    batches = {id(call.batch): call.batch for call in calls.values() if len(call.batch)}
    count = sum(batch.tokens.numel() for batch in batches.values())
    lacking = -count % multiple if count else multiple
    joined = Sequences.concat([*batches.values(), *([_filling(lacking)] if lacking else [])])
    row = torch.repeat_interleave(torch.arange(len(joined)), joined.lengths)
    positions = torch.arange(row.numel()) - (torch.cumsum(joined.lengths, 0) - joined.lengths)[row]
    longest = int(joined.lengths.max())
    cos, sin = rotary(positions.to(device), longest)
    slots = (row * longest + positions).to(device)
    mask = window_mask(window, longest, device)
    packed = PackedRows(qkv_format="thd", rows=len(joined), longest=longest, slots=slots, cos=cos, sin=sin, mask=mask)
    tokens = joined.tokens.to(device)
    return MicroBatch(tokens.unsqueeze(0), packed, _readings(calls, batches, tokens))


def _filling(tokens: int) -> Sequences:
    """A row that nothing reads."""
    return Sequences(torch.zeros(tokens, dtype=torch.int64), torch.tensor([tokens]), torch.tensor([0]))


def _readings(calls: Mapping[str, Call], batches: Mapping[int, Sequences], tokens: Tensor) -> dict[str, Reading]:
    """Calls that read the same tokens get the same tensors, by which the heads know them. tokens: of all batches."""
    following, nowhere = tokens.roll(-1), tokens.new_empty(0)
    sites: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
    first_token = 0
    for key, batch in batches.items():
        for site, at in _sites(batch).items():
            at = (at + first_token).to(tokens.device)
            sites[key, site] = at, following[at]
        first_token += batch.tokens.numel()
    elsewhere = nowhere, nowhere
    places = {name: (id(call.batch), SITES[call.operation]) for name, call in calls.items()}
    return {name: Reading(call, *sites.get(places[name], elsewhere)) for name, call in calls.items()}


def _sites(batch: Sequences) -> dict[str, Tensor]:
    """Where hidden states stand in a batch, by the names of `base.SITES`."""
    ends = torch.cumsum(batch.lengths, 0)
    responses = torch.cumsum(batch.response_lengths, 0)
    # the i-th response token of all stands as far behind its place in the responses as prompts precede it
    own = torch.arange(int(responses[-1])) + torch.repeat_interleave(ends - responses, batch.response_lengths)
    if batch.own is not None:
        own = own[batch.own]
    return {"predict": own - 1, "token": own, "last": ends - 1}
