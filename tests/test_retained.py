"""Trainings that go on from a forward of the rollout: which do, what it saves, and what the proof finds."""

from __future__ import annotations

import dataclasses

import pytest

from compiler.compile import compile_program
from compiler.cost import CostModel, iteration_seconds
from compiler.explain import explain_text
from compiler.offloading import Offloading
from compiler.plan import Plan
from compiler.proof.verify import faults
from compiler.reading.diff import diff_text, differences
from compiler.steps import Forward, TrainStep
from tests.compiling import CLUSTER, GROUPS, compiled, offloaded, shipped
from tests.test_verify import altered, edited

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


def test_the_shipped_ppo_with_one_mini_batch(tmp_path):
    plan = compile_program(shipped(tmp_path, "ppo"), CLUSTER, 2)
    assert retained(plan) == {}


def _fault(plan: Plan, forward: str, model: str) -> str:
    """The first fault, if the training of `model` goes on from `forward`."""
    def change(step):
        return dataclasses.replace(step, retained=forward) if step.op == "train" and step.model == model else step

    return next(faults(edited(plan, change)), "")
