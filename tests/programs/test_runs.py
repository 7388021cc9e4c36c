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
from rlhf_dsl.frontend import load
from runtime.launch import mpiexec, rank_environment

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted((ROOT / "programs").glob("*.rlflow"))
NAMES = [path.stem for path in PROGRAMS]
RANKS, STEPS = 2, 3
SMALL = {"b": 8, "c": 4, "e": 6}  # rows of each root dim
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("programs")
    for path in PROGRAMS:
        roots = [d.name for d in load(str(path), {}).dims.values() if d.root]
        sizes = {"run.steps": str(STEPS), **{root: str(SMALL[root]) for root in roots}}
        plan = compile_program(load(str(path), sizes), ranks=RANKS)
        (folder / f"{path.stem}.plan.json").write_text(plan.to_json())
    launch(folder)
    return {name: json.loads((folder / f"{name}.result.json").read_text()) for name in NAMES}


def launch(folder: Path) -> None:
    command = [mpiexec(), "-n", str(RANKS), sys.executable, "-P", "-W", "ignore", "-m", "mpi4py", "-m", "tests.programs.runs"]
    scratch = folder / "scratch"
    scratch.mkdir()
    environment = {**rank_environment(RANKS, str(scratch)), "PYTHONPATH": str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", "")}
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("name", NAMES)
def test_program_runs(results, name):
    result = results[name]
    assert result["finished"] and len(result["metrics"]) in (STEPS, STEPS + 1)  # an evaluation before the first counts
    for metrics in result["metrics"]:
        assert metrics and all(value is None or math.isfinite(value) for value in metrics.values()), metrics
    assert result["changed"] and all(change > 0 for change in result["changed"].values())


def test_multiplier_moves(results):
    assert results["safe_rlhf"]["states"]["log_lam"] != 0
