"""Random programs, run: on one rank as the oracle says, on more ranks as on one.

    python -m tests.whole_runs --count 200
    python -m tests.whole_runs --count 40 --ranks 2 --ranks 4

Metrics and gradient norms agree as in `tests/distributed/judging.py`; weights by their change, as Adam makes a step of
rounding where a gradient is nothing else. Where the oracle itself, from weights and with outputs that differ by rounding,
gives other results, a program says nothing and is not compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, Optional

import torch

from compiler.compile import compile_program
from rlhf_dsl.diagnostics import DiagnosticError
from rlhf_dsl.frontend import loads
from rlhf_dsl.typed import Checked
from runtime.launch import mpiexec, rank_environment
from tests.distributed.judging import HERE, METRICS, NEAR_TIE, NORMS, ROOT
from tests.oracle import Oracle
from tests.whole import retains, written
from tests.writing.models import desk
from tests.writing.plans import plan

CHANGES = 0.02  # of the norm of a model's change
ROUNDING = 3e-6  # of a weight, or of a model's output
Tokens = dict[str, list[dict[tuple, list[int]]]]


@dataclass
class Ran:
    """metrics by iteration; tokens by response, time and place; changes: by model and tensor, from the first weights

    margin: of an oracle that followed other tokens, how far from a tie they left its own
    """

    metrics: list[dict[str, Optional[float]]]
    tokens: Tokens
    changes: dict[str, dict[str, torch.Tensor]]
    margin: float = 0.0

    def differences(self, other: "Ran") -> list[str]:
        """What is said where the two differ by more than is allowed."""
        if [m.keys() for m in self.metrics] != [m.keys() for m in other.metrics]:
            return [f"metrics {[sorted(m) for m in self.metrics]} and {[sorted(m) for m in other.metrics]}"]
        found = []
        for i, (mine, right) in enumerate(zip(self.metrics, other.metrics)):
            found += [f"{name} of iteration {i}: {mine[name]} and {right[name]}" for name in mine
                      if not _near(name, mine[name], right[name])]
        for model, named in self.changes.items():
            away = math.sqrt(sum(float((w - other.changes[model][n]).square().sum()) for n, w in named.items()))
            moved = math.sqrt(sum(float(w.square().sum()) for w in other.changes[model].values()))
            if away > CHANGES * moved + 1e-5:
                found.append(f"weights of {model} are {away:.3g} away, they moved by {moved:.3g}")
        return found + [f"tokens differ where no tie is near: {other.margin}"] * (other.margin > NEAR_TIE)


def _near(name: str, mine: Optional[float], right: Optional[float]) -> bool:
    if mine is None or right is None:
        return mine is right
    allowed = NORMS * abs(right) + 1e-6 if name.endswith("/grad_norm") else METRICS * max(1, abs(right))
    return abs(mine - right) <= allowed


def by_oracle(checked: Checked, tokens: Tokens, noise: int = 0) -> Ran:
    """noise: a seed for what is a rounding away, 0 for none. tokens: to follow, as far as they are there."""
    oracle = Oracle(checked)
    torch.manual_seed(noise)
    with torch.no_grad():
        for model in oracle.models.values() if noise else ():
            model.call = _rounded(model.call)
            for weight in model.parameters():
                weight.mul_(1 + ROUNDING * torch.randn_like(weight))
    before = {name: w for name, w in oracle.weights().items() if oracle.models[name].optimizer}
    oracle.told = _Told(tokens)
    metrics = [i.metrics for i in oracle.run() if i.metrics]
    margins = [m for times in oracle.generated.values() for once in times for r in once.values() for m in r.margins]
    after = oracle.weights()
    changes = {m: {n: after[m][n] - w for n, w in named.items()} for m, named in before.items()}
    return Ran(metrics, tokens, changes, max(margins, default=0.0))


def _rounded(call: Callable) -> Callable:
    """As outputs that are equal by definition are not in batches of other sizes."""
    return lambda *args: [value * (1 + ROUNDING * float(torch.randn(()))) for value in call(*args)]


class _Told(dict):
    """Responses that nobody needed were not sampled; the oracle samples its own."""

    def __bool__(self) -> bool:
        return True

    def __missing__(self, name: str) -> "_Nothing":
        return _Nothing()

    def __getitem__(self, name: str):
        return _Nothing(dict.get(self, name, ()))


class _Nothing(list):
    def __getitem__(self, i):
        return list.__getitem__(self, i) if i < len(self) else {}


def of_result(folder: Path, name: str, first: dict[str, dict[str, torch.Tensor]]) -> Ran:
    found = json.loads((folder / f"{name}.result.json").read_text())
    weights = torch.load(folder / f"{name}.pt")
    tokens = {y: [{tuple(at): row for at, row in once} for once in times] for y, times in found["responses"].items()}
    return Ran(found["metrics"], tokens,
               {m: {n: w - first[m][n] for n, w in named.items()} for m, named in weights.items()})


def launch(ranks: int, folder: Path) -> dict[str, str]:
    """Runs all plans for so many ranks; by program, what a launch said that it ended."""
    failed: dict[str, str] = {}
    python = [sys.executable, "-P", "-W", "ignore", "-m", "mpi4py", "-m", "written", str(folder)]
    while True:
        scratch = Path(tempfile.mkdtemp())
        environment = {**rank_environment(ranks, str(scratch)), "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}
        done = subprocess.run([mpiexec(), "-n", str(ranks), *python], capture_output=True, text=True, timeout=1800,
                              env=environment)
        shutil.rmtree(scratch, ignore_errors=True)
        if done.returncode == 0:
            return failed
        name = (folder / "current").read_text()
        failed[name] = done.stderr[-3000:]
        (folder / f"{name}.plan.json").unlink()


def campaign(seed: int, numbers: range, ranks: tuple[int, ...], folder: Path, seen: Counter) -> dict[str, str]:
    """By program, what is wrong. folder: filled here, and left as it is."""
    desk(folder, weights=True)
    texts = {name: text for number in numbers for name, text in _compiled(seed, number, (1, *ranks), folder, seen)}
    wrong = {name: said for n in (1, *ranks) for name, said in launch(n, folder).items()}
    for name, text in texts.items():
        reference = f"{name.partition(' ')[0]} on 1"
        if name not in wrong and (folder / f"{reference}.pt").exists():
            said = _compared(folder, name, reference, loads(text, {}, str(folder / "program.rlflow")), seen)
            wrong |= {name: said} if said else {}
    for name in wrong:
        (folder / f"{name}.rlflow").write_text(texts[name])
    return wrong


def _compiled(seed: int, number: int, ranks: tuple[int, ...], folder: Path, seen: Counter) -> Iterator[tuple[str, str]]:
    """(name, text) of the plans that are made; what is refused is seen by `whole.py`."""
    one, chosen = written(seed, number, plain=True)
    for n in ranks:
        text, name = one.with_plan(plan(chosen, one, n)), f"{number} on {n}"
        try:
            made = compile_program(loads(text, {}, str(folder / "program.rlflow")), ranks=n)
        except DiagnosticError as error:
            seen.update(d.code for d in error.diagnostics if d.severity == "error")
            return
        seen["retain"] += retains(made)
        (folder / f"{name}.plan.json").write_text(made.to_json())
        yield name, text


def _compared(folder: Path, name: str, reference: str, checked: Checked, seen: Counter) -> str:
    """Nothing if all is well."""
    try:
        first = {m: w for m, w in Oracle(checked).weights().items()}
        ran, one = of_result(folder, name, first), of_result(folder, reference, first)
        right = one if name != reference and ran.tokens == one.tokens else by_oracle(checked, ran.tokens)
        found = ran.differences(right)
        seen["compared"] += 1
        if found and _hangs_on_rounding(checked, ran.tokens):
            seen["hang on rounding"] += 1
            return ""
        return "\n".join(found)
    except Exception:
        return traceback.format_exc()


def _hangs_on_rounding(checked: Checked, tokens: Tokens) -> bool:
    plain = dataclasses.replace(by_oracle(checked, tokens), margin=0.0)
    return any(by_oracle(checked, tokens, noise).differences(plain) for noise in (1, 2))


def _command_line() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, action="append", default=[], help="beside one rank")
    parser.add_argument("--folder", help="where plans, results and what failed are kept")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began, seen = time.perf_counter(), Counter()
    folder = Path(args.folder or tempfile.mkdtemp())
    numbers = range(args.first, args.first + args.count)
    wrong = campaign(args.seed, numbers, tuple(args.ranks), folder, seen)
    for name, said in wrong.items():
        print(f"{name}: {said}\n")
    print(f"{args.count} programs, {len(wrong)} faults, {time.perf_counter() - began:.0f} s", dict(seen))
    return int(wrong != {})


if __name__ == "__main__":
    sys.exit(_command_line())
