"""One layer on one device: a roofline of matrix products, streaming and collectives."""

from __future__ import annotations

import functools
from typing import NamedTuple

from compiler.cost.links import all_reduce, group_link
from compiler.cost.sizes import ACTIVATION, Sizes
from compiler.machine import Machine


class Pass(NamedTuple):
    """Seconds of one layer for one micro-batch.

    compute: matrix products and what streams between them; tensor: collectives over tensor shards; host: what the
    device waits for its host
    """

    compute: float
    tensor: float
    host: float

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.host


@functools.lru_cache(maxsize=200_000)
def layer_forward(machine: Machine, sizes: Sizes, tp: int, tokens: float, length: float) -> Pass:
    """tokens: of the micro-batch, in samples of `length` tokens.

    Weights are read once; the activations that training would keep are written and read once.
    """
    width = machine.storage.weight
    streamed = 2 * ACTIVATION * width * sizes.hidden * tokens
    products = max(layer_flops(sizes, tokens, length) / matmul_rate(machine), width * sizes.layer / bandwidth(machine))
    compute = (products + streamed / bandwidth(machine)) / tp
    return _with_collectives(machine, compute, tp, width * tokens * sizes.hidden)


def layer_flops(sizes: Sizes, tokens: float, length: float) -> float:
    """Forward: 2 FLOP a parameter and token, and 2 * query * length a token for causal attention."""
    return tokens * (2 * sizes.layer + 2 * sizes.query * length)


def head_forward(machine: Machine, sizes: Sizes, tp: int, tokens: float) -> float:
    weights = machine.storage.weight * sizes.head / bandwidth(machine)
    return max(tokens * sizes.head_flops / matmul_rate(machine), weights) / tp


@functools.lru_cache(maxsize=200_000)
def layer_decode(machine: Machine, sizes: Sizes, tp: int, sequences: float, context: float) -> Pass:
    """One token of each of `sequences`, `context` tokens after their start: bound by computing, or by the bytes of
    the weights and of the sequences' keys and values."""
    width = machine.storage.weight
    flops = sequences * (2 * sizes.layer + 4 * sizes.query * context) / tp
    read = width * (sizes.layer / tp + sequences * context * sizes.kv / min(tp, sizes.kv_heads))
    compute = max(flops / matmul_rate(machine), read / bandwidth(machine))
    return _with_collectives(machine, compute, tp, width * sequences * sizes.hidden)


def _with_collectives(machine: Machine, compute: float, tp: int, message: float) -> Pass:
    """Two all-reduces a layer (Shoeybi et al., arXiv 1909.08053); the host is waited for where it is slower."""
    waits = max(machine.engine.layer - compute * machine.engine.ahead, 0.0)
    if tp == 1:
        return Pass(compute, 0.0, waits)
    tensor = 2 * all_reduce(group_link(machine, tp, 1), tp, message)
    return Pass(compute, tensor, waits + 2 * machine.engine.collective)


def stream(machine: Machine, size: float) -> float:
    """Seconds to read or write `size` bytes of the device's memory."""
    return size / bandwidth(machine)


def matmul_rate(machine: Machine) -> float:
    """FLOP/s that large matrix products reach."""
    return machine.flops * machine.reached.matmul


def bandwidth(machine: Machine) -> float:
    """bytes/s of a device's memory that streaming reaches."""
    return machine.memory_bandwidth * machine.reached.memory_bandwidth
