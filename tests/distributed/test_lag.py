"""One-step asynchrony: a run with `lag = 1` equals the oracle's on any ranks, and goes on exactly from a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from compiler.compile import compile_program
from tests.distributed.judging import Run, Subject, judge, run_plans, table, told
from tests.oracle import Oracle
from tests.running import make_desk, metrics, rlflowc

STALE = ("    metric reward = mean(score)\n",
         "    metric reward = mean(score)\n    metric stale  = mean(exp(logp_old - y.logprobs))\n")
SMALL = {"b": "5", "e": "2", "lr": "3e-4", "run.steps": "3", "run.lag": "1"}
ONE_BATCH = ("epochs=2, minibatches=4", "epochs=2, minibatches=1")
SUBJECTS = {
    "ppo": Subject("ppo", "tiny", SMALL, (ONE_BATCH, STALE, ("eval(every=10)", "eval(every=2)"))),
    "grpo": Subject("grpo", "tiny", SMALL | {"b": "4", "g": "2"}),
    "remax": Subject("remax", "tiny", SMALL),  # two responses
}
# by name: ranks, and the `plan:` section; the first is what the others are compared with
PLANS = {
    "one rank": (1, ""),
    "together": (2, "    actor.generate: parallel(tp=2)\n"),
    "sampling apart": (2, "    actor.generate: devices(1)\n"),
    "apart over tp": (4, "    actor.generate: devices(2), parallel(tp=2)\n"
                         "    actor: parallel(tp=2)\n    ref: parallel(pp=2)\n"),
    "actor apart, too": (3, "    actor: devices(1)\n    actor.generate: devices(1)\n"),
}
CASES = [(subject, plan) for subject in SUBJECTS for plan in PLANS]


def checked(programs: Path, subject: str, plan: str):
    return SUBJECTS[subject].checked("\nplan:\n" + PLANS[plan][1] if PLANS[plan][1] else "", programs)


@pytest.fixture(scope="module")
def runs(programs, tmp_path_factory) -> dict[tuple[str, str], Run]:
    plans = {f"{subject} {plan}": compile_program(checked(programs, subject, plan), ranks=PLANS[plan][0])
             for subject, plan in CASES}
    found = run_plans(plans, tmp_path_factory.mktemp("lag"))
    return {(subject, plan): Run.of_result(found[f"{subject} {plan}"]) for subject, plan in CASES}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_equals_the_oracle(runs, programs, subject, capsys):
    torch.set_num_threads(1)
    program = checked(programs, subject, "one rank")
    verdict = judge(runs[subject, "one rank"], Run.of_oracle(Oracle(program)), program)
    with capsys.disabled():
        print(table({subject: verdict}, {}))
    verdict.check()


@pytest.mark.parametrize("subject, plan", [(s, p) for s, p in CASES if p != "one rank"])
def test_equals_one_rank(runs, programs, subject, plan):
    judge(runs[subject, plan], runs[subject, "one rank"], checked(programs, subject, plan)).check()


def test_the_batch_is_one_update_old(runs):
    """The first two batches are sampled by the weights that the run begins with."""
    stale = [m["stale"] for m in runs["ppo", "one rank"].metrics if "stale" in m]
    assert abs(stale[0] - 1) < 1e-5
    assert all(abs(value - 1) > 1e-4 for value in stale[1:])


def test_sampling_and_training_meet(programs, tmp_path):
    """The sampler of the next batch and the trainer of this one wait for each other: they compute at the same time."""
    changes = (("epochs=2, minibatches=4", "epochs=1, minibatches=1"),)
    subject = Subject("ppo", "tiny", SMALL, changes)
    plan = compile_program(subject.checked("\nplan:\n    actor.generate: devices(1)\n", programs), ranks=2)
    (tmp_path / "beside.plan.json").write_text(plan.to_json())
    (met,) = told(2, "overlap_cases", tmp_path / "beside.plan.json", tmp_path / "scratch")
    assert met["by rank"] == [{"beside": 2}, {"beside": 2}]


# ---- going on from a checkpoint ------------------------------------------------------------------

@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """`whole`: a run of four steps with a checkpoint after two."""
    folder = make_desk(tmp_path_factory.mktemp("desk"))
    program = (folder / "small.rlflow").read_text().replace("every 4:", "every 2:").replace("lr=lr", "lr=1e-3")
    (folder / "lag.rlflow").write_text(program + "    lag = 1\n\nplan:\n    actor.generate: devices(1)\n")
    done = rlflowc("run", "lag.rlflow", "--ranks", 2, "--run-dir", "whole", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def resumed(desk: Path, name: str, *options: object) -> list[dict]:
    """The same run as if it had been killed in its third iteration."""
    shutil.copytree(desk / "whole", desk / name)
    shutil.rmtree(desk / name / "checkpoints" / "step-000004")
    done = rlflowc("resume", name, *options, cwd=desk)
    assert done.returncode == 0, done.stderr
    return metrics(desk / name)


def test_the_batch_that_was_sampled_ahead_is_in_the_checkpoint(desk):
    folder = desk / "whole" / "checkpoints" / "step-000002"
    assert "ahead/y.safetensors" in json.loads((folder / "checkpoint.json").read_text())["files"]
    assert not (desk / "whole" / "checkpoints" / "step-000004" / "ahead").exists()  # nothing follows


def test_a_resumed_run_is_the_run_that_was_not(desk):
    assert resumed(desk, "again") == metrics(desk / "whole")


def test_on_other_ranks_it_is_the_same_to_rounding(desk):
    for found, wanted in zip(resumed(desk, "other", "--ranks", 3), metrics(desk / "whole"), strict=True):
        assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-4, abs=1e-5), found["iteration"]


def test_without_that_batch_it_would_not_be(desk):
    """The weights that are there are one update newer than those that drew it."""
    checkpoint = desk / "stripped" / "checkpoints" / "step-000002"
    shutil.copytree(desk / "whole", desk / "stripped")
    shutil.rmtree(checkpoint / "ahead")
    shutil.rmtree(checkpoint.parent / "step-000004")
    progress = json.loads((checkpoint / "checkpoint.json").read_text())
    progress["files"].pop("ahead/y.safetensors")
    (checkpoint / "checkpoint.json").write_text(json.dumps(progress))
    done = rlflowc("resume", "stripped", cwd=desk)
    assert done.returncode == 0, done.stderr
    assert metrics(desk / "stripped") != metrics(desk / "whole")
