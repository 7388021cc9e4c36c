"""Generation: prompts at once, then token by token in waves."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from compiler.cost.compute import head_forward, layer_decode, layer_forward
from compiler.cost.layouts import Degrees
from compiler.cost.links import group_link, send
from compiler.cost.sizes import Sizes
from compiler.cost.training import FORWARD_TOKENS
from compiler.cost.workload import Call
from compiler.machine import Machine

MOST_SEQUENCES = {"vllm": 256}  # that an engine decodes together at most
RESERVING = frozenset(("vllm",))  # engines whose weights and cache are memory of their own, there from start to end
TAIL = 8  # points at which the end of a wave is looked at, where responses end one by one


class GenerateTime(NamedTuple):
    """Seconds of an iteration: prompts, and of decoding what devices compute, collectives, and waiting for the host.

    handed: to next stages of a pipeline
    """

    prefill: float
    compute: float
    tensor: float
    host: float
    handed: float

    @property
    def decode(self) -> float:
        return self.compute + self.tensor + self.host + self.handed

    @property
    def total(self) -> float:
        return self.prefill + self.decode


def generate_time(machine: Machine, sizes: Sizes, degrees: Degrees, call: Call, sequences: int) -> GenerateTime:
    """sequences: how many of a replica's rows its key/value cache holds at once; the rest follow as others end."""
    rows = math.ceil(call.rows / degrees.dp)
    return _generate(machine, sizes, degrees.tp, degrees.pp, degrees.dp, rows, min(rows, sequences), call)


@functools.lru_cache(maxsize=200_000)
def _generate(machine: Machine, sizes: Sizes, tp: int, pp: int, dp: int, rows: int, sequences: int,
              call: Call) -> GenerateTime:
    """All but the last wave take the mean length, as rows enter for those that end; the last waits for the longest."""
    prompts = math.ceil(rows / call.samples) * call.prompt
    chunks = math.ceil(prompts / FORWARD_TOKENS)
    tokens = prompts / chunks
    stage = sizes.stage_layers(pp) * layer_forward(machine, sizes, tp, tokens, call.prompt).total
    full, rest = divmod(rows, sequences)
    last = rest or sequences
    waves = [(full - (not rest), sequences, 0.0), (1, last, call.tail)]
    parts = [tuple(count * x for x in _wave(machine, sizes, tp, pp, dp, n, call, tail))
             for count, n, tail in waves if count]
    return GenerateTime((chunks + pp - 1) * stage, *map(sum, zip(*parts)))


def _wave(machine: Machine, sizes: Sizes, tp: int, pp: int, dp: int, sequences: int, call: Call,
          tail: float) -> tuple[float, ...]:
    """(compute, tensor, host, handed) of all responses of `sequences` rows.

    tail: longest / mean - 1. At the share s of the steps of the longest, (1 - s) ** tail of the rows are not at their
    end: all until the last step if tail is 0, evenly spread ends if it is 1, few long ones if it is more. The mean
    follows.
    """
    if not tail:
        return tuple(call.response * x for x in _step(machine, sizes, tp, pp, dp, sequences,
                                                      call.prompt + call.response / 2))
    steps = call.response * (1 + tail)
    shares = [(i + 0.5) / TAIL for i in range(TAIL)]
    parts = [_step(machine, sizes, tp, pp, dp, max(1.0, sequences * (1 - s) ** tail), call.prompt + s * steps)
             for s in shares]
    return tuple(steps / TAIL * x for x in map(sum, zip(*parts)))


def _step(machine: Machine, sizes: Sizes, tp: int, pp: int, dp: int, sequences: float,
          context: float) -> tuple[float, ...]:
    """A token of each row. The stages of a pipeline work on parts of the rows in turn, so that a token of all takes pp
    parts through all of a stage's layers."""
    part = sequences / min(pp, sequences)
    layers, one = sizes.stage_layers(pp), layer_decode(machine, sizes, tp, part, context)
    compute = layers * one.compute + head_forward(machine, sizes, tp, part)
    handed = send(group_link(machine, pp, tp * dp), machine.storage.weight * part * sizes.hidden) if pp > 1 else 0.0
    return pp * compute, pp * layers * one.tensor, pp * layers * one.host, pp * handed


def cache_bytes(machine: Machine, sizes: Sizes, degrees: Degrees, call: Call, sequences: int) -> float:
    """Of `sequences` whole sequences of one replica, on each device."""
    return machine.storage.weight * sequences * (call.prompt + call.steps) * sizes.cached(degrees.tp, degrees.pp)
