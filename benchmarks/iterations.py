"""Whole iterations against TRL: the same weights, prompts and lengths, in 32 bits.

    python benchmarks/iterations.py [grpo] [ppo] [--rounds 3] [--trl PYTHON] [--ppo-trl FOLDER]

GRPO: a model of 8 million parameters, 32 prompts x 4 samples x (16 + 64) tokens, one update. PPO: four such models, 64
x (16 + 64) tokens, one epoch. Ours is `rlflowc run`, in one rank of two threads and in two ranks of one. PYTHON (this
one, if not given) has TRL; FOLDER, put before its packages, has the last version with a PPO trainer.

Whole runs are interleaved. The first iteration of each, which warms up, is left out. The share of an iteration outside the
steps of the models is that of the one rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from contenders import environment, spread
from made import model_folder, write_prompts

ITERATIONS = 3  # of a run, the first of which warms up
MICRO_BATCH = 32  # samples in one pass
GRPO = """\
dim b  = 32
dim g  = 4
dim t <= 64

data prompts[b] = jsonl("prompts.jsonl", "prompt")
from rewards import even

model actor = policy("policy") trained by adamw(lr=1e-6)

rollout:
    y[b, g, t] = actor.generate(prompts, temperature=1.0, min_tokens=64)
    r          = even(y.text)
    adv        = (r - mean[g](r)) / (std[g](r) + 1e-4)
    metric tokens = sum(length[t](y))

update(epochs=1, minibatches=1):
    logp  = actor.logprobs(y)
    ratio = exp(logp - stop(logp))
    train actor to maximize mean(min(ratio * adv, clip(ratio, 0.8, 1.2) * adv))
"""
PPO = """\
dim b  = 64
dim t <= 64

data prompts[b] = jsonl("prompts.jsonl", "prompt")

model actor  = policy("policy") trained by adamw(lr=1e-6)
model ref    = policy("policy")
model critic = value("value") trained by adamw(lr=1e-6)
model reward = scorer("scorer")

rollout:
    y[b, t] = actor.generate(prompts, temperature=1.0, min_tokens=64)
    kl      = y.logprobs - ref.logprobs(y)
    v_old   = critic.values(y)
    a, ret  = gae(at_end[t](reward.score(y)) - 0.05 * kl, v_old, 1.0, 0.95)
    adv     = whiten(a)
    metric tokens = sum(length[t](y))

update(epochs=1, minibatches=1):
    ratio = exp(actor.logprobs(y) - y.logprobs)
    train actor to maximize mean(min(ratio * adv, clip(ratio, 0.8, 1.2) * adv))
    train critic to minimize 0.1 * value_loss(critic.values(y), v_old, ret, 0.2)
"""
RUN = """
plan:
    {plan}

run:
    steps = {steps}
