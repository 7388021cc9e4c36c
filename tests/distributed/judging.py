"""Runs plans on ranks and compares what came out: with another run, or with the oracle.

Tokens are equal; metrics and losses differ by at most 1e-4 max(1, |y|), gradient norms by 1e-3 of the norm, weights by
1e-4. A response may leave the reference where the number that drew a token lies within 1e-4 of a tie; it is then
compared with the oracle on the same tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping

import torch

from compiler.plan import Plan
from rlhf_dsl.frontend import loads
from rlhf_dsl.typed import Checked
from runtime.launch import mpiexec, rank_environment
from tests.oracle import Oracle

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENDS_WITHIN_S = 900
METRICS, NORMS, WEIGHTS, NEAR_TIE = 1e-4, 1e-3, 1e-4, 1e-4
MAY_PART = 1e-3  # of all rows
# Models with a tied head. The layers of `odd` no even number of stages divides, and its one KV head no tp.
MADE = {
    "qwen2": {"num_hidden_layers": 2, "num_key_value_heads": 2},
    "odd": {"num_hidden_layers": 3, "num_key_value_heads": 1},
}


@dataclass(frozen=True)
class Subject:
    """A shipped program, made small. base: the folder in `models` that it starts from; changes: (old, new) text."""

    program: str
    base: str
    overrides: dict[str, str]
    changes: tuple[tuple[str, str], ...] = ()

    def checked(self, plan: str, programs: Path) -> Checked:
        """plan: a `plan:` section to go with it, or ""; programs: what `shipped_programs` made."""
        path = programs / f"{self.program}.rlflow"
        text = path.read_text()
        for old, new in self.changes:
            assert old in text
            text = text.replace(old, new)
        overrides = self.overrides | {"base": f"models/{self.base}"}
        return loads(text.replace('"builtin:', '"models/') + plan, overrides, str(path))


# Questions that rounding would answer: have two equal responses the same score, is a model better than itself?
CLEAR = {
    "dpo": (("mean(chosen > rejected)", "mean(chosen > rejected + 0.001)"),),
    "ipo": (("mean(chosen > rejected)", "mean(chosen > rejected + 0.001)"),),
    "online_dpo": (("mean(chosen > rejected)", "mean(chosen > rejected + 0.001)"),),
}


def shipped_programs(folder: Path) -> Path:
    """A copy of the programs with their data and models, and more of these: `MADE`, of random weights and biases."""
    shutil.copytree(ROOT / "programs", folder)
    for name, sizes in MADE.items():
        _qwen2(sizes).save_pretrained(folder / "models" / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(folder / "models" / "tiny" / file, folder / "models" / name / file)
    return folder


def _qwen2(sizes: dict[str, int]) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=104, hidden_size=64, intermediate_size=96, num_attention_heads=4, max_position_embeddings=64,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.15, **sizes)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
    return model


def run_plans(plans: Mapping[str, Plan], folder: Path) -> dict[str, dict]:
    """What each plan gave, by its name; all plans of a number of ranks run in one launch."""
    for name, plan in plans.items():
        (folder / f"{name}.plan.json").write_text(plan.to_json())
    for ranks in sorted({plan.world for plan in plans.values()}):
        launch(ranks, folder)
    return {name: result(folder, name) for name in plans}


def launch(ranks: int, folder: Path) -> None:
    """Runs all plans in `folder` that are for this number of ranks: see `matrix.py`."""
    on_ranks(ranks, "matrix", folder, folder / f"scratch-{ranks}")


def told(ranks: int, module: str, argument: Path, scratch: Path) -> list[dict]:
    """The lines of JSON that a module of this folder prints under mpiexec."""
    lines = on_ranks(ranks, module, argument, scratch).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def on_ranks(ranks: int, module: str, argument: Path, scratch: Path) -> str:
    """Runs a module of this folder under mpiexec to its end; what it printed. scratch: a folder to make, for MPI."""
    python = [sys.executable, "-P", "-W", "ignore", "-m", "mpi4py", "-m", module, str(argument)]
    scratch.mkdir()
    environment = {**rank_environment(ranks, str(scratch)), "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}
    command = [mpiexec(), "-n", str(ranks), *python]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        out, talk = job.communicate(timeout=ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        job.terminate()  # killed, it would leave its ranks
        out, talk = job.communicate()
    assert job.returncode == 0, out[-4000:] + talk[-4000:]
    return out


def result(folder: Path, name: str) -> dict:
    """What the plan `name` gave, with its weights."""
    found = json.loads((folder / f"{name}.result.json").read_text())
    return found | {"weights": torch.load(folder / f"{name}.pt")}


@dataclass
class Run:
    """metrics by iteration; tokens by response name, time and coordinates; weights by model"""

    metrics: list[dict[str, float]]
    tokens: dict[str, list[dict[tuple, list[int]]]]
    weights: dict[str, dict[str, torch.Tensor]]

    @staticmethod
    def of_oracle(oracle: Oracle) -> "Run":
        metrics = [i.metrics for i in oracle.run() if i.metrics]
        tokens = {name: [{at: r.tokens for at, r in once.items()} for once in times]
                  for name, times in oracle.generated.items()}
        return Run(metrics, tokens, {name: w for name, w in oracle.weights().items() if oracle.models[name].optimizer})

    @staticmethod
    def of_result(found: dict) -> "Run":
        tokens = {name: [{tuple(at): row for at, row in once} for once in times]
                  for name, times in found["responses"].items()}
        return Run(found["metrics"], tokens, found["weights"])

    @property
    def rows(self) -> int:
        return sum(len(once) for times in self.tokens.values() for once in times)

    def deviations(self, other: "Run") -> dict[str, float]:
        """The largest, as shares of what is allowed."""
        assert [m.keys() for m in self.metrics] == [m.keys() for m in other.metrics]
        found = {"metrics": 0.0, "norms": 0.0, "weights": self._weights(other) / WEIGHTS}
        for name, mine, right in self._pairs(other):
            kind, allowed = "metrics", METRICS * max(1, abs(right))
            if name.endswith("/grad_norm"):
                kind, allowed = "norms", NORMS * abs(right)
            found[kind] = max(found[kind], abs(mine - right) / allowed if mine != right else 0.0)
        return found

    def _pairs(self, other: "Run") -> Iterator[tuple[str, float, float]]:
        for mine, right in zip(self.metrics, other.metrics):
            assert [name for name in mine if mine[name] is None] == [name for name in right if right[name] is None]
            yield from ((name, mine[name], right[name]) for name in mine if mine[name] is not None)

    def _weights(self, other: "Run") -> float:
        assert self.weights.keys() == other.weights.keys()
        pairs = ((w, other.weights[model][name]) for model, named in self.weights.items() for name, w in named.items())
        return max((float((mine - right).abs().max()) for mine, right in pairs), default=0.0)


@dataclass
class Verdict:
    """deviations: as shares of the allowed; parted: rows that left the reference; margin: the largest of theirs"""

    deviations: dict[str, float]
    rows: int
    parted: int = 0
    margin: float = 0.0

    def check(self) -> None:
        assert self.margin <= NEAR_TIE
        assert {kind: share for kind, share in self.deviations.items() if not share <= 1} == {}

    def __str__(self) -> str:
        shares = "  ".join(f"{self.deviations[kind]:8.4f}" for kind in ("metrics", "norms", "weights"))
        return f"{shares}  {self.parted:4}/{self.rows}"


HEADER = "deviations as shares of the allowed:                   metrics     norms   weights  parted rows"


def judge(run: Run, reference: Run, checked: Checked) -> Verdict:
    if run.tokens == reference.tokens:
        return Verdict(run.deviations(reference), run.rows)
    told = Oracle(checked, run.tokens)
    replayed = Run.of_oracle(told)
    margins = [r.margins for times in told.generated.values() for once in times for r in once.values() if r.margins]
    return Verdict(run.deviations(replayed), run.rows, len(margins), max(map(max, margins), default=0.0))


def check_few_part(verdicts: Mapping[str, Verdict]) -> None:
    assert sum(v.parted for v in verdicts.values()) <= MAY_PART * sum(v.rows for v in verdicts.values())


def table(verdicts: Mapping[str, Verdict], results: Mapping[str, dict]) -> str:
    """The deviations of each, and the seconds that it ran; the oracle has no result."""
    seconds = {name: f"{found['seconds']:6.1f} s" for name, found in results.items()}
    return "\n".join(["", HEADER, *(f"{n:<52} {v} {seconds.get(n, '  oracle')}" for n, v in verdicts.items())])
