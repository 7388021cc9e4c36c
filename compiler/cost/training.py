"""Training and scoring: micro-batches through a pipeline, then gradients, then the optimizer."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from compiler.cost.compute import head_forward, layer_forward, stream
from compiler.cost.layouts import Degrees
from compiler.cost.links import gather, group_link, send
from compiler.cost.sizes import ACTIVATION, BETWEEN, FP32, Sizes
from compiler.cost.workload import Call
from compiler.machine import Machine

FORWARD_TOKENS = 16384  # of a micro-batch without gradients


class PassTime(NamedTuple):
    """Seconds of micro-batches through a pipeline. bubble: where a stage waits for others."""

    compute: float
    tensor: float
    host: float
    bubble: float

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.host + self.bubble


class StepTime(NamedTuple):
    """Seconds of an optimizer step."""

    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.gradients + self.optimizer


class Micro(NamedTuple):
    """How a mini-batch is cut: samples in a micro-batch, and whether layers are computed again in backward.

    retained: the forward was done before, and its activations are there
    """

    samples: int
    recompute: bool
    retained: bool = False

    @property
    def forwards(self) -> int:
        """How often a training computes each layer forward."""
        return 1 + self.recompute - self.retained


def train_time(machine: Machine, sizes: Sizes, degrees: Degrees, call: Call, micro: Micro) -> float:
    """Seconds of an iteration's training."""
    steps = call.epochs * call.minibatches
    once = passes_time(machine, sizes, degrees, minibatch_rows(degrees, call), micro, call.length)
    return steps * (once.total + step_time(machine, sizes, degrees).total)


def minibatch_rows(degrees: Degrees, call: Call) -> int:
    """Rows of a mini-batch on the data shard that has most."""
    return max(1, math.ceil(call.rows / call.together / call.minibatches / degrees.dp)) * call.together


def passes_time(machine: Machine, sizes: Sizes, degrees: Degrees, rows: int, micro: Micro, length: float) -> PassTime:
    """Forward and backward of `rows` rows of a data shard.

    Backward costs twice a forward in compute and the same in collectives; with recomputation a forward more. One
    forward and one backward in turn: (m + pp - 1) / m of the time of m micro-batches (Narayanan et al., arXiv
    2104.04473, section 2.2).
    """
    return _passes(machine, sizes, degrees.tp, degrees.pp, degrees.dp, rows, micro, length)


@functools.lru_cache(maxsize=200_000)
def _passes(machine: Machine, sizes: Sizes, tp: int, pp: int, dp: int, rows: int, micro: Micro,
            length: float) -> PassTime:
    count = math.ceil(rows / micro.samples)
    tokens = rows / count * length
    one = layer_forward(machine, sizes, tp, tokens, length)
    layers, forwards = sizes.stage_layers(pp), micro.forwards
    compute = layers * one.compute * (2 + forwards) + 3 * head_forward(machine, sizes, tp, tokens)
    tensor = layers * one.tensor * (1 + forwards)
    host = layers * one.host * (1 + forwards)
    handed = 2 * _handed(machine, sizes, tp, pp, dp, tokens)
    busy = compute + tensor + host
    return PassTime(count * compute, count * tensor, count * host, (pp - 1) * busy + (count + pp - 1) * handed)


@functools.lru_cache(maxsize=200_000)
def step_time(machine: Machine, sizes: Sizes, degrees: Degrees) -> StepTime:
    """Gradients are summed in 32 bit over data shards: all-reduced, or, where these divide the states,
    reduce-scattered, and the weights gathered (Rajbhandari et al., arXiv 1910.02054, stage 1). Then Adam streams
    through its states."""
    storage, held = machine.storage, sizes.held(degrees.tp, degrees.pp)
    data = group_link(machine, degrees.dp, degrees.tp)
    back = storage.weight if storage.sharded else FP32
    summed = gather(data, degrees.dp, FP32 * held) + gather(data, degrees.dp, back * held)
    mine = held / degrees.dp if storage.sharded else held
    return StepTime(summed, stream(machine, _step_bytes(machine) * mine))


def _step_bytes(machine: Machine) -> int:
    """Of a parameter: gradient and states are read, states and weight written."""
    storage = machine.storage
    return storage.gradient + 2 * storage.states + storage.weight


