"""Times of one layer in the engines that run it, as the difference between deep and flat models of the same widths."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Iterator

import torch

from compiler.layout import ModelLayout
from compiler.cost.sizes import sizes_of
from compiler.shapes import ModelShape
from runtime.engines.base import AdamW, Call
from runtime.engines.megatron import MegatronEngine
from runtime.engines.sampler import SamplerEngine
from runtime.engines.sampling import SamplingOptions
from runtime.meshes import Job, Mesh
from runtime.profile.clock import Clock
from runtime.profile.found import LENGTH, long_batch
from runtime.sequences import Sequences

FLAT, DEEP = 1, 3
DECODED, ROWS = 16, 8  # tokens and rows of a generation
VOCAB = 256  # the head is a product like others

Layer = tuple[str, float, str, str]


def measured_layers(job: Job, clock: Clock, shape: ModelShape) -> Iterator[Layer]:
    """(name, value, unit, what it is), in seconds of a layer. Collective."""
    shape = dataclasses.replace(shape, vocab=VOCAB, max_positions=max(shape.max_positions, 2 * LENGTH))
    tokens = long_batch(sizes_of(shape, "policy"))
    flat, deep = (_Model(job, shape, layers) for layers in (FLAT, DEEP))
    forwards = ("short_forward", 1, 2), ("long_forward", tokens // LENGTH, LENGTH)
    for name, rows, length in forwards:
        of = [clock(model.forward(_batch(rows, length))) for model in (flat, deep)]
        yield name, _slope(*of), "s", f"a layer, forward, {rows * length} tokens"
        if rows == 1:
            yield "call", max(of[0] - FLAT * _slope(*of), 0.0), "s", "a call of a model, beside its layers"
    of = [clock(model.train(_batch(tokens // LENGTH, LENGTH))) for model in (flat, deep)]
    yield "long_train", _slope(*of), "s", f"a layer, forward and backward, {tokens} tokens"
    of = [clock(model.generate()) / DECODED for model in (flat, deep)]
    yield "decode", _slope(*of), "s", f"a layer, a token each of {ROWS} rows"


def _slope(flat: float, deep: float) -> float:
    return max((deep - flat) / (DEEP - FLAT), 1e-9)


class _Model:
    """A trained policy of random weights with so many layers, all ranks in data parallelism."""

    def __init__(self, job: Job, shape: ModelShape, layers: int) -> None:
        self.shape = dataclasses.replace(shape, layers=layers)
        layout = ModelLayout(tuple(range(job.size)), 1, 1, job.size)
        self.trainer = MegatronEngine(self.shape, "policy", layout, Mesh(job, [layout]), AdamW())
        self.sampler = SamplerEngine(self.shape, layout, job.rank, device=job.device)
        for weights in (self.trainer.export(), self.sampler.export()):
            for tensor in weights.values():
                tensor.normal_(0.0, 0.02)

    def forward(self, batch: Sequences) -> Callable[[], Any]:
        return lambda: self.trainer.forward(batch, ("logprobs",))

    def train(self, batch: Sequences) -> Callable[[], Any]:
        calls = [{"logprobs": Call("logprobs", batch)}]
        return lambda: self.trainer.train(calls, lambda i, outputs: -outputs["logprobs"].sum())

    def generate(self) -> Callable[[], Any]:
        options = SamplingOptions(max_tokens=DECODED, min_tokens=DECODED)
        prompts = [torch.zeros(LENGTH, dtype=torch.int64)] * ROWS
        return lambda: self.sampler.generate(prompts, 1, range(ROWS), "profile", 0, 0, options)


def _batch(rows: int, length: int) -> Sequences:
    """Half prompt, half response."""
    half = torch.full((rows,), length // 2)
    return Sequences(torch.zeros(rows * length, dtype=torch.int64), half, length - half)
