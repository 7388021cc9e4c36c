"""Models on ranks of their own compute at the same time: forwards of the rollout, training, optimizer steps."""

from __future__ import annotations

from compiler.compile import compile_program
from tests.distributed.judging import Subject, told

PLAN = "\nplan:\n    actor: devices(1)\n    ref: devices(1)\n    reward: colocate(ref)\n    critic: devices(1)\n"
PPO = Subject("ppo", "tiny", {"b": "8", "e": "3", "run.steps": "2"})  # two epochs of four mini-batches


def test_calls_of_different_ranks_meet(programs, tmp_path):
    plan = compile_program(PPO.checked(PLAN, programs), ranks=3)
    assert {g.models: g.first for g in plan.groups} == {("actor",): 0, ("ref", "reward"): 1, ("critic",): 2}
    (tmp_path / "plan.json").write_text(plan.to_json())
    (met,) = told(3, "overlap_cases", tmp_path / "plan.json", tmp_path / "scratch")
    actor, ref, critic = met["by rank"]
    assert actor == {"forward": 2, "train": 16, "step": 16} == critic
    # The scorer on ref's rank meets nobody.
    assert ref == {"forward": 2}
