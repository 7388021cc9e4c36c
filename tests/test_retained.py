"""Trainings that go on from a forward of the rollout: which do, what it saves, and what the proof finds."""

from __future__ import annotations

import dataclasses

import pytest

from compiler.cluster_file import read_cluster
from compiler.compile import compile_program
from compiler.cost import CostModel, iteration_seconds
from compiler.explain import explain_json, explain_text
from compiler.offloading import Offloading
from compiler.plan import Plan
from compiler.proof.verify import faults
from compiler.reading.diff import diff_text, differences
from compiler.reading.report.page import report
from compiler.reading.searched import GOING_ON
from compiler.search.program import Searched
from compiler.steps import Forward, TrainStep
from rlhf_dsl.frontend import loads
from tests.compiling import CLUSTER, GROUPS, PROGRAMS, compiled, offloaded, shipped
from tests.test_verify import altered, edited
from tests.test_why import facts

ROLLOUT = """
rollout:
    y[b, g, t] = actor.generate(prompts, temperature=0.7)
    r   = reward.score(y)
    old = actor.logprobs(y)
    v   = critic.values(y)
"""
UPDATE = """
update:
    train actor to maximize mean(exp(actor.logprobs(y) - old) * (at_end[t](r) - v))
    train critic to minimize mean((critic.values(y) - v + 1) ** 2)
"""
RUN = """
run:
    steps = 2
"""
WHOLE = GROUPS + ROLLOUT + UPDATE + RUN


def retained(plan: Plan) -> dict[str, str]:
    """By trained model, the forward that its training goes on from."""
    steps = (step for loop in plan.steps if loop.op == "update" for step in loop.body)
    return {step.model: step.retained for step in steps if isinstance(step, TrainStep) and step.retained}


def test_what_the_rollout_computed_is_not_computed_again(tmp_path):
    plan = compiled(tmp_path, WHOLE)
    assert retained(plan) == {"actor": "old", "critic": "v"}
    assert Plan.from_json(plan.to_json()) == plan and not [*faults(plan)]
    assert "update/train critic, on from v" in explain_text(plan, CLUSTER)
    steps = explain_json(plan, CLUSTER, 0.0)["steps"]
    assert {step["value"]: step["retained"] for step in steps if step["retained"]} == {
        "update/train actor": "old", "update/train critic": "v"}


def test_it_is_said_of_both(tmp_path):
    plan = compiled(tmp_path, WHOLE)
    assert facts(plan, "train critic")["goes on"] == [
        "from the activations of forward v: its own forward need not be computed"]
    assert facts(plan, "v")["keeps"] == facts(plan, "forward v")["keeps"] == ["its activations, for update/train critic"]
    assert "keeps" not in facts(plan, "r") and "goes on" not in facts(plan, "step critic")
    assert "update/train critic, on from v: " in report(plan, CLUSTER, WHOLE.splitlines())


@pytest.mark.parametrize("old, new, left", [
    ("update:", "update(minibatches=2):", {}),
    ("update:", "update(epochs=2):", {}),
    ("    v   =", "    keep if std[g](r) > 0\n    v   =", {}),
    ("critic.values(y) - v", "critic.last_value(y) - r", {"actor": "old"}),
    ("critic.values(y) - v", "critic.values(y) - v + 0.1 * critic.last_value(y)", {"actor": "old"}),
    ("exp(actor.logprobs(y)", "exp(actor.logprobs(y, temperature=1.0)", {"critic": "v"}),
    ("exp(actor.logprobs(y) - old)", "exp(mean[t](actor.logprobs(y) - old))", {"actor": "old", "critic": "v"}),
])
def test_only_the_same_pass_on_the_same_rows_is(tmp_path, old, new, left):
    assert old in WHOLE
    assert retained(compiled(tmp_path, WHOLE.replace(old, new))) == left


@pytest.mark.parametrize("constraints, left", [
    ("critic: recompute(full)", {"actor": "old"}),
    ("actor.train: micro_batch(2)", {"actor": "old", "critic": "v"}),
    ("actor: parallel(pp=2)", {"critic": "v"}),
    ("actor: parallel(tp=2), sequence_parallel(true)\n    critic: optimizer(sharded), precision(bf16)",
     {"actor": "old", "critic": "v"}),
])
def test_and_only_where_the_plan_lets_it(tmp_path, constraints, left):
    assert retained(compiled(tmp_path, f"{WHOLE}\nplan:\n    {constraints}\n")) == left


def test_a_second_update_computes_anew(tmp_path):
    plan = compiled(tmp_path, GROUPS + ROLLOUT + UPDATE + UPDATE + RUN)
    loops = [[s.retained for s in loop.body if isinstance(s, TrainStep)] for loop in plan.steps if loop.op == "update"]
    assert loops == [["old", "v"], ["", ""]]


