"""Training and scoring: micro-batches through a pipeline, then gradients, then the optimizer."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from compiler.cost.compute import head_forward, layer_forward, stream
from compiler.cost.layouts import Degrees
from compiler.cost.links import gather, group_link, send
from compiler.cost.sizes import ACTIVATION, BF16, FP32, STATES, Sizes
from compiler.cost.workload import Call
from compiler.machine import Machine

FORWARD_TOKENS = 16384  # of a micro-batch without gradients
OPTIMIZER_BYTES = 30  # a parameter: gradient, copy and moments are read, copy, moments and bf16 weight are written


class TrainTime(NamedTuple):
    """Seconds of an iteration. bubble: where a stage of the pipeline waits for others."""

    compute: float
    tensor: float
    host: float
    bubble: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


class Micro(NamedTuple):
    """How a mini-batch is cut: samples in a micro-batch, and whether layers are computed again in backward."""

    samples: int
    recompute: bool


def train_time(machine: Machine, sizes: Sizes, degrees: Degrees, call: Call, micro: Micro) -> TrainTime:
    """Backward costs twice a forward in compute and the same in collectives; with recomputation a forward more.

    One forward and one backward in turn: (m + pp - 1) / m of the time of m micro-batches (Narayanan et al., arXiv
    2104.04473, section 2.2). Gradients are reduce-scattered in fp32 and weights gathered in bf16 (Rajbhandari et al.,
    arXiv 1910.02054, stage 1).
    """
    rows = max(1, math.ceil(call.rows / call.minibatches / degrees.dp))
    once = _passes(machine, sizes, degrees.tp, degrees.pp, degrees.dp, rows, micro, call.length)
    held = sizes.held(degrees.tp, degrees.pp)
    data = group_link(machine, degrees.dp, degrees.tp)
    gradients = gather(data, degrees.dp, FP32 * held) + gather(data, degrees.dp, BF16 * held)
    optimizer = stream(machine, OPTIMIZER_BYTES * held / degrees.dp)
    steps = call.epochs * call.minibatches
    return TrainTime(*(steps * x for x in once), steps * gradients, steps * optimizer)


@functools.lru_cache(maxsize=200_000)
def _passes(machine: Machine, sizes: Sizes, tp: int, pp: int, dp: int, rows: int, micro: Micro,
            length: float) -> tuple[float, float, float, float]:
    """(compute, tensor, host, bubble) of one mini-batch."""
    count = math.ceil(rows / micro.samples)
    tokens = rows / count * length
    one = layer_forward(machine, sizes, tp, tokens, length)
    again = 1 + micro.recompute
    layers = sizes.stage_layers(pp)
    compute = layers * one.compute * (2 + again) + 3 * head_forward(machine, sizes, tp, tokens)
    tensor = layers * one.tensor * (1 + again)
    host = layers * one.host * (1 + again)
    handed = 2 * _handed(machine, sizes, tp, pp, dp, tokens)
    busy = compute + tensor + host
    return count * compute, count * tensor, count * host, (pp - 1) * busy + (count + pp - 1) * handed


def forward_time(machine: Machine, sizes: Sizes, degrees: Degrees, call: Call) -> float:
    """Seconds of scoring all rows."""
    rows = max(1, math.ceil(call.rows / degrees.dp))
    return _forward(machine, sizes, degrees.tp, degrees.pp, degrees.dp, rows, call.length)


@functools.lru_cache(maxsize=200_000)
def _forward(machine: Machine, sizes: Sizes, tp: int, pp: int, dp: int, rows: int, length: float) -> float:
    count = math.ceil(rows * length / FORWARD_TOKENS)
    if pp > 1:
        count = max(count, min(rows, 4 * pp))
    tokens = rows * length / count
    stage = sizes.stage_layers(pp) * layer_forward(machine, sizes, tp, tokens, length).total
    stage += head_forward(machine, sizes, tp, tokens)
    return (count + pp - 1) * (stage + _handed(machine, sizes, tp, pp, dp, tokens))


def _handed(machine: Machine, sizes: Sizes, tp: int, pp: int, dp: int, tokens: float) -> float:
    """Seconds to hand a micro-batch to the next stage of a pipeline, each tensor shard its part."""
    if pp == 1:
        return 0.0
    return machine.engine.collective + send(group_link(machine, pp, tp * dp), BF16 * tokens * sizes.hidden / tp)


# ---- memory ----------------------------------------------------------------------------------------

def weight_bytes(sizes: Sizes, tp: int, pp: int = 1) -> float:
    return BF16 * sizes.held(tp, pp)


def gradient_bytes(sizes: Sizes, degrees: Degrees) -> float:
    return FP32 * sizes.held(degrees.tp, degrees.pp)


def state_bytes(sizes: Sizes, degrees: Degrees) -> float:
    """Each data shard keeps the optimizer's states of its part (arXiv 1910.02054, stage 1)."""
    return STATES * sizes.held(degrees.tp, degrees.pp) / degrees.dp


def activation_bytes(sizes: Sizes, degrees: Degrees, call: Call, micro: Micro) -> float:
    """On the fullest stage: the first holds up to pp micro-batches, the last one and its logits.

    Sequence parallelism cuts all activations by tp (arXiv 2205.05198, equation 4); with recomputation a layer's input
    stays, 2 bytes a hidden element, and one layer in full.
    """
    rows = max(1, math.ceil(call.rows / call.minibatches / degrees.dp))
    tokens = min(micro.samples, rows) * call.length
    layers = sizes.stage_layers(degrees.pp)
    kept = layers * BF16 + ACTIVATION if micro.recompute else layers * ACTIVATION
    one = tokens * sizes.hidden * kept
    logits = 2 * FP32 * tokens * sizes.vocab if sizes.policy else 0.0
    first = one * min(degrees.pp, math.ceil(rows / micro.samples))
    return max(first + (logits if degrees.pp == 1 else 0.0), one + logits) / degrees.tp


def forward_bytes(sizes: Sizes, degrees: Degrees, call: Call) -> float:
    """One layer's activations and the logits of a micro-batch."""
    rows = max(1, math.ceil(call.rows / degrees.dp))
    tokens = min(rows * call.length, max(FORWARD_TOKENS, call.length))
    logits = FP32 * sizes.vocab if sizes.policy else 0
    return tokens * (ACTIVATION * sizes.hidden + logits) / degrees.tp
