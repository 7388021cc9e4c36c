"""The plan never changes the result: programs under many layouts equal the one-rank run, which equals the oracle.

Tokens are equal; metrics and losses differ by at most 1e-4 max(1, |y|), gradient norms by 1e-3 of the norm. A response may
leave the reference where the number that drew a token lies within 1e-4 of a tie (counted, at most 0.1 % of rows); it is then
compared with the oracle on the same tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Iterator, Optional

import pytest
import torch

from compiler.compile import compile_program
from rlhf_dsl.frontend import loads
from rlhf_dsl.typed import Checked
from runtime.launch import mpiexec, rank_environment
from tests.oracle import Oracle

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAMS = ROOT / "programs"
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1)]  # (tp, pp, dp)
REFERENCE = (1, 1, 1)
METRICS, NORMS, NEAR_TIE, MAY_PART = 1e-4, 1e-3, 1e-4, 1e-3


@dataclass(frozen=True)
class Subject:
    """A shipped program, made small. changes: (old, new) text; base: another model than `builtin:tiny`."""

    program: str
    overrides: dict[str, str]
    changes: tuple[tuple[str, str], ...] = ()
    base: str = ""
    layouts: tuple[tuple[int, int, int], ...] = tuple(LAYOUTS)

    def checked(self, plan: str, models: Path) -> Checked:
        path = PROGRAMS / f"{self.program}.rlflow"
        text = path.read_text()
        for old, new in self.changes:
            assert old in text
            text = text.replace(old, new)
        overrides = {"base": str(models / self.base)} if self.base else {}
        return loads(text + plan, self.overrides | overrides, str(path))


# Sizes that neither ranks nor micro-batches divide. Each program at a temperature of its own, one with top-p.
SUBJECTS = {
    "ppo": Subject("ppo", {"b": "12", "e": "5", "run.steps": "3"}, (("temperature=1.0", "temperature=0.8"),)),
    "grpo": Subject("grpo", {"b": "6", "g": "3", "e": "5", "run.steps": "3"}, (("temperature=1.0", "temperature=1.2, top_p=0.95"),)),
    "ppo-qwen2": Subject("ppo", {"b": "12", "e": "5", "run.steps": "3"}, (("lr=lr)", "lr=lr, weight_decay=0.1)"),), "qwen2",
                         ((1, 1, 1), (2, 1, 2), (2, 2, 1))),
    "reward_model": Subject("reward_model", {"b": "9", "run.steps": "3"}, (), "", ((1, 1, 1), (2, 1, 1), (1, 2, 2))),
}


@dataclass(frozen=True)
class Case:
    subject: str
    layout: tuple[int, int, int]
    micro_batch: int
    sampler_tp: int

    @property
    def name(self) -> str:
        tp, pp, dp = self.layout
        return f"{self.subject} tp{tp} pp{pp} dp{dp} micro{self.micro_batch} sampler{self.sampler_tp}"

    @property
    def ranks(self) -> int:
        tp, pp, dp = self.layout
        return tp * pp * dp

    def plan(self, checked: Checked) -> str:
        """The `plan:` section."""
        tp, pp, dp = self.layout
        lines = [f"    {name}: parallel(tp={tp}, pp={pp}, dp={dp}), micro_batch({self.micro_batch})" for name in checked.models]
        lines += [f"    actor.generate: parallel(tp={self.sampler_tp})"] if "actor" in checked.models else []
        return "\nplan:\n" + "\n".join(lines) + "\n"


def cases() -> list[Case]:
    """Every layout with two micro-batch sizes, the second with the sampler over two ranks where there are two."""
    return [Case(name, layout, micro, min(sampler, layout[0] * layout[1] * layout[2]))
            for name, subject in SUBJECTS.items() for layout in subject.layouts for micro, sampler in ((2, 1), (5, 2))]


CASES = cases()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with another base: Qwen2 of random weights, with biases and a tied embedding, on the built-in tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("models")
    config = Qwen2Config(
        vocab_size=104, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.15)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder / "qwen2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PROGRAMS / "models" / "tiny" / name, folder / "qwen2" / name)
    return folder


@pytest.fixture(scope="module")
def results(models, tmp_path_factory) -> dict[str, dict]:
    """What each case gave, all cases of a number of ranks in one launch."""
    folder = tmp_path_factory.mktemp("matrix")
    for case in CASES:
        checked = SUBJECTS[case.subject].checked("", models)
        plan = compile_program(SUBJECTS[case.subject].checked(case.plan(checked), models), ranks=case.ranks)
        (folder / f"{case.name}.plan.json").write_text(plan.to_json())
    for ranks in sorted({case.ranks for case in CASES}):
        launch(ranks, folder)
    found = {case.name: json.loads((folder / f"{case.name}.result.json").read_text()) for case in CASES}
    for name, result in found.items():
        result["weights"] = torch.load(folder / f"{name}.pt")
    return found


def launch(ranks: int, folder: Path) -> None:
    command = [mpiexec(), "-n", str(ranks), sys.executable, "-P", "-W", "ignore", "-m", "mpi4py", "-m", "matrix", str(folder)]
    scratch = folder / f"scratch-{ranks}"
    scratch.mkdir()
    environment = {**rank_environment(ranks, str(scratch)), "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def oracle(models):
    @cache
    def ran(subject: str) -> "Run":
        return Run.of_oracle(Oracle(SUBJECTS[subject].checked("", models)))

    return ran


# ---- comparing ---------------------------------------------------------------------------------------


@dataclass
class Run:
    """metrics by iteration; tokens by response name, time and coordinates; weights by model"""

    metrics: list[dict[str, float]]
    tokens: dict[str, list[dict[tuple, list[int]]]]
    weights: dict[str, dict[str, torch.Tensor]]

    @staticmethod
    def of_oracle(oracle: Oracle) -> "Run":
        metrics = [i.metrics for i in oracle.run() if i.metrics]
        tokens = {name: [{at: r.tokens for at, r in once.items()} for once in times] for name, times in oracle.generated.items()}
        return Run(metrics, tokens, {name: w for name, w in oracle.weights().items() if oracle.models[name].optimizer})

    @staticmethod
    def of_result(result: dict) -> "Run":
        tokens = {name: [{tuple(at): row for at, row in once} for once in times] for name, times in result["responses"].items()}
        return Run(result["metrics"], tokens, result["weights"])

    @property
    def rows(self) -> int:
        return sum(len(once) for times in self.tokens.values() for once in times)

    def deviations(self, other: "Run") -> dict[str, float]:
        """The largest, as shares of what is allowed."""
        assert [m.keys() for m in self.metrics] == [m.keys() for m in other.metrics]
        found = {"metrics": 0.0, "norms": 0.0}
        for name, mine, right in self._pairs(other):
            kind, allowed = ("norms", NORMS * abs(right)) if name.endswith("/grad_norm") else ("metrics", METRICS * max(1, abs(right)))
            found[kind] = max(found[kind], abs(mine - right) / allowed)
        return found

    def _pairs(self, other: "Run") -> Iterator[tuple[str, float, float]]:
        for mine, right in zip(self.metrics, other.metrics):
            yield from ((name, mine[name], right[name]) for name in mine)

    def weight_deviation(self, other: "Run") -> float:
        assert self.weights.keys() == other.weights.keys()
        return max(float((w - other.weights[m][n]).abs().max()) for m, ws in self.weights.items() for n, w in ws.items())


@dataclass
class Verdict:
    """deviations: as shares of the allowed; parted: rows that left the reference at a near tie; margin: the largest of those"""

    deviations: dict[str, float]
    weights: float
    rows: int
    parted: int = 0
    margin: float = 0.0


def judge(run: Run, reference: Run, checked: Checked) -> Verdict:
    if run.tokens == reference.tokens:
        return Verdict(run.deviations(reference), run.weight_deviation(reference), run.rows)
    told = Oracle(checked, run.tokens)
    replayed = Run.of_oracle(told)
    margins = [r.margins for times in told.generated.values() for once in times for r in once.values() if r.margins]
    return Verdict(run.deviations(replayed), run.weight_deviation(replayed), run.rows, len(margins), max(map(max, margins), default=0.0))


@pytest.fixture(scope="module")
def verdicts(results, oracle, models) -> dict[str, Verdict]:
    """Of each case against the one-rank run of its subject; of that, under the subject's name, against the oracle."""
    found = {}
    for name, subject in SUBJECTS.items():
        mine = [case for case in CASES if case.subject == name]
        reference = Run.of_result(results[mine[0].name])
        checked = subject.checked("", models)
        found[name] = judge(reference, oracle(name), checked)
        found |= {case.name: judge(Run.of_result(results[case.name]), reference, checked) for case in mine[1:]}
    return found