def test_what_generates_in_between_in_the_same_memory_computes_anew(tmp_path):
    (tmp_path / "judge.py").write_text("from rlhf_dsl import op\n@op\ndef hint(p: str, x: float) -> str: ...\n")
    again = "dim s <= 4\nfrom judge import hint\n" + GROUPS + ROLLOUT + """
    z[b, s] = actor.generate(hint(prompts, mean[g](sum[t](old))))
    metric again = mean(reward.score(z))
""" + UPDATE + RUN
    assert retained(compiled(tmp_path, again)) == {"critic": "v"}
    assert "the weights are others" in _fault(compiled(tmp_path, again), "old", "actor")
    ahead = compiled(tmp_path, f"{WHOLE}    lag = 1\n")  # sampling has weights of its own
    assert retained(ahead) == {"actor": "old", "critic": "v"}


def test_it_takes_memory_and_saves_a_forward(tmp_path):
    plan = compiled(tmp_path, f"{WHOLE}\nplan:\n    critic: micro_batch(2)\n")
    anew = edited(plan, altered(TrainStep, retained=""))
    costs, before = CostModel(plan, CLUSTER), CostModel(anew, CLUSTER)
    assert costs.memory("critic").activations > before.memory("critic").activations
    assert iteration_seconds(costs) < iteration_seconds(before)
    assert "goes on from the activations of a forward of the rollout" in diff_text(differences(anew, plan, CLUSTER))


def test_there_must_be_room(tmp_path):
    plan = compiled(tmp_path, WHOLE)
    anew = edited(plan, altered(TrainStep, retained=""))
    names = tuple(plan.models)
    need, least = CostModel(plan, CLUSTER).peak(names), CostModel(anew, CLUSTER).peak(names)
    (machine,) = CLUSTER.machines
    tight = dataclasses.replace(machine, memory=machine.memory * (need + least) / 2 / machine.usable)
    cluster = dataclasses.replace(CLUSTER, machines=(tight,))
    assert len(retained(compiled(tmp_path, WHOLE, cluster=cluster))) < 2


def test_models_side_by_side_save_together(tmp_path):
    """The actor saves nothing where the critic takes longer, until the critic has saved."""
    places = "critic: devices(1)", "actor: devices(2)", "ref: colocate(actor)", "reward: colocate(actor)"
    plan = compiled(tmp_path, "\n    ".join([f"{WHOLE}\nplan:", *places]) + "\n", 3)
    assert retained(plan) == {"actor": "old", "critic": "v"}


def test_what_leaves_its_ranks_retains_nothing(tmp_path):
    plan = offloaded(edited(compiled(tmp_path, WHOLE), altered(TrainStep, retained="")))
    assert Offloading(plan).layouts and not [*faults(plan)]
    assert "its memory is wanted for others" in _fault(plan, "v", "critic")


def test_the_proof_sees_what_does_not_fit(tmp_path):
    plan = compiled(tmp_path, WHOLE)
    assert "which is no forward of the rollout" in _fault(plan, "w", "critic")
    assert "the engine is another" in _fault(plan, "old", "critic")
    coarse = edited(plan, altered(Forward, micro_batch=3))
    assert "it computes something else" in next(faults(coarse))
    shuffled = edited(plan, lambda s: dataclasses.replace(s, minibatches=2) if s.op == "update" else s)
    assert "more than one mini-batch" in next(faults(shuffled))


def test_a_search_knows_nothing_of_it_and_that_is_said():
    """Retained activations come on top of what the search found, where there is room."""
    path, cluster = PROGRAMS / "ppo.rlflow", read_cluster(PROGRAMS / "clusters" / "h100-16x8.toml")
    text = path.read_text().replace("epochs=2, minibatches=4", "epochs=1, minibatches=1")
    for small in ('"builtin:tiny"', '"builtin:tiny-reward"'):
        text = text.replace(small, '"catalog:llama-2-7b"')
    checked = loads(text.replace("dim t <= 8 ", "dim t <= 256 "), {"b": "256"}, str(path))
    plan = compile_program(checked, cluster, placer=Searched())
    anew = edited(plan, altered(TrainStep, retained=""))
    assert retained(plan) == {"actor": "logp_old", "critic": "v_old"}
    assert GOING_ON in explain_text(plan, cluster) and GOING_ON not in explain_text(anew, cluster)
    assert GOING_ON.capitalize() in report(plan, cluster, ()) and GOING_ON.capitalize() not in report(anew, cluster, ())
    costs, searched = CostModel(plan, cluster), sum(plan.search.stages.values())
    assert iteration_seconds(costs) < iteration_seconds(CostModel(anew, cluster)) <= 1.05 * searched
    for group in plan.groups:
        extra = costs.peak(group.members) - CostModel(anew, cluster).peak(group.members)
        assert 0 < extra and costs.peak(group.members) <= costs.machine(group.members[0]).usable


def test_the_shipped_ppo_with_one_mini_batch(tmp_path):
    plan = compile_program(shipped(tmp_path, "ppo"), CLUSTER, 2)
    assert retained(plan) == {}


def _fault(plan: Plan, forward: str, model: str) -> str:
    """The first fault, if the training of `model` goes on from `forward`."""
    def change(step):
        return dataclasses.replace(step, retained=forward) if step.op == "train" and step.model == model else step

    return next(faults(edited(plan, change)), "")
