"""The order of a plan lets models on different ranks compute at once: nothing between two calls waits needlessly."""

from __future__ import annotations

import networkx as nx
import pytest

from compiler.compile import compile_program
from compiler.ir import FlowGraph
from compiler.passes.schedule import COMPUTING
from compiler.plan import Plan, UpdateLoop
from tests.compiling import CLUSTER, PROGRAMS, checked_text, shipped

NAMES = sorted(p.stem for p in PROGRAMS.glob("*.rlflow"))
WITH_KEEP = """
dim b = 8
dim t <= 16
data prompts[b] = jsonl("prompts.jsonl", "prompt")
model actor = policy("MODEL") trained by adamw(lr=1e-4)
model ref = policy("MODEL")
model reward = scorer("MODEL")
rollout:
    y[b, t] = actor.generate(prompts)
    r = reward.score(y)
    keep if r > 0
    logp = actor.logprobs(y)
    kl = mean(sum[t](logp - ref.logprobs(y)))
    metric kl = kl
update:
    train actor to maximize mean(actor.logprobs(y) - logp)
run:
    steps = 1
"""
IN_TWO_WAVES = """
dim b = 8
dim t <= 16
dim s <= 16
data prompts[b] = jsonl("prompts.jsonl", "prompt")
model actor = policy("MODEL") trained by adamw(lr=1e-4)
model ref = policy("MODEL")
model judge = policy("MODEL")
rollout:
    y[b, t] = actor.generate(prompts)
    kl = actor.logprobs(y) - ref.logprobs(y)
    metric kl = mean(kl)
    z[b, s] = judge.generate(y.text)
    metric surprise = mean(ref.logprobs(z))
update:
    train actor to maximize mean(actor.logprobs(y) * kl)
run:
    steps = 1
"""
PPO = """
dim b = 8
dim t <= 16
data prompts[b] = jsonl("prompts.jsonl", "prompt")
model actor = policy("MODEL") trained by adamw(lr=1e-4)
model ref = policy("MODEL")
model critic = value("MODEL") trained by adamw(lr=1e-4)
model reward = scorer("MODEL")
rollout:
    y[b, t] = actor.generate(prompts)
    logp_old = actor.logprobs(y)
    kl = logp_old - ref.logprobs(y)
    r = at_end[t](reward.score(y)) - kl
    v_old = critic.values(y)
    adv = whiten(r - v_old)
update(epochs=2, minibatches=2):
    train actor to maximize mean(exp(actor.logprobs(y) - logp_old) * adv)
    train critic to minimize mean((critic.values(y) - r) ** 2)
plan:
    actor: devices(2)
    ref: devices(1)
    critic: devices(1)
    reward: colocate(ref)
run:
    steps = 1
"""


def scheduled(checked) -> FlowGraph:
    seen = {}
    compile_program(checked, CLUSTER, 4, lambda stage, graph, seconds: seen.update({stage: graph}))
    return seen["schedule"]


def needless_waits(graph: FlowGraph) -> list[str]:
    """Operations between two calls that wait for the first, though no call up to the second needs them."""
    index, found = graph.index(), []
    calls = [i for i, op in enumerate(graph.ops) if op.kind in COMPUTING and op.kind != "reshard"]
    for x in calls:
        later = nx.descendants(index, x)
        for y in (y for y in calls if y > x and graph.ops[y].phase == graph.ops[x].phase and y not in later):
            between = {i for i in range(x + 1, y) if i in later and not later & nx.ancestors(index, i) & set(calls)}
            needed = set().union(*(nx.ancestors(index, c) | {c} for c in calls if c <= y))
            fences = [i for i in range(x + 1, y) if graph.ops[i].kind == "keep"]
            found += [f"{graph.ops[i].name} before {graph.ops[y].name}" for i in between - needed if not fences]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_no_call_waits_for_one_that_it_does_not_depend_on(tmp_path, name):
    assert needless_waits(scheduled(shipped(tmp_path, name))) == []


@pytest.mark.parametrize("text", [WITH_KEEP, IN_TWO_WAVES])
def test_nor_in_other_shapes(tmp_path, text):
    assert needless_waits(scheduled(checked_text(tmp_path, text))) == []


def test_a_needless_wait_would_be_seen(tmp_path):
    """In the order of the source each call's results come home before the next call begins."""
    seen = {}
    compile_program(shipped(tmp_path, "ppo"), CLUSTER, 4, lambda stage, graph, seconds: seen.update({stage: graph}))
    assert needless_waits(seen["reshard"])


def kinds(steps) -> list[str]:
    """`op model` of the steps that compute or move, `step` of others."""
    return [f"{s.op} {s.call}" if s.op == "transfer" else f"{s.op} {s.model}" if hasattr(s, "model") else "step"
            for s in steps]


def test_models_on_ranks_of_their_own_compute_between_two_walls(tmp_path):
    """Rows leave for all calls, all calls compute, results come home: nothing of one call stands between two others."""
    plan: Plan = compile_program(checked_text(tmp_path, PPO), CLUSTER, 4)
    assert [(g.models, g.first, g.ranks) for g in plan.groups] == [
        (("actor",), 0, 2), (("ref", "reward"), 2, 1), (("critic",), 3, 1)]
    rollout = kinds(plan.steps)
    first = rollout.index("forward actor")
    assert rollout[first - 4:first + 4] == [
        "transfer logp_old", "transfer ref.logprobs(y)", "transfer reward.score(y)", "transfer v_old",
        "forward actor", "forward ref", "forward reward", "forward critic"]
    loop = next(s for s in plan.steps if isinstance(s, UpdateLoop))
    body = [step for step in kinds(loop.body) if step != "step"]
    first = body.index("train actor")
    assert body[first - 2:first + 4] == [
        "transfer update/train actor", "transfer update/train critic",
        "train actor", "optimizer actor", "train critic", "optimizer critic"]


CURRENT = """
update(epochs=2, minibatches=2):
    train actor to maximize mean(exp(actor.logprobs(y) - logp_old) * stop(critic.values(y)))
    train critic to minimize mean((critic.values(y) - r) ** 2)
"""


def test_a_model_steps_after_all_that_it_computes_in_the_mini_batch(tmp_path):
    """The actor's objective takes the critic's current values, so the critic computes twice before it steps."""
    start, rest = PPO.split("update(", 1)
    text = start + CURRENT.lstrip() + rest[rest.index("plan:"):]
    plan: Plan = compile_program(checked_text(tmp_path, text), CLUSTER, 4)
    loop = next(s for s in plan.steps if isinstance(s, UpdateLoop))
    body = [step for step in kinds(loop.body) if not step.startswith("transfer") and step != "step"]
    assert body == ["forward critic", "train actor", "optimizer actor", "train critic", "optimizer critic"]


def test_nothing_passes_a_keep(tmp_path):
    """What stood above a `keep` sees all rows, what stood below it those that were kept."""
    graph = scheduled(checked_text(tmp_path, WITH_KEEP))
    names = [op.name for op in graph.ops]
    assert names.index("r") < names.index("keep 1") < names.index("logp")
