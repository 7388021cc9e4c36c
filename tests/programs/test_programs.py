"""Every shipped program, on random ragged numbers, has the value and the gradient of its paper's formula.

The formulas are plain loops, see `formulas` and `group_formulas`. Responses of one token, groups of equal rewards,
scores that are equal and rows that `keep` drops all occur; a split over shards and micro-batches changes nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

import pytest
import torch

from rlhf_dsl.cli import main
from tests.programs.subjects import PROGRAMS, SUBJECTS, Numbers, deep, flat

TOLERANCE = 1e-6
SPLITS = {"whole": (), "dp 2": ("--dp", "2"), "micro-batch 1": ("--micro-batch", "1"),
          "dp 3, micro-batch 2": ("--dp", "3", "--micro-batch", "2")}
SEEDS = range(3)

# A mistake in each program, as people make them: a test that does not see it tests nothing.
MISTAKES = {
    "ppo": ("whiten(a)", "a"),
    "ppo_ptx": ("sum[u](actor.logprobs(text))", "mean[u](actor.logprobs(text))"),
    "safe_rlhf": ("exp(next(log_lam))", "exp(log_lam)"),
    "vapo": ("_all, ret  = gae(r, v, 1, 1)", "_all, ret  = gae(r, v, 1, lam)"),
    "remax": ("togo[t](at_end[t](score) - beta * kl, 1)", "sum[t](at_end[t](score) - beta * kl)"),
    "reinforce_pp": ("beta * kl, 1))", "beta * kl, 0.9))"),
    "distill": ("temperature=heat", "temperature=1.0"),
    "grpo": ("k3(logp, logp_ref)", "k3(logp_ref, logp)"),
    "dr_grpo": ("mean(sum[t](clipped(ratio, adv, eps, eps)) / t)", "mean(clipped(ratio, adv, eps, eps))"),
    "dapo": ("mean(clipped(ratio, adv, eps_low, eps_high))", "mean(mean[t](clipped(ratio, adv, eps_low, eps_high)))"),
    "gspo": ("exp(mean[t](", "exp(sum[t]("),
    "cispo": ("stop(clip(", "(clip("),
    "rloo": ("r - (sum[g](r) - r) / (g - 1)", "r - mean[g](r)"),
    "opo": ("sum[g](n * r) / sum[g](n)", "mean[g](r)"),
    "online_dpo": ("keep if max[g](score) - min[g](score) > tie", "keep if max[g](score) - min[g](score) >= 0"),
    "dpo": ("sum[u](actor.logprobs(bad)", "mean[u](actor.logprobs(bad)"),
    "ipo": ("1 / (2 * tau)", "1 / tau"),
    "kto": ("0))", "-100))"),
    "sft": ("mean(actor.logprobs(answer))", "mean(mean[t](actor.logprobs(answer)))"),
    "reward_model": ("log_sigmoid(margin)", "log_sigmoid(0.1 * margin)"),
}


def test_every_shipped_program_is_here():
    assert SUBJECTS.keys() == MISTAKES.keys() == {path.stem for path in PROGRAMS.glob("*.rlflow")}


# ---- what is wanted ----------------------------------------------------------------------------------


@dataclass
class Wanted:
    """train: model → of each mini-batch (objective, gradient by call as nested lists); None where nothing is kept."""

    train: dict[str, list] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)


def wanted(numbers: Numbers) -> Wanted:
    subject, x = numbers.subject, numbers.iteration()
    formula = subject.formula(x)
    found = Wanted(metrics=dict(formula.metrics), state=dict(formula.state))
    steps = [rows for _ in range(subject.epochs) for rows in cuts(formula.kept, subject.minibatches)]
    nothing = not all(formula.kept.values())
    for model, objective in formula.objectives.items():
        entries = [_one(objective, rows, x.new) for rows in steps]
        found.train[model] = entries if nothing else [entry for entry in entries if entry]
    return found


def cuts(kept: Mapping[str, Any], minibatches: int) -> Iterator[dict[str, Any]]:
    """Runs of rows whose lengths differ by at most one, longer ones first."""
    for k in range(minibatches):
        cut = {}
        for root, rows in kept.items():
            short, more = divmod(len(rows), minibatches)
            start = k * short + min(k, more)
            cut[root] = list(rows)[start:start + short + (k < more)]
        yield cut


def _one(objective: Callable, rows: Mapping[str, Any], new: Mapping[str, Any]) -> Any:
    if not all(rows.values()):
        return None
    leaves = [leaf for values in new.values() for leaf in flat(values)]
    value = objective(rows)
    slopes = torch.autograd.grad(value, leaves, allow_unused=True)
    slope = {id(leaf): 0.0 if s is None else float(s) for leaf, s in zip(leaves, slopes)}
    return float(value.detach()), {call: deep(lambda leaf: slope[id(leaf)], values) for call, values in new.items()}


# ---- what is ------------------------------------------------------------------------------------------


def evaluated(program: Path, numbers: Numbers, folder: Path, *arguments: str) -> dict[str, Any]:
    feed = folder / "feed.json"
    feed.write_text(json.dumps(numbers.feed()))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["eval", str(program), "--feed", str(feed), "--json", "--no-shuffle", *arguments])
    assert code == 0, err.getvalue()
    return json.loads(out.getvalue())


def compare(answer: Mapping[str, Any], want: Wanted) -> None:
    for model, entries in want.train.items():
        got = answer["train"][model]
        assert len(got) == len(entries)
        for entry, found in zip(entries, got):
            _compare_step(entry, found)
    for key in ("metrics", "state"):
        for metric, value in getattr(want, key).items():
            assert answer[key][metric] == pytest.approx(value, abs=TOLERANCE), metric


def _compare_step(entry: Any, found: Mapping[str, Any]) -> None:
    if entry is None:
        assert found["objective"] is None and not any(flat(list(found["grad"].values())))
        return
    objective, gradient = entry
    assert found["objective"] == pytest.approx(objective, abs=TOLERANCE)
    for call, slopes in gradient.items():
        if call in found["grad"]:
            assert list(flat(found["grad"][call])) == pytest.approx(list(flat(slopes)), abs=TOLERANCE), call
        else:
            assert not any(flat(slopes)), call


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_formula(name, seed, tmp_path):
    numbers = Numbers(name, seed)
    want = wanted(numbers)
    for arguments in SPLITS.values() if seed == 0 else [SPLITS["whole"]]:
        compare(evaluated(PROGRAMS / f"{name}.rlflow", numbers, tmp_path, *arguments), want)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(name, tmp_path):
    right, wrong = MISTAKES[name]
    text = (PROGRAMS / f"{name}.rlflow").read_text()
    assert text.count(right) == 1
    program = tmp_path / "mistaken.rlflow"
    program.write_text(text.replace(right, wrong))
    (tmp_path / "rewards").symlink_to(PROGRAMS / "rewards")
    with pytest.raises(AssertionError):
        for seed in SEEDS:
            numbers = Numbers(name, seed)
            compare(evaluated(program, numbers, tmp_path), wanted(numbers))


def test_some_rows_are_dropped():
    for name in ("dapo", "online_dpo"):
        kept = [SUBJECTS[name].formula(Numbers(name, seed).iteration()).kept["b"] for seed in SEEDS]
        assert any(len(rows) < SUBJECTS[name].dims["b"] for rows in kept) and any(kept)
