"""Turns the calls of a micro-batch into one packed input and says where each call reads the hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

import torch
from torch import Tensor

from runtime.engines.base import SITES, Call
from runtime.engines.megatron_attention import PackedRows
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


def pack(calls: Mapping[str, Call], rotary: Rotary, device: torch.device) -> MicroBatch:
    """Batches that several calls share go through the model once. Without any row there is one dummy token, unread."""
    batches = {id(call.batch): call.batch for call in calls.values() if len(call.batch)}
    joined = Sequences.concat([*batches.values()]) if batches else _dummy()
    starts = torch.cumsum(joined.lengths, 0) - joined.lengths
    positions = torch.arange(joined.tokens.numel()) - torch.repeat_interleave(starts, joined.lengths)
    longest = int(joined.lengths.max())
    row = torch.repeat_interleave(torch.arange(len(joined)), joined.lengths)
    cos, sin = rotary(positions.to(device), longest)
    packed = PackedRows(
        qkv_format="thd", rows=len(joined), longest=longest, slots=(row * longest + positions).to(device), cos=cos, sin=sin,
    )
    readings = _readings(calls, batches, joined.tokens, positions, row)
    readings = {name: Reading(r.call, r.at.to(device), r.targets.to(device)) for name, r in readings.items()}
    return MicroBatch(joined.tokens.to(device).unsqueeze(0), packed, readings)


def _dummy() -> Sequences:
    one, none = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    return Sequences(none, one, none)


def _readings(calls: Mapping[str, Call], batches: Mapping[int, Sequences], tokens: Tensor, positions: Tensor, row: Tensor):
    following = torch.cat([tokens[1:], tokens[:1]])
    sites, first_token = {}, 0
    for key, batch in batches.items():
        end = first_token + batch.tokens.numel()
        sites[key] = _sites(batch, positions[first_token:end], first_token)
        first_token = end
    empty = dict.fromkeys(("predict", "token", "last"), tokens.new_empty(0))
    found = {}
    for name, call in calls.items():
        at = sites.get(id(call.batch), empty)[SITES[call.operation]]
        found[name] = Reading(call, at, following[at])
    return found


def _sites(batch: Sequences, positions: Tensor, first_token: int) -> dict[str, Tensor]:
    """Where hidden states stand, by the names of `SITES`; positions: int64, of the batch's tokens in their sequences."""
    own = torch.nonzero(positions >= torch.repeat_interleave(batch.prompt_lengths, batch.lengths)).flatten() + first_token
    if batch.own is not None:
        own = own[batch.own]
    return {"predict": own - 1, "token": own, "last": torch.cumsum(batch.lengths, 0) - 1 + first_token}
