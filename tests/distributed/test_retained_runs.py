"""Activations that stay take the memory that is estimated, and a run that was resumed is the run that was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.compile import compile_program
from compiler.cost import CostModel
from compiler.local import local_cluster
from compiler.plan import Plan
from compiler.steps import TrainStep
from rlhf_dsl.frontend import loads
from tests.distributed.judging import told
from tests.test_retained import retained
from tests.test_verify import altered, edited

RANKS = 2
WITHIN = 1.5  # times the estimate, either way
PROGRAM = """
dim b = 128
dim t <= 32
param base = "models/qwen2"
data prompts[b] = jsonl("data/prompts.jsonl", "prompt")
model actor = policy(base) trained by adamw(lr=1e-4)
model critic = value(base) trained by adamw(lr=1e-4)

rollout:
    y[b, t] = actor.generate(prompts, min_tokens=32)
    old = actor.logprobs(y)
    v = critic.values(y)

update:
    train actor to maximize mean(exp(actor.logprobs(y) - old) * (1 - v))
    train critic to minimize mean((critic.values(y) - v + 1) ** 2)

run:
    steps = 2
    every 1: save(actor), save(critic)

plan:
    actor: parallel(tp=2), micro_batch(8)
    critic: parallel(dp=2), tokens(200)
    assume: prompt=10, response=32
"""


@pytest.fixture(scope="module")
def plans(programs) -> dict[str, Plan]:
    """What trains from forwards of the rollout, `on`, and what computes forwards of its own, `anew`."""
    plan = compile_program(loads(PROGRAM, {}, str(programs / "retained.rlflow")), ranks=RANKS)
    return {"on": plan, "anew": edited(plan, altered(TrainStep, retained=""))}


@pytest.fixture(scope="module")
def results(plans, tmp_path_factory) -> dict[str, dict]:
    folder: Path = tmp_path_factory.mktemp("retained")
    for name, plan in plans.items():
        (folder / f"{name}.plan.json").write_text(plan.to_json())
    return {found["name"]: found for found in told(RANKS, "offload_cases", folder, folder / "scratch")}


def test_the_memory_of_what_stays_is_estimated(plans, results, capsys):
    assert retained(plans["on"]) == {"actor": "old", "critic": "v"}
    costs = CostModel(plans["on"], local_cluster())
    estimated = sum(costs.memory(name).activations for name in ("actor", "critic"))
    measured = [begun["update"] - begun["forward old"] for begun in results["on"]["begun"]]
    beside = max(begun["update"] - begun["forward old"] for begun in results["anew"]["begun"])
    with capsys.disabled():
        print(f"\nestimated {estimated / 1e6:.0f} MB, measured {[round(size / 1e6) for size in measured]}")
    assert all(estimated / WITHIN <= size <= estimated * WITHIN for size in measured) and beside < estimated / 10


def test_a_run_goes_on_from_a_checkpoint(results):
    whole, resumed = results["on"], results["on"]["resumed"]
    assert whole["failed"] == "" and resumed["files"] == whole["files"]
    assert resumed["metrics"].items() <= whole["metrics"].items() and resumed["metrics"]
