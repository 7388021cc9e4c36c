"""What a plan's proof finds: every kind of damage, and nothing in a sound plan."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from compiler.compile import compile_program
from compiler.plan import LayoutSpec, Named, Plan, UpdateLoop, sealed
from compiler.proof.arrival import arrival_faults, faults_at
from compiler.proof.verify import faults, load_plan, verify_plan, walk
from compiler.proof.wellformed import shape_of
from compiler.resharding.transitions import weight_transfer
from compiler.steps import OptimizerStep, Reshard, TrainStep, Transfer
from rlhf_dsl.diagnostics import DiagnosticError
from tests.compiling import CLUSTER, shipped

replace = dataclasses.replace


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    """PPO on four ranks; training is cut by tp, generation is not."""
    checked = shipped(tmp_path_factory.mktemp("plan"), "ppo")
    made = compile_program(checked, CLUSTER, 4)
    layouts = made.layouts | {"actor.train": LayoutSpec(4, tp=2, dp=2)}
    shape = shape_of(made, "actor")
    moved = weight_transfer(shape, "policy", layouts, "actor.train", "actor.generate").total_bytes
    assert moved > 0
    return edited(replace(made, layouts=layouts), lambda s: replace(s, total_bytes=moved) if s.op == "reshard" else s)


def edited(plan: Plan, change) -> Plan:
    """Each step as `change` gives it: another step, or None for none; those in loops too."""
    def through(steps):
        return tuple(new for s in steps if (new := change(s)) is not None)

    def deep(steps):
        return through(map(inside, steps))

    def inside(step):
        if not isinstance(step, UpdateLoop):
            return step
        return replace(step, before=through(step.before), body=through(step.body))

    return replace(plan, setup=deep(plan.setup), steps=deep(plan.steps),
                   evals=tuple(replace(e, steps=deep(e.steps)) for e in plan.evals))


def without(kind: type, **fields):
    def change(step):
        match = isinstance(step, kind) and all(getattr(step, k) == v for k, v in fields.items())
        return None if match else step

    return change


def altered(kind: type, **fields):
    return lambda step: replace(step, **fields) if isinstance(step, kind) else step


def test_a_sound_plan_has_no_faults(plan):
    assert list(faults(plan)) == []


def test_walk_gives_every_step_once_in_a_fixed_order(plan):
    steps = list(walk(plan))
    assert len({id(s) for s in steps}) == len(steps)
    assert [type(s).__name__ for s in steps] == [type(s).__name__ for s in walk(plan)]
    assert sum(isinstance(s, TrainStep) for s in steps) == 2


DAMAGE = [
    (without(Transfer, name="y to home"), "before that is made"),
    (without(Transfer, name="y to critic.train"), "is not at critic.train"),
    (without(Transfer, name="prompts to actor.generate"), "its prompts are not at actor.generate"),
    (without(Transfer, name="y, ret, v_old to critic.train"), "is not at critic.train"),
    (without(Transfer, name="update/actor.logprobs(y) to home"), "before that is made"),
    (without(Reshard), "no weights were moved to actor.generate"),
    (altered(Reshard, total_bytes=7), "says 7 bytes"),
    (altered(Reshard, src="ref.forward"), "layouts of other models"),
    (without(OptimizerStep, model="critic"), "trains actor, critic and steps actor"),
    (lambda s: replace(s, body=s.body[::-1]) if isinstance(s, UpdateLoop) else s, "after its optimizer step"),
    (altered(TrainStep, constants=()), "before that is made"),
    (altered(TrainStep, layout="critic.forward"), "unknown layout"),
    (altered(TrainStep, unit=("q",)), "unknown dim"),
    (altered(TrainStep, partial=10_000), "refers to nothing"),
    (altered(TrainStep, calls=(Named("x", -3),)), "an expression that is not there"),
    (altered(OptimizerStep, model="ref"), "steps ref"),
    (altered(Transfer, dst="home", src="home"), "not between home and a layout"),
    (altered(UpdateLoop, epochs=0), "no sound loop"),
]


@pytest.mark.parametrize("change, message", DAMAGE)
def test_damaged_steps_are_found(plan, change, message):
    found = list(faults(edited(plan, change)))
    assert found and any(message in reason for reason in found), found
    with pytest.raises(DiagnosticError) as caught:
        verify_plan(edited(plan, change))
    assert caught.value.diagnostics[0].code == "P0202" and caught.value.exit_code == 3


LAYOUTS = [
    (LayoutSpec(4, tp=3), "is not its number of ranks"), (LayoutSpec(8, dp=8), "outside the world"),
    (LayoutSpec(4, tp=4, dp=0), "number of ranks"), (LayoutSpec(2, dp=2, first=3), "outside the world"),
    (LayoutSpec(4, pp=2, dp=2, within="critic.train"), "does not lie within"),
    (LayoutSpec(4, dp=4, precision="fp8"), "no precision `fp8`"), (LayoutSpec(4, dp=4, chunks=2), "need a pipeline"),
    (LayoutSpec(4, dp=4, sequence_parallel=True), "needs tensor"), (LayoutSpec(4, 4, sharded_optimizer=True), "optimizer"),
    (LayoutSpec(4, dp=4, within="actor.generate"), "does not lie within"), (LayoutSpec(4, dp=4, engine="vllm"), "no engine `vllm`"),
]


@pytest.mark.parametrize("spec, message", LAYOUTS)
def test_layouts_that_do_not_fit_are_found(plan, spec, message):
    found = next(faults(replace(plan, layouts=plan.layouts | {"actor.train": spec})))
    assert message in found


def test_expressions_must_stand_in_order(plan):
    last = replace(plan.exprs[1], args=(5,))
    assert "does not stand above it" in next(faults(replace(plan, exprs=(plan.exprs[0], last, *plan.exprs[2:]))))


def test_each_weight_must_arrive_once(plan):
    transfer = weight_transfer(shape_of(plan, "actor"), "policy", plan.layouts, "actor.train", "actor.generate")
    assert list(arrival_faults(transfer)) == []
    wanted, boxes = transfer.dst.pieces(1), list(transfer.boxes_to(1))
    assert list(faults_at(wanted, boxes)) == []
    for wrong in (boxes[1:], [*boxes, boxes[0]]):
        assert list(faults_at(wanted, wrong)) == [f"does not get each element of `{boxes[0][0]}` once"]
    assert list(faults_at(wanted, [*boxes, ("other", (0,), (1,))])) == ["gets `other`, which it does not hold"]


# ---- files -------------------------------------------------------------------------------------

def test_a_written_plan_loads(plan, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(plan.to_json())
    assert load_plan(path) == plan


@pytest.mark.parametrize("text, message", [
    ("", "not JSON"), ("[]", "rlflow.plan/1"), ("{}", "rlflow.plan/1"),
    ('{"format": "rlflow.plan/2"}', "rlflow.plan/1"),
    (json.dumps(sealed({"format": "rlflow.plan/1"})), "`program` is missing"), ("\x00\xff", "not JSON"), ("[" * 50_000, "not JSON"),
])
def test_what_is_no_plan_is_refused(tmp_path, text, message):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(DiagnosticError) as caught:
        load_plan(path)
    assert caught.value.exit_code == 2 and message in caught.value.diagnostics[0].message


def test_a_missing_or_binary_file_is_refused(tmp_path):
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x80")
    for name in ("none.json", "b.json", "."):
        with pytest.raises(DiagnosticError) as caught:
            load_plan(tmp_path / name)
        assert caught.value.diagnostics[0].code == "P0201"


def test_a_plan_of_a_later_minor_version_may_say_more(plan, tmp_path):
    value = json.loads(plan.to_json()) | {"format": "rlflow.plan/1.3", "news": 1}
    (tmp_path / "p.json").write_text(json.dumps(sealed(value)))
    assert load_plan(tmp_path / "p.json") == plan


def test_a_file_that_was_cut_short_is_refused(plan, tmp_path):
    text = plan.to_json()
    for end in range(0, len(text) - 2, 397):
        (tmp_path / "p.json").write_text(text[:end])
        with pytest.raises(DiagnosticError):
            load_plan(tmp_path / "p.json")


ODD = (None, -1, 0, 3, 10**12, 0.5, float("inf"), True, "", "x", "home", [], [1], [[]], {}, {"op": "train"}, [None])


def test_no_damage_to_a_file_ends_in_a_traceback(plan, tmp_path):
    """Any value anywhere may be replaced or left out: the plan is read as sound, or refused by a diagnostic."""
    draw = random.Random(3)
    text = plan.to_json()
    places = [place for place in _places(json.loads(text)) if place[0] not in ("format", "digest")]
    for place in draw.sample(places, 700):
        value = json.loads(text)
        parent = value
        for key in place[:-1]:
            parent = parent[key]
        if draw.random() < 0.3:
            del parent[place[-1]]
        else:
            parent[place[-1]] = draw.choice(ODD)
        (tmp_path / "p.json").write_text(json.dumps(sealed(value)))
        try:
            load_plan(tmp_path / "p.json").expr_table()
        except DiagnosticError as error:
            assert error.diagnostics[0].code in ("P0201", "P0202")


def _places(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _places(inner, (*path, key))
