"""vLLM in the ranks' own processes: see `vllm_cases.py`. It is installed by `make vllm`, which `make test` asks for."""

from __future__ import annotations

import json

import pytest

from compiler.compile import compile_program
from rlhf_dsl.frontend import loads
from runtime.launch import SHARED_MEMORY, job_name
from tests.distributed import judging

CLOSE = 1e-4
PROGRAM = """
dim b  = 9
dim e  = 4
dim g  = 2
dim t <= 8
dim u <= 8
dim v <= 8

data prompts[b] = jsonl("FOLDER/prompts.jsonl", "prompt")
data held[e]    = jsonl("FOLDER/prompts.jsonl", "prompt")

model actor = policy("builtin:tiny") trained by adamw(lr=3e-4)
MODELS

rollout:
    y[b, g, t] = actor.generate(prompts, temperature=1.0)
    c[b, g, u] = actor.generate(prompts, temperature=0.7)
    old        = actor.logprobs(y)
    adv        = 1.0 - 0.1 * sum[t](abs(old))

    metric plain  = max(abs(y.logprobs - DREW.logprobs(y)))
    metric cold   = max(abs(c.logprobs - DREW.logprobs(c)))
    metric stale  = max(abs(y.logprobs - old))
    metric length = mean(length[t](y))

update(epochs=1, minibatches=3):
    train actor to maximize mean(adv * exp(actor.logprobs(y) - old))

eval:
    z[e, v] = actor.generate(held, temperature=0)
    metric length = mean(length[v](z))

plan:
    PLAN

run:
    RUN
"""
AT_ONCE = {"MODELS": "", "DREW": "actor", "RUN": "steps = 2"}
# Actions come last in an iteration: `older` is the actor of one iteration ago, which has drawn the batch.
ONE_LATE = {
    "MODELS": 'model now   = policy("builtin:tiny")\nmodel older = policy("builtin:tiny")', "DREW": "older",
    "RUN": "steps = 3\n    lag = 1\n    every 1: copy(now, older), copy(actor, now)",
}
PLANS = {  # by name: ranks, the program's words, lines of `plan:`
    "dp2": (2, AT_ONCE, "actor.train: parallel(tp=1); actor.generate: parallel(tp=1), engine(vllm)"),
    "tp2": (2, AT_ONCE, "actor.train: parallel(tp=2); actor.generate: parallel(tp=2), engine(vllm)"),
    "sampler": (2, AT_ONCE, "actor.train: parallel(tp=1); actor.generate: parallel(tp=1), engine(torch)"),
    "one late": (2, ONE_LATE, "actor.generate: engine(vllm)"),
    "one late, apart": (2, ONE_LATE, "actor.generate: devices(1), engine(vllm)"),
    "one late, apart, sampler": (2, ONE_LATE, "actor.generate: devices(1)"),
    "tp2 dp2": (4, AT_ONCE, "actor.train: parallel(tp=2); actor.generate: parallel(tp=2), engine(vllm)"),
    "one late, apart, tp2": (
        4, ONE_LATE, "actor.train: parallel(tp=2); actor.generate: devices(2), parallel(tp=2), engine(vllm)"),
}
LATE = [name for name in PLANS if "late" in name]


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("vllm")
    rows = [{"prompt": f"{a}+{a + 3}="} for a in range(24)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    for name, (ranks, words, lines) in PLANS.items():
        text = PROGRAM
        for word, becomes in {**words, "FOLDER": str(folder), "PLAN": lines.replace("; ", "\n    ")}.items():
            text = text.replace(word, becomes)
        (folder / f"{name}.plan.json").write_text(compile_program(loads(text), ranks=ranks).to_json())
    ppo = judging.ROOT / "programs" / "ppo.rlflow"
    text = ppo.read_text() + "\nplan:\n    actor.generate: engine(vllm)\n"
    learning = compile_program(loads(text, {"run.steps": "10"}, str(ppo)), ranks=2)
    (folder / "ppo.plan.json").write_text(learning.to_json())
    found = []
    for ranks in (2, 4):
        found += judging.told(ranks, "vllm_cases", folder, folder / f"scratch-{ranks}")
        assert not list(SHARED_MEMORY.glob(f"{job_name(str(folder / f'scratch-{ranks}'))}*"))
    return found


@pytest.mark.parametrize("name", PLANS)
def test_log_probabilities_are_those_of_a_training_forward_after_updates(told, name):
    (metrics,) = [line["metrics"] for line in told if line.get("plan") == name]
    assert max(max(m["plain"], m["cold"]) for m in metrics if "plain" in m) < CLOSE
    assert len({m["train/actor"] for m in metrics if "plain" in m}) > 1
    assert len(metrics) == PLANS[name][1]["RUN"].count("lag") + 3  # three updates lie before the last batch was drawn


@pytest.mark.parametrize("name", LATE)
def test_with_lag_they_are_those_of_one_iteration_before(told, name):
    (metrics,) = [line["metrics"] for line in told if line.get("plan") == name]
    first, *later = [m["stale"] for m in metrics if "stale" in m]
    assert first < CLOSE and len(later) == 2 and all(stale > 10 * CLOSE for stale in later)


def test_so_they_are_with_top_p(told):
    """Every token's probability by training forwards: what may be drawn, and at what log-probability."""
    cases = {line["case"]: line["off"] for line in told if line.get("case", "").endswith("by training")}
    assert len(cases) == 4 * len(PLANS)
    assert {case: off for case, off in cases.items() if off is None or off > CLOSE} == {}


def test_ppo_learns_with_it(told):
    """The policy solves a third of the held-out sums before, and with our own sampler 0.95 after ten steps."""
    (metrics,) = [line["metrics"] for line in told if line.get("plan") == "ppo"]
    assert len(metrics) == 11 and metrics[0]["eval/success"] < 0.4 and metrics[-1]["eval/success"] > 0.8


def test_every_response_could_have_been_drawn_and_ends_as_it_says(told):
    cases = [line for line in told if "case" in line]
    assert len([c for c in cases if "repeats" in c]) == 3 * 8 + 14
    assert [c for c in cases if c["off"] is None or c["off"] > CLOSE] == []


def test_names_alone_decide_what_is_drawn(told):
    cases = [line for line in told if "repeats" in line]
    assert [c for c in cases if not (c["repeats"] and c["alike"])] == []
    random = [c for c in cases if "weights" in c["case"]]  # those of a trained model may all be alike
    assert len(random) == 14 and all(c["new"] and c["samples"] for c in random)


def test_keys_and_values_take_what_they_may(told):
    """Fewer sequences at once than are asked for, too."""
    assert [line["case"] for line in told if not line.get("bounded", True)] == []


def test_what_vllm_does_not_take_is_a_diagnostic(told):
    (refused,) = [line for line in told if "refused" in line]
    assert refused["refused"] == "R0138" and "its heads are 16 wide" in refused["message"]


def test_the_process_is_as_before(told):
    (line,) = [line for line in told if "kept" in line]
    assert all(line["kept"].values()), line
