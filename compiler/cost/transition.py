"""Weights on their way from training to generation, by each of the strategies of `compiler.resharding.gathers`.

In closed form what the planner counts move by move: what a rank receives, what passes the link of a node, what a rank
keeps. Sets of ranks fill nodes or lie in one, tensor groups lie in a node or fill nodes. Shares are of the model, whose
tensors are taken to be cut evenly.
"""

from __future__ import annotations

import functools
import math
from typing import Iterator, NamedTuple

from compiler.cost.compute import stream
from compiler.cost.layouts import Degrees
from compiler.cost.sizes import Sizes
from compiler.machine import Machine
from compiler.resharding.gathers import ALL_GATHER, MINIMAL, VANILLA, ZERO_REDUNDANCY


class Way(NamedTuple):
    """How weights come. strategy: of `gathers.STRATEGIES`; in_order: whether a generation replica has its shards in the
    order of its ranks (`compiler.layout.in_rank_order`), as vLLM does"""

    strategy: str = ZERO_REDUNDANCY
    in_order: bool = False


USUAL = Way()


def way_of(strategy: str, engine: str) -> Way:
    """strategy, engine: as `plan.LayoutSpec` has them; "" for the usual ones"""
    return Way(strategy or ZERO_REDUNDANCY, engine == "vllm")


class Shares(NamedTuple):
    """received: by the rank that gets most; crossing: into a node from others; kept: of the model in both of a rank's
    shards, by the rank that has least of it"""

    received: float
    crossing: float
    kept: float


def transition_bytes(sizes: Sizes, train: Degrees, generate: Degrees, width: int = 2, way: Way = USUAL) -> float:
    """Bytes that the rank which gets most receives. width: of an element"""
    return width * sizes.parameters * shares(train, generate, way, train.devices).received


def transition_time(machine: Machine, sizes: Sizes, train: Degrees, generate: Degrees, way: Way = USUAL) -> float:
    each = machine.devices_per_node if machine.nodes > 1 else train.devices
    found, model = shares(train, generate, way, each), machine.storage.weight * sizes.parameters
    return passing(machine, model * found.received, model * found.crossing)


def passing(machine: Machine, received: float, crossing: float) -> float:
    """Seconds for `received` bytes to a device, `crossing` bytes into its node: over the links of the node and over its
    own, side by side. What arrives is written and read once."""
    if not received:
        return 0.0
    latency = machine.inter_latency if crossing else machine.intra_latency
    links = max(received / machine.intra, crossing / machine.node) / machine.reached.links
    return latency + links + stream(machine, 2 * received)


def generation_weight_bytes(machine: Machine, sizes: Sizes, train: Degrees, generate: Degrees,
                            way: Way = USUAL) -> float:
    """Bytes beside the training weights: the generation shard, less the training shard where that is part of it and
    is read in place."""
    width = machine.storage.weight
    if machine.storage.in_place:
        kept = shares(train, generate, way, train.devices).kept
        return width * sizes.parameters * max(1 / (generate.tp * generate.pp) - kept, 0.0)
    return width * sizes.held(generate.tp, generate.pp)


@functools.lru_cache(maxsize=200_000)
def shares(train: Degrees, generate: Degrees, way: Way, each: int) -> Shares:
    """each: devices of a node. Generation has one pipeline stage, unless it has the layout of training."""
    source = 1 / (train.tp * train.pp)
    if generate == train and (train.pp > 1 or way.strategy in (ZERO_REDUNDANCY, MINIMAL)):
        return Shares(0.0, 0.0, source)
    whole = way.strategy in (VANILLA, ALL_GATHER)
    kept = _kept(train, generate.tp, way, whole)
    received = 1 / generate.tp - kept
    if whole:
        received = 1 - (source if way.strategy == VANILLA else 1 / train.devices)
    crossing = 0.0
    if train.devices > each:
        crossing = _crossing(train, generate.tp, way, each, received)
    return Shares(received, crossing, kept)


def _kept(train: Degrees, tp: int, way: Way, whole: bool) -> float:
    """A training shard lies in its rank's generation shard as far as tp allows (`compiler.layout.generation_layout`);
    in runs of consecutive ranks, or in the order of ranks, some ranks have none of theirs."""
    nested = tp in (1, train.tp) if whole else not way.in_order or train.tp % tp == 0
    return 1 / (math.lcm(train.tp, tp) * train.pp) if nested or train.tp == 1 else 0.0


def _crossing(train: Degrees, tp: int, way: Way, each: int, received: float) -> float:
    if way.strategy == ALL_GATHER:
        return received  # one ring through all ranks
    if way.strategy == VANILLA:
        return _ring(each, train.tp * train.dp, train.tp, train.pp) * received
    one_by_one = _point_to_point(train, tp, each)
    if way.strategy == MINIMAL or train.tp % tp and tp % train.tp:
        return one_by_one
    part = _nested(tp // train.tp, train.tp) if way.in_order and tp > train.tp else 1.0
    return part * _zero_redundancy(train, tp, each) + (1 - part) * one_by_one


def _ring(each: int, stride: int, run: int, runs: int) -> int:
    """How many rings of groups enter a node. A group is `runs` runs of consecutive ranks at distances of `stride`, in a
    ring in the order of ranks; the groups between share a node."""
    return max(1, min(each, stride) // run) if runs > 1 or run > each else 0


def _point_to_point(train: Degrees, tp: int, each: int) -> float:
    """Each rank gets what it lacks of each stage from the ranks of that stage which differ from it in tp alone."""
    run = max(1, train.tp // tp)
    inside = min(1.0, each / run) / train.pp
    return sum(ranks * (1 - stages * inside) for ranks, stages in _beside(train, each)) / tp


def _zero_redundancy(train: Degrees, tp: int, each: int) -> float:
    """Ranks of a training replica with one generation shard gather what they hold: all stages, unless generation takes
    so many ranks of a tensor shard that stages alternate between them. Then the others come point to point."""
    run, near = max(1, train.tp // tp), max(1, tp // train.tp)
    turns = near // math.gcd(near, train.dp)  # every so many stages are of one group
    gathered = 1 / (tp * turns) - 1 / (max(train.tp, tp) * train.pp)
    ring = _ring(each, train.tp * train.dp * turns, run, train.pp // turns) * gathered
    lone = sum(ranks * (train.pp - train.pp // turns) - ranks / stages * (stages ** 2 - _alike(stages, turns))
               for ranks, stages in _beside(train, each))
    return ring + lone / (tp * train.pp)


def _beside(train: Degrees, each: int) -> Iterator[tuple[int, int]]:
    """(ranks of a node, how many stages of the same tensor and data shard, its own among them, are in the node)."""
    block = train.tp * train.dp
    full, more = divmod(each, block)
    for count, stages in ((more, full + 1), (block - more, full)):
        if count * stages:
            yield count * stages, stages


def _alike(stages: int, turns: int) -> int:
    """Ordered pairs of consecutive stages, a stage with itself among them, that are a multiple of `turns` apart."""
    full, more = divmod(stages, turns)
    return more * (full + 1) ** 2 + (turns - more) * full ** 2


def _nested(near: int, tp: int) -> float:
    """The part of the ranks that hold a part of their generation shard, where `near` ranks of each of `tp` tensor shards
    stand in the order of ranks."""
    places = [(turn * tp + shard) // near == shard for turn in range(near) for shard in range(tp)]
    return sum(places) / len(places)
