"""Estimates of plans: they are those of the search, each with its reason, and steps side by side take no longer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from compiler.catalog import model_shape
from compiler.cluster import Cluster
from compiler.cluster_file import read_cluster
from compiler.compile import compile_program
from compiler.cost import CostModel, iteration_seconds, timeline
from compiler.cost.memory import idle
from compiler.machine import Engine
from compiler.plan import Plan
from compiler.reading.tables import rows_of
from compiler.search.derive import workload_of
from compiler.search.program import Searched
from compiler.steps import UpdateLoop
from rlhf_dsl.frontend import load
from tests.compiling import CLUSTER, compiled, offloaded, shipped
from tests.test_explain import PPO

ROOT = Path(__file__).resolve().parents[1]
OVERRIDES = {"base": "catalog:llama-2-7b", "b": "1024", "t": "1024"}


def searched(program: str, cluster: Cluster):
    """(plan, what the search found)"""
    found = []
    checked = load(str(ROOT / "programs" / f"{program}.rlflow"), OVERRIDES)
    return compile_program(checked, cluster, placer=Searched(told=found.append)), found[0]


@pytest.mark.parametrize("name", ["a100-16x8", "a100-1x8", "h100-16x8", "mixed"])
def test_the_plan_of_a_placement_takes_what_the_search_says(name):
    """Up to what the search does not know: which values move, and that home waits for all groups in each mini-batch."""
    cluster = read_cluster(ROOT / "programs" / "clusters" / f"{name}.toml")
    plan, found = searched("ppo", cluster)
    costs = CostModel(plan, cluster)
    assert iteration_seconds(costs) == pytest.approx(found.iteration_s, rel=0.05)
    spans = {span.step.name: span for span in timeline(costs)}
    for group in found.groups:
        for one in group.models:
            ops = ("train", "optimizer", "reload", "offload")  # in the update, or around it
            trained = [s for s in rows_of(plan) if s.step.op in ops and s.step.model == one.model and "update" in s.step.name]
            spent = sum(row.times * costs.seconds(row.step, row.part) for row in trained)
            assert spent == pytest.approx(one.option.times[2], rel=1e-3, abs=1e-2), one.model
        assert costs.peak([m.model for m in group.models]) == pytest.approx(group.peak, rel=0.2)
    assert spans["y"].end == pytest.approx(found.stages[0], rel=0.02)


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    return compiled(tmp_path_factory.mktemp("cost"), PPO, 4)


APART = PPO + "    actor: devices(4)\n    ref: colocate(actor)\n    critic: devices(2)\n"


@pytest.fixture(scope="module")
def apart(tmp_path_factory) -> Plan:
    """Three groups: actor and ref, critic, reward."""
    return compiled(tmp_path_factory.mktemp("apart"), APART, 8)


def test_every_estimate_has_a_reason(plan):
    costs = CostModel(plan, CLUSTER)
    for row in rows_of(plan):
        if costs.seconds(row.step, row.part):
            assert costs.reason(row.step, row.part), row.step


def test_on_shared_ranks_only_rows_travel_beside(plan):
    """One group: steps follow one another, and what is saved is at most the time of transfers."""
    costs = CostModel(plan, CLUSTER)
    total = sum(map(costs.seconds, plan.steps))
    moves = sum(row.times * costs.seconds(row.step, row.part) for row in rows_of(plan) if row.step.op == "transfer")
    assert total - moves <= iteration_seconds(costs) * (1 + 1e-9) <= total * (1 + 1e-9)


def test_groups_work_side_by_side(apart):
    costs, spans = CostModel(apart, CLUSTER), timeline(CostModel(apart, CLUSTER))
    assert len(apart.groups) == 3
    busy = [s for s in spans if s.groups and not isinstance(s.step, UpdateLoop)]
    for one in busy:
        for other in busy:
            if one is not other and set(one.groups) & set(other.groups):
                assert one.end <= other.start or other.end <= one.start
    trains = [s for s in spans if s.step.op == "train"]
    assert trains[0].start < trains[1].end and trains[1].start < trains[0].end
    assert iteration_seconds(costs) < sum(map(costs.seconds, apart.steps))


def test_nothing_begins_before_what_it_reads_is_there(apart):
    spans = timeline(CostModel(apart, CLUSTER))
    done = {s.step.name: s.end for s in spans if s.step.op in ("generate", "forward", "train")}
    for span in spans:
        if span.step.op == "transfer" and span.step.dst == "home":
            assert span.start >= done[span.step.call]
        if span.step.op in ("forward", "train"):
            moves = [s for s in spans if s.step.op == "transfer" and s.step.src == "home"]
            rows = [s.end for s in moves if s.step.call == span.step.name]
            assert rows and span.start >= max(rows)


def test_a_long_loop_is_followed_a_few_times(tmp_path):
    few, many = (compiled(tmp_path, PPO.replace("minibatches=2", f"minibatches={n}"), 4) for n in (4, 8))
    loops = [next(s for s in p.steps if isinstance(s, UpdateLoop)) for p in (few, many)]
    for plan, loop in zip((few, many), loops):
        costs = CostModel(plan, CLUSTER)
        span = next(s for s in timeline(costs) if s.step is loop)
        assert span.end - span.start == pytest.approx(costs.seconds(loop), rel=0.1)


# ---- lengths ---------------------------------------------------------------------------------------

def test_a_rollout_waits_for_the_longest_response_and_nothing_else_does(tmp_path):
    tails = ("", ", longest=4", ", longest=12")
    plans = [compiled(tmp_path, PPO + f"    assume: response=4{tail}\n", 4) for tail in tails]
    assert plans[2].assume == {"response": 4, "longest": 12}
    none, same, late = ({r.title: CostModel(p, CLUSTER).seconds(r.step, r.part) for r in rows_of(p)} for p in plans)
    assert none == same
    assert {title for title in none if none[title] != late[title]} == {"generate y"}
    assert late["generate y"] > 2 * none["generate y"]


def test_the_bound_of_a_response_limits_the_longest(tmp_path):
    plans = [compiled(tmp_path, PPO + f"    assume: response=4, longest={n}\n", 4) for n in (16, 1000)]
    first, second = (CostModel(p, CLUSTER) for p in plans)
    assert sum(map(first.seconds, plans[0].steps)) == sum(map(second.seconds, plans[1].steps))


def test_a_group_shares_its_prompt(tmp_path):
    """Of GRPO; the search and the plan agree on it."""
    checked = shipped(tmp_path, "grpo")
    plan = compile_program(checked, CLUSTER, 2)
    generate = next(s for s in plan.steps if s.op == "generate")
    shapes = {name: model_shape("llama-3.2-1b") for name in checked.models}
    call = next(c for s in workload_of(checked, shapes).stages for c in s.calls if c.kind == "generate" and c.counted)
    group = plan.dims["g"].size
    assert group > 1 and CostModel(plan, CLUSTER).call(generate).samples == call.samples == group


# ---- machines --------------------------------------------------------------------------------------

def on(**changes) -> Cluster:
    return Cluster("test", (dataclasses.replace(CLUSTER.machines[0], **changes),))


def test_ranks_that_share_a_device_share_its_rates(plan):
    """The test's machine has 8 devices; on 2 of them four ranks take twice as long."""
    forward = next(s for s in plan.steps if s.op == "forward" and s.model == "reward")
    compute = [next(p.seconds for p in CostModel(plan, c).estimate(forward).parts if "FLOP" in p.why)
               for c in (CLUSTER, on(devices_per_node=2))]
    assert compute[1] == pytest.approx(2 * compute[0])