"""
REWARD = '''\
from rlhf_dsl import op


@op
def even(response: str) -> float:
    """1 if the last word has an even number."""
    return float(response[-1] in "02468")
'''


class Case(NamedTuple):
    """models: those of the program that compute on whole sequences, in micro-batches."""

    program: str
    prompts: int
    samples: int
    models: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return self.prompts * self.samples * (16 + 64)


CASES = {"grpo": Case(GRPO, 32, 4, ("actor.train",)),
         "ppo": Case(PPO, 64, 1, ("actor.train", "ref.forward", "critic", "reward.forward"))}
MODEL_STEPS = ("generate", "forward", "train", "optimizer")


# ---- ours


def ours(case: str, folder: Path, ranks: int, number: int) -> tuple[list[float], list[float]]:
    """(seconds of iterations, share of each that is not in the models' steps)."""
    from compiler.reading.tables import title_of
    from compiler.proof.verify import load_plan
    from compiler.proof.wellformed import all_steps

    run = folder / f"{case}-{ranks}-{number}"
    threads = max(1, 2 // ranks)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rlhf_dsl.cli", "run", f"{case}.rlflow", "--ranks", str(ranks), "--run-dir", run],
        cwd=folder, env=environment(threads), capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    steps = {title_of(step) for _, step in all_steps(load_plan(run / "plan.json")) if step.op in MODEL_STEPS}
    lines = [json.loads(line) for line in (run / "trace.jsonl").read_text().splitlines()][1:]
    shares = [1 - sum(s for name, s in line["steps"].items() if name in steps) / line["seconds"] for line in lines]
    return [line["seconds"] for line in lines], shares


# ---- TRL: each function trains and returns the seconds of its iterations


def _clock():
    import time

    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_train_begin(self, *_, **__) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_, **__) -> None:
            now = time.perf_counter()
            self.seconds.append(now - self.began)
            self.began = now

    return Clock()


def _common(folder: Path) -> dict:
    return dict(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", logging_steps=1000, disable_tqdm=True, learning_rate=1e-6)


def trl_grpo(folder: Path) -> list[float]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    case, clock = CASES["grpo"], _clock()
    settings = GRPOConfig(
        **_common(folder), max_steps=ITERATIONS, per_device_train_batch_size=case.prompts, num_generations=case.samples,
        gradient_accumulation_steps=case.samples, max_completion_length=64, temperature=1.0, beta=0.0, num_iterations=1,
        generation_kwargs={"min_new_tokens": 64}, model_init_kwargs={"dtype": "float32"})

    def reward(completions, **_) -> list[float]:
        return [float(text[-1] in "02468") for text in completions]

    GRPOTrainer(str(folder / "policy"), reward, settings, train_dataset=Dataset.from_list(_rows(folder)),
                callbacks=[clock]).train()
    return clock.seconds


def trl_ppo(folder: Path) -> list[float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    case, clock = CASES["ppo"], _clock()
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    settings = PPOConfig(
        **_common(folder), total_episodes=ITERATIONS * case.prompts, per_device_train_batch_size=case.prompts // 4,
        gradient_accumulation_steps=4, num_mini_batches=1, num_ppo_epochs=1, response_length=64, temperature=1.0,
        local_rollout_forward_batch_size=case.prompts, num_sample_generations=0)
    policy, ref = (AutoModelForCausalLM.from_pretrained(folder / "policy", dtype="float32") for _ in range(2))
    value, scorer = (
        AutoModelForSequenceClassification.from_pretrained(folder / name, dtype="float32")
        for name in ("value", "scorer"))
    rows = Dataset.from_list([{"input_ids": tokenizer(row["prompt"])["input_ids"]} for row in _rows(folder)])
    PPOTrainer(settings, tokenizer, policy, ref, scorer, rows, value, eval_dataset=rows.select(range(8)),
               callbacks=[clock]).train()
    return clock.seconds


def _rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]


def theirs(case: str, folder: Path, chosen: argparse.Namespace) -> list[float]:
    path = [chosen.ppo_trl] if case == "ppo" and chosen.ppo_trl else []
    done = subprocess.run(
        [chosen.trl, __file__, "--worker", case, str(folder)], check=True, cwd=folder, env=environment(2, *path),
        stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])[1:]


# ---- the benchmark


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="grpo|ppo", choices=[[], *CASES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--ppo-trl", metavar="FOLDER")
    parser.add_argument("--worker", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        case, folder = chosen.worker
        print(json.dumps({"grpo": trl_grpo, "ppo": trl_ppo}[case](Path(folder))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch))
        for case in chosen.cases or CASES:
            compare(case, Path(scratch), chosen)


def prepare(folder: Path) -> None:
    for seed, head in enumerate(("policy", "value", "scorer")):
        model_folder(folder / head, seed, head)
    write_prompts(folder / "prompts.jsonl", 256)
    (folder / "rewards.py").write_text(REWARD)
    for name, case in CASES.items():
        plan = "\n    ".join(f"{model}: micro_batch({MICRO_BATCH})" for model in case.models)
        (folder / f"{name}.rlflow").write_text(case.program + RUN.format(plan=plan, steps=ITERATIONS))


def compare(case: str, folder: Path, chosen: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    seconds: dict[str, list[float]] = {"1 rank, 2 threads": [], "2 ranks, 1 thread": [], "TRL": []}
    outside: dict[str, list[float]] = {name: [] for name in seconds}
    for number in range(chosen.rounds):
        for ranks, name in enumerate(list(seconds)[:2], 1):
            took, shares = ours(case, folder, ranks, number)
            seconds[name] += took
            outside[name] += shares if ranks == 1 else []  # of several, a trace has each step's slowest
        seconds["TRL"] += theirs(case, folder, chosen)
    table = Table(case, "seconds an iteration", "tokens/s", "faster than TRL by", "outside model steps")
    theirs_s = statistics.median(seconds["TRL"])
    for name, took in seconds.items():
        middle = statistics.median(took)
        share = f"{statistics.median(outside[name]):.1%}" if outside[name] else ""
        table.add_row(name, spread(took), f"{CASES[case].tokens / middle:.0f}", f"{theirs_s / middle:.2f}", share)
    Console().print(table)


if __name__ == "__main__":
    main()
