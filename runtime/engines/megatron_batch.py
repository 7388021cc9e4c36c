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


_NOTHING = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class Reading:
    """What one call reads.

    at: int64 [results], ascending, which of the hidden states that come out of the model it needs
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
    """cos and sin as in `PackedRows`; the tables grow as longer sequences come."""

    def __init__(self, frequencies: Tensor) -> None:
        self._frequencies = frequencies
        self._cos = self._sin = frequencies.new_empty(0, 2 * frequencies.numel())

    def __call__(self, longest: int) -> tuple[Tensor, Tensor]:
        if longest > self._cos.shape[0]:
            self._grow(2 * longest)
        return self._cos[:longest], self._sin[:longest]

    def _grow(self, size: int) -> None:
        steps = torch.arange(size, dtype=torch.float32, device=self._frequencies.device)
        angles = torch.outer(steps, self._frequencies)
        self._cos, self._sin = angles.cos().repeat(1, 2), torch.cat([-angles.sin(), angles.sin()], -1)


def pack(calls: Mapping[str, Call], rotary: Rotary, window: int, device: torch.device, multiple: int = 1) -> MicroBatch:
    """Batches that several calls share go through the model once, filled up to a multiple of tokens, at least one.

    window: of `ModelShape`; multiple: above 1 where tensor-parallel ranks hold a part of the tokens each, of all layers
    """
    batches = {id(call.batch): call.batch for call in calls.values() if len(call.batch)}
    count = sum(batch.tokens.numel() for batch in batches.values())
    lacking = -count % multiple if count else multiple
    joined = Sequences.concat([*batches.values(), *([_filling(lacking)] if lacking else [])])
    row = torch.repeat_interleave(torch.arange(len(joined)), joined.lengths)
    positions = torch.arange(row.numel()) - (torch.cumsum(joined.lengths, 0) - joined.lengths)[row]
    longest = int(joined.lengths.max())
    cos, sin = rotary(longest)
    slots = (row * longest + positions).to(device)
    mask = window_mask(window, longest, device)
    packed = PackedRows(qkv_format="thd", rows=len(joined), longest=longest, slots=slots, cos=cos, sin=sin, mask=mask)
    tokens = joined.tokens.to(device)
    sites = _sites_of(batches)
    wanted = {name: sites.get((id(call.batch), SITES[call.operation]), _NOTHING) for name, call in calls.items()}
    read = torch.cat([_NOTHING, *wanted.values()]).unique() if multiple == 1 else _NOTHING
    if read.numel():
        packed = packed.reading(read.to(device))
    return MicroBatch(tokens.unsqueeze(0), packed, _readings(calls, wanted, read, tokens))


def _filling(tokens: int) -> Sequences:
    """A row that nothing reads."""
    return Sequences(torch.zeros(tokens, dtype=torch.int64), torch.tensor([tokens]), torch.tensor([0]))


def _readings(
    calls: Mapping[str, Call], wanted: Mapping[str, Tensor], read: Tensor, tokens: Tensor
) -> dict[str, Reading]:
    """Calls that read the same tokens get the same tensors, by which the heads know them.

    wanted: tokens by call; read: all of them, or nothing where the model gives the states of all tokens
    """
    following, shared = tokens.roll(-1), {}
    for at in wanted.values():
        place = torch.searchsorted(read, at) if read.numel() else at
        shared[id(at)] = place.to(tokens.device), following[at.to(tokens.device)]
    return {name: Reading(calls[name], *shared[id(at)]) for name, at in wanted.items()}


def _sites_of(batches: Mapping[int, Sequences]) -> dict[tuple[int, str], Tensor]:
    """By batch and site, tokens of all batches, ascending."""
    sites, first_token = {}, 0
    for key, batch in batches.items():
        sites |= {(key, site): at + first_token for site, at in _sites(batch).items()}
        first_token += batch.tokens.numel()
    return sites


def _sites(batch: Sequences) -> dict[str, Tensor]:
    """Where hidden states stand in a batch, by the names of `base.SITES`."""
    ends = torch.cumsum(batch.lengths, 0)
    responses = torch.cumsum(batch.response_lengths, 0)
    # the i-th response token of all stands as far behind its place in the responses as prompts precede it
    own = torch.arange(int(responses[-1])) + torch.repeat_interleave(ends - responses, batch.response_lengths)
    if batch.own is not None:
        own = own[batch.own]
    return {"predict": own - 1, "token": own, "last": ends - 1}