def test_a_call_is_dispatched_once_an_iteration(plan):
    engines = [Engine(1e-5, 1e-5, call, step) for call, step in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))]
    costs = [CostModel(plan, on(engine=engine)) for engine in engines]
    loop = next(s for s in plan.steps if isinstance(s, UpdateLoop))
    free, dispatched, stepped = (c.seconds(loop) for c in costs)
    assert dispatched - free == pytest.approx(2)  # two models are trained
    others = [s for s in loop.body if s.op not in ("optimizer",)]
    assert stepped - free == pytest.approx(4 * len(others))


def test_what_lies_in_host_memory_comes_and_goes(plan):
    """Of a frozen model the weights come once, of a trained one all comes and goes; beside it another one is trained."""
    idle = offloaded(plan, "ref", "critic")
    before, after = CostModel(plan, CLUSTER), CostModel(idle, CLUSTER)
    rate = CLUSTER.machines[0].host
    spent = {name: sum(r.times * after.seconds(r.step) for r in rows_of(idle)
                       if r.step.op in ("reload", "offload") and r.step.model == name) for name in ("ref", "critic")}
    ref, critic = (after.memory(name) for name in ("ref", "critic"))
    assert spent["ref"] == pytest.approx(ref.weights / rate, rel=0.01)
    loop = next(s for s in idle.steps if isinstance(s, UpdateLoop))
    moved = critic.weights + loop.epochs * loop.minibatches * 2 * (critic.weights + critic.optimizer)
    assert spent["critic"] == pytest.approx(moved / rate, rel=0.01)
    assert after.peak(idle.models) < before.peak(plan.models)


