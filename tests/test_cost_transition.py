"""The closed form for the weights' way into generation gives what the planner counts, move by move."""

from __future__ import annotations

import itertools
import math

import pytest

from compiler.catalog import model_shape
from compiler.cost.layouts import Degrees
from compiler.cost.sizes import sizes_of
from compiler.cost.transition import Shares, Way, generation_weight_bytes, shares, transition_time
from compiler.layout import ModelLayout, in_rank_order
from compiler.machine import Machine, Reached
from compiler.resharding.gathers import ALL_GATHER, MINIMAL, STRATEGIES, VANILLA, ZERO_REDUNDANCY, transfer_by
from compiler.resharding.transitions import ORDERS
from compiler.shapes import ModelShape
from compiler.weights import WeightLayout

DEGREES = (1, 2, 4, 8)
WAYS = (*map(Way, STRATEGIES), Way(ZERO_REDUNDANCY, True), Way(MINIMAL, True))


def planned(train: Degrees, tp: int, way: Way, each: int) -> Shares:
    """Counted over tensors that all degrees cut evenly, one a layer, a layer a stage."""
    heads = math.lcm(train.tp, tp)
    shape = ModelShape("llama", 4, train.pp, heads, heads, 2, heads * train.tp * train.dp, 64)
    only = tuple(f"model.layers.{i}.mlp.gate_proj.weight" for i in range(train.pp))
    layout = ModelLayout(tuple(range(train.devices)), *train)
    made = ORDERS[way.strategy](layout, tp)
    ends = ((layout, "megatron"), (in_rank_order(made) if way.in_order else made, "torch"))
    plan = transfer_by(way.strategy, *(WeightLayout(shape, "policy", *end, only) for end in ends), 1)
    model = 4 * shape.ffn * train.pp
    return Shares(max(map(plan.bytes_received, plan.ranks)) / model, plan.busiest_node(each) / model,
                  min(1 / tp - plan.lacking(rank) / model for rank in plan.ranks))


def cases(each: int, degrees=DEGREES):
    """(training degrees, generation tp) of sets that fill at most 8 nodes or lie in one."""
    for train in itertools.starmap(Degrees, itertools.product(degrees, (1, 2, 3, 4, 8), (1, 2, 3, 4, 8))):
        fills = train.devices % each == 0 and train.devices <= 8 * each or each % train.devices == 0
        yield from ((train, tp) for tp in degrees if fills and train.devices % tp == 0 and each % tp == 0)


@pytest.mark.parametrize("way", WAYS, ids=lambda w: f"{w.strategy}{'-in-order' * w.in_order}")
@pytest.mark.parametrize("each", [2, 4, 8])
def test_the_closed_form_is_what_is_planned(way, each):
    """Tensor groups in a node or over several, stages that fill nodes or share one, pipelines that gather or not."""
    found = [(train, tp, shares(train, Degrees(tp, 1, train.devices // tp), way, each)) for train, tp in cases(each)]
    assert len(found) > 80 and any(one.crossing > one.received for _, _, one in found) != (way.strategy == ALL_GATHER)
    for train, tp, one in found:
        assert one == pytest.approx(planned(train, tp, way, each), abs=1e-9), (train, tp)


@pytest.mark.parametrize("way", WAYS, ids=lambda w: f"{w.strategy}{'-in-order' * w.in_order}")
def test_where_neither_tp_divides_the_other(way):
    """All is exact but what zero redundancy sends between nodes: at most as much as point to point, which is taken."""
    for train, tp in cases(6, (1, 2, 3, 6)):
        one, other = shares(train, Degrees(tp, 1, train.devices // tp), way, 6), planned(train, tp, way, 6)
        if way.strategy == ZERO_REDUNDANCY and other.crossing and {train.tp, tp} == {2, 3}:
            assert 0.5 * one.crossing < other.crossing <= one.crossing * (1 + 1e-9), (train, tp)
            one = one._replace(crossing=other.crossing)
        assert one == pytest.approx(other, abs=1e-9), (train, tp)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name, train, tp", [("llama-2-7b", (8, 1, 2), 2), ("llama-2-70b", (8, 8, 2), 8),
                                             ("llama-2-13b", (4, 4, 4), 2)])
def test_whole_models_are_near_it(name, train, tp, strategy):
    """Norms are left out, and that end stages hold embeddings and lack less."""
    shape, degrees = model_shape(name), Degrees(*train)
    layout = ModelLayout(tuple(range(degrees.devices)), *train)
    plan = transfer_by(strategy, WeightLayout(shape, "policy", layout, "megatron"),
                       WeightLayout(shape, "policy", ORDERS[strategy](layout, tp), "torch"), 2)
    one = shares(degrees, Degrees(tp, 1, degrees.devices // tp), Way(strategy), 8)
    model = 2 * sizes_of(shape, "policy").parameters
    assert model * one.received == pytest.approx(max(map(plan.bytes_received, plan.ranks)), rel=0.01)
    assert model * one.crossing == pytest.approx(plan.busiest_node(8), rel=0.03)


def machine(nodes: int) -> Machine:
    return Machine("m", nodes, 8, 3e14, 80e9, 1e18, 3e11, 2.5e10, 3e10, 0.0, 0.0, Reached(1.0, 1.0, 1.0, 1.0))


def test_each_device_of_a_node_fetches_its_own():
    """Two stages that fill a node each, whose 8 devices all fetch the other stage's half over the node's link."""
    sizes = sizes_of(model_shape("llama-2-7b"), "policy")
    train, alone = Degrees(1, 2, 8), Degrees(1, 1, 16)
    assert transition_time(machine(2), sizes, train, alone) == pytest.approx(2 * sizes.parameters * 8 / 2 / 2.5e10)
    assert transition_time(machine(1), sizes, train, alone) == pytest.approx(2 * sizes.parameters / 2 / 3e11)


def test_strategies_take_bytes_and_memory():
    sizes = sizes_of(model_shape("llama-2-7b"), "policy")
    train, generate = Degrees(8, 1, 2), Degrees(2, 1, 8)
    model = 2 * sizes.parameters
    way = {s: transition_time(machine(2), sizes, train, generate, Way(s)) for s in STRATEGIES}
    assert way[ZERO_REDUNDANCY] == way[MINIMAL] == pytest.approx(model * 3 / 8 / 3e11)
    assert way[VANILLA] == pytest.approx(model * 7 / 8 / 3e11)
    assert way[ALL_GATHER] == pytest.approx(model * 15 / 16 / 2.5e10)
    held = {s: generation_weight_bytes(machine(2), sizes, train, generate, Way(s)) for s in STRATEGIES}
    assert held[ZERO_REDUNDANCY] == held[MINIMAL] == pytest.approx(model * 3 / 8)
    assert held[VANILLA] == held[ALL_GATHER] == pytest.approx(model / 2)
