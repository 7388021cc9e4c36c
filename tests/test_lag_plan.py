"""Plans of programs with `lag = 1`: which steps are of the next iteration, on which ranks, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Optional

import pytest

from compiler.compile import compile_program
from compiler.cost import CostModel, timeline
from compiler.explain import explain_json, explain_text
from compiler.plan import GroupSpec, Plan
from compiler.proof.verify import faults
from compiler.search.program import Searched
from rlhf_dsl.diagnostics import DiagnosticError
from rlhf_dsl.frontend import loads
from runtime.feeds.command import evaluated
from runtime.feeds.feed import feed_of
from tests.compiling import CLUSTER, checked_text

PROGRAM = """
dim b = 8
dim t <= 16
dim s <= 16
data prompts[b] = jsonl("prompts.jsonl", "prompt")
model actor = policy("MODEL") trained by adamw(lr=1e-4)
model ref = policy("MODEL")
state c = 0.0 then c + 1
rollout:
    y[b, t] = actor.generate(prompts)
    ROLLOUT
    logp = actor.logprobs(y)
    kl = logp - ref.logprobs(y)
    metric kl = mean(kl) + c
update:
    train actor to maximize mean(exp(actor.logprobs(y) - logp) * kl)
plan:
    PLAN
run:
    steps = 4
    lag = LAG