KEPT = PPO.replace("critic: parallel(pp=2)", "critic: parallel(pp=2), precision(bf16), optimizer(sharded)")


def test_memory_and_time_follow_what_the_plan_says_is_kept(tmp_path, plan):
    """Sixteen bit, states cut over two data shards."""
    kept = CostModel(compiled(tmp_path, KEPT, 4), CLUSTER)
    large, small = CostModel(plan, CLUSTER).memory("critic"), kept.memory("critic")
    assert small.weights == large.weights / 2 and small.gradients == large.gradients
    assert small.optimizer == 12 / 8 * large.optimizer / 2
    assert kept.memory("ref") == CostModel(plan, CLUSTER).memory("ref")
    step = next(r.step for r in rows_of(plan) if r.title == "update/step critic")
    assert kept.seconds(step) < CostModel(plan, CLUSTER).seconds(step)


def test_sequence_parallelism_cuts_activations(tmp_path, plan):
    text = PPO.replace("actor.train: parallel(tp=2, pp=2)", "actor.train: parallel(tp=2, pp=2), sequence_parallel(true)")
    cut = CostModel(compiled(tmp_path, text, 4), CLUSTER).memory("actor").activations
    assert cut < CostModel(plan, CLUSTER).memory("actor").activations


def test_weights_of_generation_take_the_place_of_those_of_training(tmp_path, plan):
    """All but what both have lies beside them, unless their precisions differ; nor do frozen weights make room."""
    apart = compiled(tmp_path, PPO + "    actor.generate: precision(bf16)\n", 4)
    whole = CostModel(apart, CLUSTER).memory("actor").generation
    assert whole == pytest.approx(CostModel(plan, CLUSTER).memory("ref").weights / 2, rel=0.01)
    there = CostModel(plan, CLUSTER).memory("actor")
    assert there.generation == pytest.approx(2 * whole - there.weights, rel=0.1)


@pytest.mark.parametrize("name, precision", [("a100-1x8", "bf16"), ("laptop", "fp32")])
def test_a_searched_plan_says_what_was_assumed(tmp_path, name, precision):
    """What `plan:` leaves open is as the cluster file says that the software keeps it."""
    cluster = read_cluster(ROOT / "programs" / "clusters" / f"{name}.toml")
    plan = compile_program(shipped(tmp_path, "ppo"), cluster, placer=Searched())
    assert {spec.precision for spec in plan.layouts.values()} == {precision}
    sharded = {s.sharded_optimizer for n, s in plan.layouts.items() if n.endswith(".train") and s.dp > 1}
    assert sharded <= {precision == "bf16"}


def test_a_small_memory_makes_waves(plan):
    generate = next(s for s in plan.steps if s.op == "generate")
    costs = CostModel(plan, CLUSTER)
    kept = sum(idle(costs, model) for model in plan.models)
    short = CostModel(plan, on(memory=kept + costs.memory("actor").cache / 2))
    assert costs.sequences(generate) == 2 and short.sequences(generate) == 1
    assert short.seconds(generate) > costs.seconds(generate)
    assert "2 waves" in "; ".join(p.why for p in short.estimate(generate).parts)
