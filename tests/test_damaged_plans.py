"""Damaged plans: none is run, none ends in an internal error, and what the proof lets through computes the same.

A file with a damage does not have its digest any more. With the digest made anew, as by a program that writes plans,
the proof of the plan stands alone.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from compiler import codec
from compiler.compile import compile_program
from compiler.plan import Plan, sealed
from compiler.proof.verify import faults, load_plan, walk
from rlhf_dsl.diagnostics import DiagnosticError
from rlhf_dsl.frontend import loads
from runtime.feeds.answer import answer_of
from runtime.feeds.command import DTYPES, plan_for_feed
from runtime.feeds.executor import FeedExecutor
from runtime.feeds.feed import read_feed
from runtime.world import SoloWorld
from tests.compiling import CLUSTER, compiled, shipped
from tests.damage import double_step, drop_step, damaged, damaged_text, step_lists, swap_steps
from tests.test_explain import PPO
from tests.test_retained import WHOLE

SHIPPED = ("grpo", "vapo", "safe_rlhf", "online_dpo", "dapo", "ppo_ptx", "kto")
NEVER = {"double_step", "move_group", "drop_row"}  # damages after which no plan holds together
SPARE = {"equation", "statistics", "record", "action"}  # steps without which a plan still does the rest
CASES = ("ppo_clip_token_mean", "dapo_keep", "minibatches", "keep_twice", "adaptive_kl", "ptx_corpus", "gspo",
         "group_equal_rewards")


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> list[str]:
    """Plans with states, keeps, several models, evaluations and retained activations, on shared ranks and apart."""
    folder = tmp_path_factory.mktemp("damage")
    apart = PPO.replace("actor.train: parallel(tp=2, pp=2)\n", "ref: devices(1)\n").replace(
        "critic: parallel(pp=2)", "critic: devices(2)")
    plans = [compiled(folder, PPO, 4), compiled(folder, apart, 4), compiled(folder, WHOLE, 2)]
    plans += [compile_program(shipped(folder, name), CLUSTER, 2) for name in SHIPPED]
    return [plan.to_json() for plan in plans]


def changes(text: str, value: Any) -> bool:
    """Whether a file with this value says anything else than the text."""
    return json.dumps(value) != json.dumps(json.loads(text))


def test_no_damaged_file_is_taken(texts, tmp_path):
    draw, path, refused = random.Random(1), tmp_path / "p.json", 0
    while refused < 2000:
        text = draw.choice(texts)
        if draw.random() < 0.25:
            written = damaged_text(draw, text)
            if _says_the_same(text, written):
                continue
        else:
            value = damaged(draw, text)[1]
            if not changes(text, value):
                continue
            written = json.dumps(value)
        path.write_text(written)
        with pytest.raises(DiagnosticError) as caught:
            load_plan(path)
        assert caught.value.diagnostics[0].code in ("P0201", "P0202", "P0203")
        refused += 1


def _says_the_same(text: str, other: str) -> bool:
    try:
        return not changes(text, json.loads(other))
    except ValueError:
        return False


def test_the_proof_stands_alone(texts):
    """With the digest made anew nothing crashes, and a plan that is taken lacks no step that another needs."""
    draw, taken = random.Random(2), 0
    for _ in range(2400):
        text = draw.choice(texts)
        kind, value = damaged(draw, text)
        if not changes(text, value):
            continue
        plan = _taken(value)
        if plan is None or plan == Plan.from_json(text):
            continue
        taken += 1
        assert kind not in NEVER, kind
        plan.expr_table()
        if kind == "drop_step":
            assert _dropped(json.loads(text), value) in SPARE
    assert taken < 600  # most of what a damage changes is found without the digest


def _taken(value: dict) -> Plan | None:
    """The plan, if it is one and holds together."""
    try:
        plan = Plan.from_json(json.dumps(sealed(value)))
    except codec.CodecError:
        return None
    return plan if next(faults(plan), None) is None else None


def _dropped(before: dict, after: dict) -> str:
    """What kind of step is there no more."""
    for one, other in zip(step_lists(before), step_lists(after)):
        ops = [[step["op"] for step in steps] for steps in (one, other)]
        if len(ops[0]) > len(ops[1]):
            return next((a for a, b in zip(ops[0], ops[1]) if a != b), ops[0][-1])
    return "a whole list"


# ---- what is let through -------------------------------------------------------------------------

@pytest.mark.parametrize("name", CASES)
def test_plans_that_are_taken_compute_the_same(name, tmp_path):
    """Steps are dropped, doubled and swapped; a plan that still holds together gives the answer of the sound one."""
    case = json.loads((Path(__file__).parent / "cases" / f"{name}.json").read_text())
    (tmp_path / "feed.json").write_text(json.dumps({"format": "rlflow.feed/1", **case["feed"]}))
    feed = read_feed(str(tmp_path / "feed.json"))
    program = "\n".join(case["program"]) + "\n"
    checked = loads(program, {k: str(v) for k, v in feed.dims.items()}, str(tmp_path / "p.rlflow"))
    plan = plan_for_feed(checked, feed, 1, 0)
    assert list(faults(plan)) == []
    right = _answer(plan, checked, feed)
    draw, compared = random.Random(name), 0
    for _ in range(150):
        value = json.loads(plan.to_json())
        draw.choice((drop_step, double_step, swap_steps, swap_steps))(draw, value)
        other = _taken(value) if changes(plan.to_json(), value) else None
        if other is None:
            continue
        compared += 1
        told = _metrics(plan) == _metrics(other)  # a step that records one may be gone: nothing depends on it
        assert _compared(_answer(other, checked, feed), told) == _compared(right, told)
    assert compared >= 1


def _metrics(plan: Plan) -> list[str]:
    return sorted(step.name for step in walk(plan) if step.op == "record")


def _compared(answer: dict[str, Any], told: bool) -> Any:
    """Without metrics, and the objectives that are among them, where one is not recorded."""
    return _rounded({key: value for key, value in answer.items() if told or key not in ("metrics", "train")})


def _answer(plan: Plan, checked, feed) -> dict[str, Any]:
    executor = FeedExecutor(plan, checked, SoloWorld(), feed, DTYPES["f64"], True)
    executor.run_iteration(1)
    return answer_of(executor)


def _rounded(value: Any) -> Any:
    """To ten digits: sums may come in another order."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value
