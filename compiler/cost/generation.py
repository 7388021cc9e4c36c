"""Generation: the weights' way into the generation layout, prompts at once, then token by token in waves."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from compiler.cost.compute import head_forward, layer_decode, layer_forward, stream
from compiler.cost.layouts import Degrees
from compiler.cost.links import group_link, send
from compiler.cost.sizes import BF16, Sizes
from compiler.cost.training import FORWARD_TOKENS, weight_bytes
from compiler.cost.workload import Call
from compiler.machine import Machine


class GenerateTime(NamedTuple):
    """Seconds of an iteration."""

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


def generate_time(machine: Machine, sizes: Sizes, degrees: Degrees, call: Call, sequences: int) -> GenerateTime:
    """sequences: how many of a replica's rows its key/value cache holds at once; the rest follow in waves."""
    rows = math.ceil(call.rows / degrees.dp)
    return _generate(machine, sizes, degrees.tp, degrees.pp, degrees.dp, rows, min(rows, sequences), call)


@functools.lru_cache(maxsize=200_000)
def _generate(machine: Machine, sizes: Sizes, tp: int, pp: int, dp: int, rows: int, sequences: int,
              call: Call) -> GenerateTime:
    chunks = math.ceil(rows * call.prompt / FORWARD_TOKENS)
    tokens = rows * call.prompt / chunks
    stage = sizes.stage_layers(pp) * layer_forward(machine, sizes, tp, tokens, call.prompt).total
    full, rest = divmod(rows, sequences)
    decode = full * _wave(machine, sizes, tp, pp, dp, sequences, call)
    decode += _wave(machine, sizes, tp, pp, dp, rest, call) if rest else 0.0
    return GenerateTime((chunks + pp - 1) * stage, decode)


def _wave(machine: Machine, sizes: Sizes, tp: int, pp: int, dp: int, sequences: int, call: Call) -> float:
    """All responses of `sequences` rows. The stages of a pipeline work on parts of them in turn, so that a token of
    all takes pp parts through all of a stage's layers."""
    part = sequences / min(pp, sequences)
    context = call.prompt + call.response / 2
    stage = sizes.stage_layers(pp) * layer_decode(machine, sizes, tp, part, context).total
    stage += head_forward(machine, sizes, tp, part)
    if pp > 1:
        stage += send(group_link(machine, pp, tp * dp), BF16 * part * sizes.hidden)
    return call.steps * pp * stage


def transition_bytes(sizes: Sizes, train: Degrees, generate: Degrees) -> float:
    """Bytes that each device receives on the way from its training to its generation shard.

    HybridFlow's grouping (arXiv 2409.19256, section 5.3): where tp of generation divides that of training, the
    training shard, 1 / (t p) of the model, is part of the generation shard, 1 / (t_g p_g), and (d_g - 1) / (t p) is
    received; where it is a multiple, a device keeps what lies in both.
    """
    model = BF16 * sizes.parameters
    target, source = generate.tp * generate.pp, train.tp * train.pp
    kept = min(1 / source, 1 / (max(generate.tp, train.tp) * max(generate.pp, train.pp)))
    return model * max(1 / target - kept, 0.0)


def transition_time(machine: Machine, sizes: Sizes, train: Degrees, generate: Degrees) -> float:
    """Layers of other stages come from other nodes where a stage fills one; the rest comes over the node's links.

    Devices of a node that need the same bytes fetch them once and share them.
    """
    received = transition_bytes(sizes, train, generate)
    if not received:
        return 0.0
    far = 0.0
    if train.devices > machine.devices_per_node and train.pp > generate.pp:
        stages_here = max(1, machine.devices_per_node // (train.tp * train.dp))
        missing = max(1 / generate.pp - stages_here / train.pp, 0.0)
        distinct = min(machine.devices_per_node, generate.tp) / generate.tp
        far = BF16 * sizes.parameters * missing * distinct
    near = received / (machine.intra * machine.reached.links)
    return machine.inter_latency + near + far / (machine.node * machine.reached.links) + stream(machine, 2 * received)


def generation_weight_bytes(sizes: Sizes, train: Degrees, generate: Degrees) -> float:
    """Bytes beside the training weights: the generation shard, less the training shard that is part of it."""
    return transition_bytes(sizes, train, generate)


def cache_bytes(sizes: Sizes, degrees: Degrees, call: Call, sequences: int) -> float:
    """Of `sequences` whole sequences of one replica, on each device."""
    return sequences * (call.prompt + call.steps) * sizes.kv_bytes(degrees.tp, degrees.pp)


__all__ = ["GenerateTime", "cache_bytes", "generate_time", "generation_weight_bytes", "transition_bytes",
           "transition_time", "weight_bytes"]