"""
ANYWHERE, LENGTH = "assume: prompt=10", "metric n = mean(length[t](y))"


def planned(tmp_path, rollout: str = LENGTH, plan: str = ANYWHERE, ranks: Optional[int] = 4, lag: int = 1,
            **options) -> Plan:
    text = PROGRAM.replace("ROLLOUT", rollout).replace("PLAN", plan).replace("LAG", str(lag))
    return compile_program(checked_text(tmp_path, text), CLUSTER, ranks, **options)


def ahead(plan: Plan) -> list[str]:
    return [step.op for step in plan.steps if getattr(step, "ahead", 0)]


def test_the_next_batch_is_sampled_between_rollout_and_update(tmp_path):
    plan = planned(tmp_path)
    ops = [("next " if getattr(step, "ahead", 0) else "") + step.op for step in plan.steps]
    at = ops.index("update")
    assert ops[at - 4:at] == ["next reshard", "next load", "next transfer", "next generate"]
    assert ops[at + 1:] == ["commit_states", "next transfer"]
    assert not [op for op in ops[:at - 4] if op.startswith("next ")]
    assert Plan.from_json(plan.to_json()) == plan


def test_without_lag_nothing_is_ahead(tmp_path):
    plan = planned(tmp_path, lag=0)
    assert ahead(plan) == [] and '"ahead"' not in plan.to_json()


def test_responses_to_responses_are_made_ahead_in_turn(tmp_path):
    plan = planned(tmp_path, "x[b, s] = ref.generate(y.text)\n    metric n = mean(length[s](x))")
    assert ahead(plan) == ["reshard", "load", "transfer", "generate", "transfer", "equation", "transfer", "generate",
                           "transfer"]
    assert [s.model for s in plan.setup] == ["ref"]


def test_sampling_may_have_ranks_of_its_own(tmp_path):
    constraints = "actor.generate: devices(2), parallel(tp=2)\n    actor: devices(1)\n    ref: parallel(dp=2)"
    plan = planned(tmp_path, plan=constraints, ranks=5)
    places = {name: (spec.first, spec.ranks, spec.within) for name, spec in plan.layouts.items()}
    assert places == {"actor.train": (0, 1, ""), "actor.generate": (1, 2, ""), "ref.forward": (3, 2, "")}
    assert [g.models for g in plan.groups] == [("actor",), (), ("ref",)]
    assert plan.groups[1] == GroupSpec((), 1, 2, samplers=("actor.generate",))
    # Every weight crosses to both ranks' halves: nothing of it is there.
    assert next(s for s in plan.steps if s.op == "reshard").total_bytes > 0


def test_without_lag_sampling_is_on_the_ranks_of_training(tmp_path):
    plan = planned(tmp_path, plan="actor.generate: devices(2)", ranks=4, lag=0)
    assert {name: (spec.first, spec.ranks) for name, spec in plan.layouts.items()} == {
        "actor.train": (0, 2), "actor.generate": (0, 2), "ref.forward": (2, 2)}


def test_a_search_puts_sampling_on_the_devices_of_training(tmp_path):
    searched = functools.partial(planned, tmp_path, ranks=None, placer=Searched())
    assert searched().layouts["actor.generate"].within == "actor.train"
    with pytest.raises(DiagnosticError, match="P0111.*a search with .actor.generate: devices"):
        searched(plan="actor.generate: devices(2)")


def test_explain_says_which_iteration_a_step_is_of(tmp_path):
    told = [line for line in explain_text(planned(tmp_path), CLUSTER).splitlines() if "of the next iteration" in line]
    assert len(told) == 5 and any("generate y, of the next iteration" in line for line in told)
    steps = explain_json(planned(tmp_path), CLUSTER, 0.0)["steps"]
    assert [step["op"] for step in steps if step["ahead"]] == ["reshard", "load", "transfer", "generate", "transfer"]


@pytest.mark.parametrize("rollout, what", [
    ("keep if mean[t](y.logprobs) < 0, refill=2", "`refill` with `lag = 1`"),
    ("keep if mean[t](y.logprobs) < 0\n    x[b, s] = ref.generate(prompts)\n    metric n = mean(length[s](x))",
     "a response below a `keep`"),
])
def test_what_only_the_iteration_knows_cannot_be_in_its_batch(tmp_path, rollout, what):
    with pytest.raises(DiagnosticError, match="P0111.*" + what.replace("`", ".")):
        planned(tmp_path, rollout)


def test_an_evaluation_on_given_numbers_is_of_one_iteration():
    """So `lag` does not show in it, not even where a run would be refused."""
    case = json.loads((Path(__file__).parent / "cases" / "keep_twice.json").read_text())
    below = "    z[b, g, s] = actor.generate(prompts)"
    lines = ["dim s <= 4", *case["program"][:13], below, *case["program"][13:]]
    responses = case["feed"]["responses"] | {"z": {"lengths": [[1, 1, 1], [1, 1, 1]]}}
    feed = feed_of("feed", {"format": "rlflow.feed/1", **case["feed"], "responses": responses})
    runs = ["\n".join([*lines, "run:", "    steps = 3", f"    lag = {lag}", ""]) for lag in (0, 1)]
    zero, one = (evaluated(loads(text, {}), feed) for text in runs)
    assert zero == one


def changed(plan: Plan, change) -> Plan:
    return dataclasses.replace(plan, steps=tuple(change(list(plan.steps))))


def _after_the_update(steps):
    """The sampler gets weights that are one update too new."""
    late = [s for s in steps if getattr(s, "ahead", 0)]
    return [s for s in steps if not getattr(s, "ahead", 0)] + late


def _two_ahead(steps):
    return [dataclasses.replace(s, ahead=2) if getattr(s, "ahead", 0) else s for s in steps]


def _not_loaded(steps):
    return [s for s in steps if s.op != "load"]


def _of_this_iteration(steps):
    return [dataclasses.replace(s, ahead=0) if s.op == "load" else s for s in steps]


@pytest.mark.parametrize("change, message", [
    (_after_the_update, "stands below what changes the weights"), (_two_ahead, "2 iterations ahead"),
    (_not_loaded, "before that is made"), (_of_this_iteration, "before that is made"),
])
def test_damage_is_found(tmp_path, change, message):
    plan = planned(tmp_path)
    assert list(faults(plan)) == []
    assert any(message in reason for reason in faults(changed(plan, change)))


def test_sampling_apart_shares_no_ranks(tmp_path):
    plan = planned(tmp_path, plan="actor.generate: devices(2)", ranks=4)
    onto = dataclasses.replace(plan.layouts["actor.generate"], first=1)
    found = dataclasses.replace(plan, layouts=plan.layouts | {"actor.generate": onto})
    assert any("`actor.generate` does not have the ranks of its group" in reason for reason in faults(found))
    groups = tuple(dataclasses.replace(g, first=1) if g.samplers else g for g in plan.groups)
    assert any("actor, ref share ranks" in reason for reason in faults(dataclasses.replace(found, groups=groups)))


def test_a_sampler_is_in_a_group_of_its_own(tmp_path):
    plan = planned(tmp_path, plan="actor.generate: devices(2)", ranks=4)
    assert [(g.members, g.first, g.ranks) for g in plan.groups] == [
        (("actor.generate",), 0, 2), (("actor", "ref"), 2, 2)]
    assert Plan.from_json(plan.to_json()) == plan
    lost = dataclasses.replace(plan, groups=plan.groups[1:])
    assert any("`actor.generate` does not have" in reason for reason in faults(lost))
    nobody = dataclasses.replace(plan.groups[0], samplers=("ref.generate",))
    assert any("the sampler `ref.generate`" in r for r in faults(dataclasses.replace(plan, groups=(nobody, plan.groups[1]))))


def test_the_next_batch_is_sampled_while_models_train(tmp_path):
    """What ranks of their own sample costs no time of those that train; each group holds what is its own."""
    costs = CostModel(planned(tmp_path, plan="actor.generate: devices(2)", ranks=4), CLUSTER)
    spans = {span.step.op: span for span in timeline(costs)}
    assert spans["generate"].start <= spans["update"].start < spans["generate"].end
    sampler, model = costs.memory("actor.generate"), costs.memory("actor")
    assert sampler.weights and sampler.cache and not (sampler.gradients or sampler.optimizer)
    assert model.optimizer and not (model.cache or model.generation)
    assert costs.peak(("actor.generate",)) == sampler.total
