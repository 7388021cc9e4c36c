"""The sampler over two and four tensor-parallel ranks: see `sampler_tp.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.launch import mpiexec, rank_environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_are_those_of_one_rank(ranks, tmp_path):
    command = [mpiexec(), "-n", str(ranks), sys.executable, "-m", "mpi4py"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("sampler_tp.py"))], capture_output=True, text=True, timeout=300,
        env={**rank_environment(ranks, str(tmp_path)), "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(cases) == 16
    assert [c["case"] for c in cases if not c["equal"] or c["off"] > 2e-5] == []
