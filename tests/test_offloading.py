"""Steps that bring what is offloaded and take it away, what the proof finds about them, and tensors that leave."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from compiler.compile import compile_program
from compiler.offloading import NEEDED, Offloading, with_offloading
from compiler.plan import Plan
from compiler.proof.verify import faults
from compiler.steps import Offload, Reload
from rlhf_dsl.diagnostics import DiagnosticError
from runtime.engines.host import Host, Leaving
from tests.compiling import CLUSTER, GROUPS, compiled, offloaded, shipped
from tests.test_verify import edited, without

CPU = torch.device("cpu")
REFILLED = GROUPS + """
rollout:
    y[b, g, t] = actor.generate(prompts)
    r = reward.score(y)
    keep if std[g](r) > 0, refill=2
    v = critic.last_value(y)
update:
    train actor to maximize mean(actor.logprobs(y) * r)
    train critic to minimize mean((critic.last_value(y) - r) * (critic.last_value(y) - r) + v)
run:
    steps = 2
"""
LAGGING = REFILLED.replace(", refill=2", "").replace("    steps = 2", "    steps = 2\n    lag = 1")


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    """PPO on two ranks, everything offloaded."""
    return offloaded(compile_program(shipped(tmp_path_factory.mktemp("plan"), "ppo"), CLUSTER, 2))


def turns(steps) -> list[str]:
    """`+actor.train`, `actor`, `-actor.train`: what comes, who computes, what leaves."""
    found = []
    for step in steps:
        if isinstance(step, (Reload, Offload)):
            found.append(f"{'+' if isinstance(step, Reload) else '-'}{step.layout}")
        elif step.op in NEEDED:
            found.append(step.model)
    return [name for i, name in enumerate(found) if i == 0 or found[i - 1] != name]


def test_models_take_turns(plan):
    assert turns(plan.steps) == [
        "+actor.train", "actor", "-actor.train", "+ref.forward", "ref", "-ref.forward", "+reward.forward", "reward",
        "-reward.forward", "+critic.train", "critic", "-critic.train"]
    loop = next(s for s in plan.steps if s.op == "update")
    assert not turns(loop.before)
    assert turns(loop.body) == [
        "+actor.train", "actor", "+actor.train", "actor", "-actor.train",
        "+critic.train", "critic", "+critic.train", "critic", "-critic.train"]
    wanted = [s.parts for s in loop.body if isinstance(s, Reload) and s.model == "actor"]
    assert wanted == [("weights", "gradients"), ("optimizer",)]
    assert not [*faults(plan)] and Plan.from_json(plan.to_json()) == plan


def test_nothing_is_offloaded_unasked(plan):
    kept = edited(plan, without((Reload, Offload)))
    kept = dataclasses.replace(kept, models={n: dataclasses.replace(m, offload=False) for n, m in plan.models.items()})
    assert with_offloading(kept) is kept and not [*faults(kept)]


def test_a_model_that_is_trained_alone_stays_for_the_whole_update(tmp_path):
    plan = offloaded(compile_program(shipped(tmp_path, "grpo"), CLUSTER, 2))
    loop = next(s for s in plan.steps if s.op == "update")
    assert turns(loop.before)[-1] == "+actor.train" and set(turns(loop.body)) == {"actor"}
    assert turns(plan.steps)[-1] == "-actor.train" and not [*faults(plan)]


def test_frozen_weights_are_never_written_back_and_gradients_never_move(plan):
    sizes = Offloading(plan)
    loop = next(s for s in plan.steps if s.op == "update")
    moved = [s for s in (*plan.steps, *loop.body) if isinstance(s, (Reload, Offload))]
    assert all(s.bytes == 0 for s in moved if isinstance(s, Offload) and s.model in ("ref", "reward"))
    assert all(s.bytes == sizes.size(s.layout, "weights") for s in moved if isinstance(s, Reload) and s.model == "ref")
    last = next(s for s in reversed(loop.body) if isinstance(s, Offload))
    assert last.parts == ("weights", "gradients", "optimizer")
    assert last.bytes == sizes.size("critic.train", "weights") + sizes.size("critic.train", "optimizer")


@pytest.mark.parametrize("text", [REFILLED, LAGGING], ids=["refilled", "lagging"])
def test_what_runs_again_and_what_runs_ahead_finds_its_models(tmp_path, text):
    plan = offloaded(compiled(tmp_path, text))
    assert turns(plan.steps) and not [*faults(plan)]
    ahead = [s for s in plan.steps if isinstance(s, (Reload, Offload)) and s.ahead]
    assert bool(ahead) is bool(plan.run.lag) and not any(s.layout == "actor.generate" for s in ahead)


# ---- what the proof finds

@pytest.mark.parametrize("change, reason", [
    (without(Reload, layout="ref.forward"), "lies in the host's memory"),
    (without(Offload, layout="ref.forward"), "is on the ranks that it works on"),
    (without(Reload, layout="critic.train", name="critic.train for v_old"), "lies in the host's memory"),
    (without(Offload, layout="critic.train", name="critic.train after v_old"), "is there|the ranks that it works on"),
    (lambda s: dataclasses.replace(s, bytes=7) if s.op == "reload" else s, "it says 7 bytes"),
    (lambda s: dataclasses.replace(s, bytes=7) if s.op == "offload" else s, "it says 7 bytes"),
    (lambda s: dataclasses.replace(s, parts=("weight",)) if s.op == "reload" else s, "it moves weight"),
    (lambda s: dataclasses.replace(s, layout="actor.generate") if s.op == "offload" else s, "comes and goes"),
])
def test_damage_is_found(plan, change, reason):
    found = " ".join(faults(edited(plan, change)))
    assert any(part in found for part in reason.split("|")), found


def test_a_plan_that_says_nothing_is_offloaded_has_no_such_steps(plan):
    models = {name: dataclasses.replace(spec, offload=False) for name, spec in plan.models.items()}
    assert "comes and goes" in next(faults(dataclasses.replace(plan, models=models)))


def test_a_loop_leaves_what_it_found(tmp_path):
    plan = offloaded(compile_program(shipped(tmp_path, "grpo"), CLUSTER, 2))
    steps = []
    for step in plan.steps:
        if step.op == "update":
            reloaded = tuple(s for s in step.before if s.op == "reload")
            step = dataclasses.replace(step, before=tuple(s for s in step.before if s.op != "reload"),
                                       body=(*reloaded, *step.body))
        steps.append(step)
    assert "a mini-batch finds nothing" in " ".join(faults(dataclasses.replace(plan, steps=tuple(steps))))


# ---- tensors

def test_tensors_leave_and_come_back_as_the_same_objects(tmp_path):
    whole = torch.arange(1000.0)
    view, other = whole[10:20], torch.arange(7, dtype=torch.bfloat16)
    leaving, before = Leaving([whole, view, other], Host(CPU, tmp_path)), (whole.clone(), other.clone())
    for version in (0, 0, 1):
        leaving.leave(version)
        assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
        leaving.come_back()
        assert torch.equal(whole, before[0]) and torch.equal(other, before[1]) and view.data_ptr() == whole[10:].data_ptr()
    assert not [*tmp_path.iterdir()]  # the file has no name


def test_what_has_not_changed_is_not_written_and_what_is_worth_nothing_is_0(tmp_path):
    tensor = torch.ones(5)
    leaving = Leaving([tensor], Host(CPU, tmp_path))
    leaving.leave(3)
    leaving.come_back()
    tensor.fill_(2)
    leaving.leave(3)
    leaving.come_back()
    assert tensor.eq(1).all()
    leaving.leave(None)
    leaving.come_back()
    assert tensor.eq(0).all()


def test_no_place_for_what_leaves(tmp_path):
    leaving = Leaving([torch.ones(5)], Host(CPU, tmp_path / "missing"))
    with pytest.raises(DiagnosticError, match="R0168.*there is no place for what leaves the device") as caught:
        leaving.leave(0)
    assert str(tmp_path / "missing") in str(caught.value.diagnostics[0].place)
