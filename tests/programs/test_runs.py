"""Every shipped program runs: three iterations on the built-in models, two ranks, all programs in one launch.

Metrics are finite, or null where no row took part; every model that is trained changes.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compiler.compile import compile_program
from rlhf_dsl.frontend import load, loads
from runtime.launch import mpiexec, rank_environment

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted((ROOT / "programs").glob("*.rlflow"))
NAMES = [path.stem for path in PROGRAMS]
RANKS, STEPS = 2, 3
SMALL = {"b": 8, "c": 4, "e": 6}  # rows of each root dim

REFILL = """
dim b = 8
dim g = 3
dim t <= 8
data prompts[b], answer[b] = jsonl("data/prompts.jsonl", "prompt", "answer")
from rewards.arithmetic import exact_match
model actor = policy("builtin:tiny") trained by adamw(lr=1e-4)
model reward = scorer("builtin:tiny-reward")

rollout:
    y[b, g, t] = actor.generate(prompts)
    right      = exact_match(y.text, answer)
    centred    = right - mean(right)
    metric right = mean(right)
    metric drawn = count(mean[g](right))
    keep if {condition}, refill={refill}
    score = reward.score(y)
    n     = length[t](y)
    metric kept  = count(mean[g](right))
    metric score = mean(score)
    metric words = mean(centred * n)

update:
    train actor to maximize mean(actor.logprobs(y) * score)

run:
    steps = 3
"""
# What no shipped program uses. The weights of `same` are those of the actor at the start of each iteration.
FEATURES = """
dim b = 8
dim g = 2
dim t <= 8
dim u <= 8
data prompts[b] = jsonl("data/prompts.jsonl", "prompt")
model actor  = policy("builtin:tiny") trained by adamw(lr=1e-3)
model base   = policy("builtin:tiny")
model same   = policy("builtin:tiny")
model slow   = policy("builtin:tiny")
model critic = value("builtin:tiny") trained by adamw(lr=1e-3)
model reward = scorer("builtin:tiny-reward")

rollout:
    y[b, g, t] = actor.generate(prompts, temperature=0.7, top_p=0.9)
    z[b, g, u] = reply(prompts, y.text)
    logp_old   = actor.logprobs(y)
    score      = reward.score(y)
    metric entropy    = mean(actor.entropy(y))
    metric staleness  = mean(actor.logprobs(y, temperature=0.7) - logp_old)
    metric sampler    = min(y.logprobs - logp_old)
    metric again      = mean(abs(reward.score(z) - score), where=not y.truncated)
    metric from_base  = mean(k2(logp_old, base.logprobs(y)))
    metric from_same  = mean(k2(logp_old, same.logprobs(y)))
    metric from_slow  = mean(k2(logp_old, slow.logprobs(y)))

update(minibatches=2):
    train actor to maximize mean(actor.logprobs(y) * score) + 0.01 * mean(actor.entropy(y))

update(epochs=2):
    moved = mean(abs(actor.logprobs(y) - logp_old))
    metric moved = moved
    train critic to minimize mean((critic.values(y) - score) ** 2) + mean((critic.last_value(y) - score) ** 2)

run:
    steps = 3
    every 1: copy(actor, same), ema(actor, slow, 0.5)
"""

# Programs of `refill`: by name the condition, the number of refills, and rows of a draw.
REFILLS = {
    "refill-all": ("sum[g](right) == 0", 2, 8),  # rarely true: all draws are made
    "refill-wide": ("sum[g](right) == 0", 0, 24),
    "refill-enough": ("sum[g](right) > 0", 3, 8),
    "refill-samples": ("right > 0", 3, 8),
    "refill-none": ("right > 1", 1, 8),
}
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("programs")
    for path in PROGRAMS:
        roots = [d.name for d in load(str(path), {}).dims.values() if d.root]
        sizes = {"run.steps": str(STEPS), **{root: str(SMALL[root]) for root in roots}}
        plan = compile_program(load(str(path), sizes), ranks=RANKS)
        (folder / f"{path.stem}.plan.json").write_text(plan.to_json())
    for name, (condition, draws, rows) in REFILLS.items():
        text = REFILL.format(condition=condition, refill=draws)
        plan = compile_program(loads(text, {"b": str(rows)}, str(ROOT / "programs" / f"{name}.rlflow")), ranks=RANKS)
        (folder / f"{name}.plan.json").write_text(plan.to_json())
    plan = compile_program(loads(FEATURES, {}, str(ROOT / "programs" / "features.rlflow")), ranks=RANKS)
    (folder / "features.plan.json").write_text(plan.to_json())
    launch(folder)
    names = (*NAMES, *REFILLS, "features")
    return {name: json.loads((folder / f"{name}.result.json").read_text()) for name in names}


def launch(folder: Path) -> None:
    python = [sys.executable, "-P", "-W", "ignore", "-m", "mpi4py", "-m", "tests.programs.runs", str(folder)]
    scratch = folder / "scratch"
    scratch.mkdir()
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**rank_environment(RANKS, str(scratch)), "PYTHONPATH": paths}
    command = [mpiexec(), "-n", str(RANKS), *python]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("name", NAMES)
def test_program_runs(results, name):
    result = results[name]
    assert result["finished"] and len(result["metrics"]) in (STEPS, STEPS + 1)  # an evaluation before the first counts
    for metrics in result["metrics"]:
        assert metrics and all(value is None or math.isfinite(value) for value in metrics.values()), metrics
    assert result["changed"] and all(change > 0 for change in result["changed"].values())


def test_features(results):
    result, steps = results["features"], results["features"]["metrics"]
    for metrics in steps:
        assert 0 < metrics["entropy"] < 4.7 and abs(metrics["staleness"]) < 1e-5
        assert metrics["sampler"] > -1e-4  # top-p takes tokens out: there is more for each that is left
        assert metrics["again"] < 1e-4 and metrics["moved"] > 1e-3
        assert metrics["from_same"] < 1e-8
    for metrics in steps[1:]:
        assert 0 < metrics["from_slow"] < metrics["from_base"]
    assert all(change > 0 for change in result["changed"].values())


def test_refill_is_a_larger_draw(results):
    """Rows that do not suffice are all of the iteration's: statistics above `keep` are those of every draw."""
    several, one = results["refill-all"], results["refill-wide"]
    assert several["positions"] == one["positions"] == {"b": 3 * 24}
    for left, right in zip(several["metrics"], one["metrics"], strict=True):
        assert left["kept"] < 8 and left["drawn"] == 24
        assert left == pytest.approx(right, abs=1e-5)


@pytest.mark.parametrize("name", ["refill-enough", "refill-samples"])
def test_refill_stops_when_there_are_enough(results, name):
    drawn = [metrics["drawn"] for metrics in results[name]["metrics"]]
    assert all(metrics["kept"] == 8 for metrics in results[name]["metrics"])
    assert results[name]["positions"] == {"b": sum(drawn)} and 8 < max(drawn) < 32


def test_refill_of_nothing(results):
    for metrics in results["refill-none"]["metrics"]:
        assert metrics["drawn"] == 16 and metrics["kept"] is None and metrics["score"] is None
    assert results["refill-none"]["changed"] == {"actor": 0.0}


def test_multiplier_moves(results):
    assert results["safe_rlhf"]["states"]["log_lam"] != 0
