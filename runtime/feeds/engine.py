"""An engine whose outputs are fed numbers: training leaves the gradient with respect to them."""

from __future__ import annotations

from typing import Callable, Mapping, Sequence

import torch
from torch import Tensor

from runtime.engines.base import Call, Objective
from runtime.sequences import Sequences, ragged_index

RESPONSE_SHIFT = 32  # a fed sequence's tokens say which response and sample it is: response << 32 | sample


def numbered(index: int, samples: Tensor, lengths: Tensor) -> Tensor:
    """Tokens of fed sequences: a prompt of one token and a response of `lengths` tokens, all with the sample's number."""
    return ((index << RESPONSE_SHIFT) | samples).repeat_interleave(1 + lengths)


def samples_of(batch: Sequences) -> tuple[int, Tensor]:
    """(response number, sample numbers) of a batch of fed sequences."""
    first = batch.tokens[torch.cumsum(batch.lengths, 0) - batch.lengths]
    index = int(first[0] >> RESPONSE_SHIFT) if first.numel() else 0
    return index, first & ((1 << RESPONSE_SHIFT) - 1)


class FeedEngine:
    """One model.

    values(operation, response number, temperature, of the update?): the fed value of a call for all samples of the
    iteration, packed, and the number of elements of each sample
    leaves: (operation, response number, temperature) -> tensor over all samples whose `grad` training fills
    """

    def __init__(self, values: Callable[[str, int, float, bool], tuple[Tensor, Tensor]]) -> None:
        self._values = values
        self.update = False
        self.leaves: dict[tuple[str, int, float], Tensor] = {}

    def forward(self, batch: Sequences, operations: tuple[str, ...], temperature: float = 1.0,
                runs: Sequence[tuple[int, int]] = (), retain: bool = False) -> dict[str, Tensor]:
        index, samples = samples_of(batch)
        fed = {operation: self._values(operation, index, temperature, self.update) for operation in operations}
        return {operation: values[ragged_index(counts, samples)] for operation, (values, counts) in fed.items()}

    def train(
        self, micro_batches: Sequence[Mapping[str, Call]], objective: Objective, recompute: bool = False,
        retained: bool = False,
    ) -> list[dict[str, Tensor]]:
        outputs = []
        for i, calls in enumerate(micro_batches):
            results = {name: self._output(call) for name, call in calls.items()}
            loss = objective(i, results)
            if loss.requires_grad:
                loss.backward()
            outputs.append({name: value.detach() for name, value in results.items()})
        return outputs

    def _output(self, call: Call) -> Tensor:
        index, samples = samples_of(call.batch)
        counts = self._values(call.operation, index, call.temperature, True)[1]
        return self.leaf(call.operation, index, call.temperature)[ragged_index(counts, samples)]

    def leaf(self, operation: str, index: int, temperature: float) -> Tensor:
        key = (operation, index, temperature)
        if key not in self.leaves:
            self.leaves[key] = self._values(*key, True)[0].clone().requires_grad_()
        return self.leaves[key]

    def zero_grad(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None