def forward_time(machine: Machine, sizes: Sizes, degrees: Degrees, call: Call,
                 samples: float = 0) -> PassTime:
    """Scoring all rows. samples: of a micro-batch; 0: as many as have FORWARD_TOKENS tokens"""
    rows = max(1, math.ceil(call.rows / degrees.dp))
    return _forward(machine, sizes, degrees.tp, degrees.pp, degrees.dp, rows, call.length, samples)


@functools.lru_cache(maxsize=200_000)
def _forward(machine: Machine, sizes: Sizes, tp: int, pp: int, dp: int, rows: int, length: float,
             samples: float) -> PassTime:
    count = math.ceil(rows / samples) if samples else math.ceil(rows * length / FORWARD_TOKENS)
    if pp > 1 and not samples:
        count = max(count, min(rows, 4 * pp))
    tokens = rows * length / count
    layers, one = sizes.stage_layers(pp), layer_forward(machine, sizes, tp, tokens, length)
    compute = layers * one.compute + head_forward(machine, sizes, tp, tokens)
    busy, handed = compute + layers * (one.tensor + one.host), _handed(machine, sizes, tp, pp, dp, tokens)
    return PassTime(count * compute, count * layers * one.tensor, count * layers * one.host,
                    (pp - 1) * busy + (count + pp - 1) * handed)


def _handed(machine: Machine, sizes: Sizes, tp: int, pp: int, dp: int, tokens: float) -> float:
    """Seconds to hand a micro-batch to the next stage of a pipeline, each tensor shard its part."""
    if pp == 1:
        return 0.0
    size = machine.storage.weight * tokens * sizes.hidden / tp
    return machine.engine.collective + send(group_link(machine, pp, tp * dp), size)


# ---- memory ----------------------------------------------------------------------------------------

def weight_bytes(machine: Machine, sizes: Sizes, degrees: Degrees) -> float:
    return machine.storage.weight * sizes.held(degrees.tp, degrees.pp)


def gradient_bytes(machine: Machine, sizes: Sizes, degrees: Degrees) -> float:
    return machine.storage.gradient * sizes.held(degrees.tp, degrees.pp)


def state_bytes(machine: Machine, sizes: Sizes, degrees: Degrees) -> float:
    shards = degrees.dp if machine.storage.sharded else 1
    return machine.storage.states * sizes.held(degrees.tp, degrees.pp) / shards


def activation_bytes(machine: Machine, sizes: Sizes, degrees: Degrees, call: Call, micro: Micro) -> float:
    """On the fullest stage: the first holds up to pp micro-batches, the last one and its logits.

    With recomputation a layer's input stays, and one layer in full. Those that are retained are of all micro-batches.
    """
    rows = minibatch_rows(degrees, call)
    samples = min(micro.samples, rows)
    layers, layer = sizes.stage_layers(degrees.pp), _layer_elements(machine, degrees.tp)
    whole = 1 / degrees.tp if machine.storage.sequence_parallel else 1.0
    kept = layers * whole + layer if micro.recompute else layers * layer
    one = machine.storage.weight * (rows if micro.retained else samples) * call.length * sizes.hidden * kept
    logits = 2 * FP32 * samples * call.length * sizes.vocab / degrees.tp if sizes.policy else 0.0
    first = one * min(degrees.pp, math.ceil(rows / micro.samples))
    return max(first + (logits if degrees.pp == 1 else 0.0), one + logits)


def _layer_elements(machine: Machine, tp: int) -> float:
    """Activations of a layer a token and hidden element on each device (arXiv 2205.05198, equations 2 and 4)."""
    if machine.storage.sequence_parallel:
        return ACTIVATION / tp
    return BETWEEN + (ACTIVATION - BETWEEN) / tp


def forward_bytes(machine: Machine, sizes: Sizes, degrees: Degrees, call: Call,
                  samples: float = 0) -> float:
    """One layer's activations and the logits of a micro-batch."""
    rows = max(1, math.ceil(call.rows / degrees.dp))
    most = samples * call.length if samples else max(FORWARD_TOKENS, call.length)
    logits = FP32 * sizes.vocab / degrees.tp if sizes.policy else 0
    layer = _layer_elements(machine, degrees.tp) * machine.storage.weight * sizes.hidden
    return min(rows * call.length, most) * (layer + logits)
