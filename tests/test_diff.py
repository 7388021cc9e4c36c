"""`rlflowc diff`: it says what differs, nothing that does not, and misses nothing."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from compiler.compile import compile_program
from compiler.cost import CostModel, iteration_seconds
from compiler.plan import Plan
from compiler.reading.diff import diff_json, diff_text, differences
from rlhf_dsl.cli import main
from tests.compiling import CLUSTER, compiled, model_folder, shipped
from tests.test_explain import PPO

replace = dataclasses.replace


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    return compiled(tmp_path_factory.mktemp("diff"), PPO, 4)


def other(tmp_path, *changes: tuple[str, str], ranks: int = 4) -> Plan:
    """The plan of PPO with some texts replaced."""
    text = PPO
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return compiled(tmp_path, text, ranks)


def said(before: Plan, after: Plan) -> list[str]:
    return diff_text(differences(before, after, CLUSTER)).splitlines()


def test_a_layout_is_told_as_a_person_would(tmp_path, plan):
    changed = other(tmp_path, ("actor.train: parallel(tp=2, pp=2)", "actor.train: parallel(tp=4)"))
    lines = said(plan, changed)
    assert lines[0] == "actor trains in tp4 pp1 dp1 instead of tp2 pp2 dp1"
    assert not any("critic" in line or "computed" in line for line in lines)
    costs = [CostModel(p, CLUSTER) for p in (plan, changed)]
    seconds = [iteration_seconds(c) for c in costs]
    shown = [line for line in lines if line.startswith("estimate")]
    assert (seconds[0] == seconds[1]) == (shown == [])
    assert all(f"({100 * (seconds[1] / seconds[0] - 1):+.0f} %)" in line for line in shown)


def test_transfers_are_told_by_number_and_bytes(tmp_path, plan):
    fewer = other(tmp_path, ("actor.train: parallel(tp=2, pp=2)", "ref: parallel(dp=4)"))
    assert any(line.startswith("1 transfer fewer, ") and line.endswith(" less an iteration") for line in said(plan, fewer))
    assert any(line.startswith("1 transfer more, ") for line in said(fewer, plan))


def test_a_changed_formula_is_told_where_it_changed(tmp_path, plan):
    changed = other(tmp_path, ("kl       = logp_old - ref.logprobs(y)", "kl       = 2 * (logp_old - ref.logprobs(y))"))
    assert said(plan, changed)[0] == (
        "kl is computed otherwise: kl = 2 * (logp_old - ref.logprobs(y)), instead of kl = logp_old - ref.logprobs(y)")
    assert not any(line.startswith("r is") for line in said(plan, changed))


def test_steps_that_came_and_went_have_their_names(tmp_path, plan):
    more = other(tmp_path, ("    metric kl = mean(kl)", "    metric kl = mean(kl)\n    metric value = mean(v_old)"))
    assert "metric value is new" in said(plan, more) and "metric value is gone" in said(more, plan)


def test_params_dims_and_settings_are_told(tmp_path, plan):
    changed = other(tmp_path, ("dim b = 8", "dim b = 16"), ("minibatches=2", "minibatches=4"), ("lr=1e-4)\nmodel ref", "lr=2e-4)\nmodel ref"))
    lines = said(plan, changed)
    assert "dim b 8 -> 16" in lines and "update: 4 mini-batches instead of 2" in lines
    assert "actor learns at 0.0002 instead of 0.0001" in lines


def test_models_that_move_to_other_ranks_are_told(tmp_path, plan):
    parts = [("actor.train: parallel(tp=2, pp=2)\n", ""), ("critic: parallel(pp=2)", "critic: devices(2)")]
    apart = other(tmp_path, *parts)
    lines = said(plan, apart)
    assert "critic moved from ranks 0-3 to 0-1" in lines
    assert "actor, ref and reward moved from ranks 0-3 to 2-3" in lines


def test_where_a_program_lies_and_how_it_is_laid_out_is_no_difference(tmp_path, plan):
    elsewhere = other(tmp_path, ("rollout:\n", "\n# a comment\nrollout:\n"))
    assert elsewhere.digest != plan.digest and differences(plan, elsewhere, CLUSTER) == ()
    assert said(plan, elsewhere) == ["both do the same"]


@pytest.mark.parametrize("name", ["ppo", "grpo", "sft"])
def test_no_difference_is_missed(tmp_path, name):
    """Any number or text of what a plan does is changed: something is said of it."""
    plan = compile_program(shipped(tmp_path, name), CLUSTER, 2)
    draw = random.Random(5)
    for _ in range(60):
        steps = list(plan.steps)
        i = draw.randrange(len(steps))
        fields = [f.name for f in dataclasses.fields(steps[i]) if f.name != "line" and type(getattr(steps[i], f.name)) in (int, bool)]
        fields = [f for f in fields if f not in ("expr", "prompts", "response", "index")]
        if fields:
            field = draw.choice(fields)
            value = getattr(steps[i], field)
            steps[i] = replace(steps[i], **{field: not value if isinstance(value, bool) else value + 1})
        else:
            del steps[i]
        changed = replace(plan, steps=tuple(steps))
        assert differences(plan, changed, CLUSTER), (i, fields)
        assert all(c.text and "\n" not in c.text for c in differences(plan, changed, CLUSTER))


def test_what_else_differs_is_said(plan):
    """A change that no sentence is made for does not pass for none."""
    odd = replace(plan, states={"s": 0})
    assert said(plan, odd) == ["the plans differ in `states.s`"]


def test_the_command_line(tmp_path, monkeypatch, capsys):
    model_folder(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.rlflow").write_text(PPO.replace("MODEL", "model"))
    assert main(["compile", "a.rlflow", "--ranks", "4", "-o", "a.plan.json"]) == 0
    capsys.readouterr()
    assert main(["diff", "a.plan.json", "a.rlflow", "--ranks", "4"]) == 0
    assert capsys.readouterr().out == "both do the same\n"
    (tmp_path / "a.rlflow").write_text(PPO.replace("MODEL", "model").replace("0.05 * kl", "0.06 * kl"))
    assert main(["diff", "a.plan.json", "a.rlflow", "--ranks", "4", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "rlflow.diff/1" and not found["same"] and [c["name"] for c in found["changes"]] == ["r"]
    assert main(["diff", "a.plan.json", "none.json"]) == 2
    assert "P0201" in capsys.readouterr().err


def test_json_holds_before_and_after(tmp_path, plan):
    changed = other(tmp_path, ("actor.train: parallel(tp=2, pp=2)", "actor.train: parallel(tp=4)"))
    found = json.loads(json.dumps(diff_json(differences(plan, changed, CLUSTER))))["changes"][0]
    assert (found["what"], found["name"]) == ("layout", "actor.train")
    assert (found["before"], found["after"]) == ("tp2 pp2 dp1", "tp4 pp1 dp1")
