"""The placement search equals an enumeration of everything, and says what it found."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from compiler.catalog import model_shape
from compiler.cost.layouts import Degrees
from compiler.cost.workload import FORWARD, GENERATE, TRAIN, Asked, Call, PlacedModel, Stage, Workload, ppo
from compiler.machine import Engine, Machine
from compiler.search import search
from compiler.search.fronts import Fronts
from compiler.search.options import Choice, Option, options
from compiler.search.placement import DEVICE_HOURS, TIME
from compiler.search.thinning import COARSE, EXACT

SHAPE = model_shape("llama-3.2-1b")


def machine(nodes: int, each: int, memory: float = 80e9, name: str = "m") -> Machine:
    return Machine(name, nodes, each, 3e14, memory, 2e12, 3e11, 2.5e10, 3e10, 1e-5, 2e-5)


# ---- enumeration ---------------------------------------------------------------------------------

def enumerate_best(workload: Workload, machines, table, objective: str) -> float:
    """Every partition that `plan:` allows, every number of devices of every pool, every option of every model; nothing
    is pruned."""
    names = range(len(workload.models))
    best = float("inf")
    for labels in itertools.product(names, repeat=len(names)):
        if any(label > max(labels[:i], default=-1) + 1 for i, label in enumerate(labels)):
            continue  # the same partition under other labels
        sets = [[m for m in names if labels[m] == label] for label in range(max(labels) + 1)]
        named = [{workload.models[m].name for m in members} for members in sets]
        if not all(any({*pair} <= names_ for names_ in named) for pair in workload.together):
            continue
        if any(0 < len(names_ & {*alone}) < max(len(names_), len(alone)) for alone in workload.alone for names_ in named):
            continue
        ways = [list(_ways(members, machines, table)) for members in sets]
        for chosen in itertools.product(*ways):
            best = min(best, _value(chosen, machines, objective))
    return best


def _ways(members, machines, table):
    """(pool, devices, seconds by stage) of a set."""
    for pool, m in enumerate(machines):
        counts = [n for n in range(1, m.devices + 1)
                  if (n < m.devices_per_node and m.devices_per_node % n == 0) or n % m.devices_per_node == 0]
        for n in counts:
            for each in itertools.product(*(table(member, pool, n) for member in members)):
                if sum(o.resident for o in each) + max(o.work for o in each) <= m.usable:
                    yield pool, n, tuple(sum(o.times[i] for o in each) for i in range(len(each[0].times)))


def _value(chosen, machines, objective) -> float:
    used = [sum(n for pool, n, _ in chosen if pool == p) for p in range(len(machines))]
    if any(u > m.devices for u, m in zip(used, machines)):
        return float("inf")
    seconds = sum(max(times[i] for _, _, times in chosen) for i in range(len(chosen[0][2])))
    return seconds if objective == TIME else seconds * sum(used) / 3600


# ---- random tables of options --------------------------------------------------------------------

class Table(Fronts):
    """Fronts over given options instead of estimated ones."""

    def __init__(self, workload, machines, draw) -> None:
        super().__init__(workload, machines, EXACT)
        self.kinds = tuple(range(len(workload.models)))
        self.given = {}
        self.draw = draw

    def of_model(self, kind, pool, devices):
        where = (kind, pool, devices)
        if where not in self.given:
            self.given[where] = self.draw(devices)
        return self.given[where]


def random_case(seed: int) -> tuple[Workload, tuple[Machine, ...], Table, str]:
    draw = random.Random(seed)
    count = draw.choice([2, 3, 3, 4, 4, 5])
    pools = 2 if count <= 3 and draw.random() < 0.3 else 1
    shapes = {2: [(2, 8), (4, 4), (1, 16), (4, 2)], 3: [(2, 4), (2, 8), (4, 2), (1, 8)], 4: [(1, 8), (2, 4), (4, 2)],
              5: [(1, 4), (2, 2), (1, 8)]}[count]
    machines = tuple(machine(*draw.choice(shapes)) for _ in range(pools))
    models = tuple(PlacedModel(f"m{i}", "policy", SHAPE) for i in range(count))
    stages = tuple(Stage(str(i), ()) for i in range(draw.choice([1, 2, 3])))
    usable = machines[0].usable

    def option(devices: int) -> Option:
        times = tuple(0.0 if draw.random() < 0.3 else draw.uniform(1, 10) * (0.3 + 1 / devices) for _ in stages)
        resident, work = draw.uniform(0, 0.5) * usable, draw.uniform(0, 0.6) * usable
        return Option(times, resident, work, Choice(Degrees(1, 1, devices)))

    most = 3 if count <= 3 else 2
    workload = Workload(models, stages)
    table = Table(workload, machines, lambda n: tuple(option(n) for _ in range(draw.randint(0 if n < 2 else 1, most))))
    return workload, machines, table, draw.choice([TIME, TIME, DEVICE_HOURS])


@pytest.mark.parametrize("block", range(11))
def test_search_equals_enumeration_on_random_options(block):
    """220 cases of 2 to 5 models on 2 to 16 devices, some of two kinds of nodes."""
    for seed in range(20 * block, 20 * block + 20):
        workload, machines, table, objective = random_case(seed)
        expected = enumerate_best(workload, machines, table.of_model, objective)
        found = search(workload, machines, objective, fronts=table)
        assert (found is None) == (expected == float("inf")), seed
        if found is not None:
            assert found.value(objective) == pytest.approx(expected, rel=1e-12), seed


@pytest.mark.parametrize("block", range(4))
def test_search_equals_enumeration_under_constraints(block):
    """Sets that must be together, and sets that share devices with no other model."""
    apart = 0
    for seed in range(1000 + 15 * block, 1015 + 15 * block):
        workload, machines, table, objective = random_case(seed)
        draw, names = random.Random(seed), [m.name for m in workload.models]
        pair = tuple(draw.sample(names, 2))
        bound = dataclasses.replace(workload, together=(pair,) * draw.choice((0, 1)),
                                    alone=(pair,) if draw.random() < 0.5 else (pair[:1],))
        table.workload = bound
        expected, free = (enumerate_best(w, machines, table.of_model, objective) for w in (bound, workload))
        found = search(bound, machines, objective, fronts=table)
        assert (found is None) == (expected == float("inf")), seed
        if found is not None:
            assert found.value(objective) == pytest.approx(expected, rel=1e-12), seed
            apart += expected > free
    assert apart >= 3  # the constraints matter


def random_workload(seed: int) -> tuple[Workload, Machine]:
    draw = random.Random(seed)
    shapes = [model_shape(n) for n in ("llama-3.2-1b", "qwen2.5-0.5b", "qwen2.5-1.5b")]
    names = ["actor", "ref", "reward"][:draw.choice([2, 2, 3])]
    roles = {"reward": "scorer"}
    models = tuple(PlacedModel(n, roles.get(n, "policy"), draw.choice(shapes), n == "actor") for n in names)
    call = dict(rows=draw.choice([4, 8, 12]), prompt=256.0, response=float(draw.choice([128, 512])))
    workload = Workload(models, (
        Stage("generation", (Call("actor", GENERATE, **call),)),
        Stage("scoring", tuple(Call(n, FORWARD, **call) for n in names)),
        Stage("training", (Call("actor", TRAIN, **call, minibatches=2),)),
    ))
    return workload, machine(*draw.choice([(1, 2), (2, 2), (1, 4)]), memory=draw.choice([24e9, 40e9]))


@pytest.mark.parametrize("seed", range(24))
def test_search_equals_enumeration_on_estimated_options(seed):
    workload, one = random_workload(seed)
    strategy = ("", "vanilla", "all-gather", "minimal")[seed % 4]
    asked = (dataclasses.replace(m, asked=Asked(reshard=strategy)) for m in workload.models)
    workload = dataclasses.replace(workload, models=tuple(asked))
    table = {}

    def of_model(member, pool, devices):
        if (member, devices) not in table:
            table[member, devices] = options(one, workload, workload.models[member], devices, EXACT)
        return table[member, devices]

    expected = enumerate_best(workload, (one,), of_model, TIME)
    exact = search(workload, (one,), fronts=Fronts(workload, (one,), EXACT))
    coarse = search(workload, (one,), fronts=Fronts(workload, (one,), COARSE))
    assert (exact is None) == (expected == float("inf"))
    if exact is not None:
        assert exact.iteration_s == pytest.approx(expected, rel=1e-12)
        assert expected <= coarse.iteration_s * (1 + 1e-12) and coarse.iteration_s <= 1.03 * expected


# ---- what is found -------------------------------------------------------------------------------

def seven_b(names=("actor", "ref", "critic", "reward")):
    return ppo(dict.fromkeys(names, model_shape("llama-2-7b")), 1024, 1024, 1024, minibatches=8)


def test_a_placement_holds_together():
    a100 = machine(2, 8, 85e9)
    workload = seven_b()
    found = search(workload, (a100,))
    placed = [m.model for g in found.groups for m in g.models]
    assert sorted(placed) == sorted(m.name for m in workload.models)
    assert found.devices <= a100.devices
    for group in found.groups:
        assert group.peak <= a100.usable
        for one in group.models:
            assert one.choice.layout.devices == group.devices
            assert one.choice.layout.tp <= a100.devices_per_node
    assert found.stages == tuple(max(g.times[i] for g in found.groups) for i in range(3))


def test_runners_up_are_the_next_best_partitions():
    workload, machines, table, _ = random_case(5)
    found = search(workload, machines, fronts=table, keep=100)
    times = [found.iteration_s, *(a.iteration_s for a in found.alternatives)]
    assert times == sorted(times) and len(times) > 2
    fewer = search(workload, machines, fronts=table, keep=3)
    assert [fewer.iteration_s, *(a.iteration_s for a in fewer.alternatives)] == pytest.approx(times[:3])


def test_more_devices_are_never_slower_and_device_hours_use_fewer():
    workload = seven_b()
    times = [search(workload, (machine(n, 8, 85e9),)).iteration_s for n in (1, 2, 4)]
    assert times[0] > times[1] > times[2]
    thrifty = search(workload, (machine(4, 8, 85e9),), DEVICE_HOURS)
    assert thrifty.devices < 32 and thrifty.iteration_s > times[2]


def test_offload_makes_room_where_memory_is_short():
    short = machine(1, 8, 40e9)
    found = search(seven_b(), (short,))
    assert any(one.choice.offload for group in found.groups for one in group.models)


def test_nothing_fits():
    workload = ppo({n: model_shape("llama-2-70b") for n in ("actor", "ref", "critic", "reward")}, 64, 128, 128, 4)
    assert search(workload, (machine(1, 8, 85e9),)) is None


def test_a_slow_host_does_not_change_what_fits():
    slow = Machine("slow", 1, 8, 3e14, 85e9, 2e12, 3e11, 2.5e10, 3e10, 1e-5, 2e-5, engine=Engine(1e-3, 4e-4, 0.5))
    fast, late = search(seven_b(), (machine(1, 8, 85e9),)), search(seven_b(), (slow,))
    assert late.iteration_s > fast.iteration_s