NAMES = [*SUBJECTS, *(case.name for case in CASES if (case.layout, case.micro_batch) != (REFERENCE, 2))]


@pytest.mark.parametrize("name", NAMES)
def test_equals_reference(verdicts, name):
    verdict = verdicts[name]
    assert verdict.margin <= NEAR_TIE
    assert verdict.deviations == {kind: pytest.approx(0, abs=1) for kind in verdict.deviations}


def test_few_rows_part(verdicts):
    assert sum(v.parted for v in verdicts.values()) <= MAY_PART * sum(v.rows for v in verdicts.values())


@pytest.mark.parametrize("case", [case.name for case in CASES if "reward_model" not in case.name])
def test_actor_is_resharded(results, case):
    checks = results[case]["checks"]
    assert {name: c for name, c in checks.items() if c["wrong"] or c["moved"] != c["planned"]} == {}
    by_formula = [c for c in checks.values() if c["formula"] is not None]
    assert by_formula
    assert all(c["evenly_cut"] == c["formula"] for c in by_formula)


def test_programs_are_worth_comparing(results):
    """Responses of different lengths, and models that learn: else much of the above would hold of a wrong runtime too."""
    for name in ("ppo", "grpo", "ppo-qwen2"):
        run = Run.of_result(results[next(case.name for case in CASES if case.subject == name)])
        assert len({len(row) for once in run.tokens["y"] for row in once.values()}) > 1
        assert all(m["actor/grad_norm"] > 1e-3 for m in run.metrics[1:])


def test_table(verdicts, results, capsys):
    """Prints the largest deviations: metrics and norms as shares of what is allowed."""
    lines = ["", f"{'case':<52} metrics    norms  weights  parted  seconds"]
    for name, v in verdicts.items():
        spent = f"{results[name]['seconds']:8.1f}" if name in results else "  oracle"
        lines.append(f"{name:<52} {v.deviations['metrics']:7.4f}  {v.deviations['norms']:7.4f}  {v.weights:7.1e}  {v.parted:6}  {spent}")
    with capsys.disabled():
        print("\n".join(lines))
    assert len(verdicts) == len(NAMES)
