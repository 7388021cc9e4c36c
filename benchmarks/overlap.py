"""What models on ranks of their own gain: PPO's iteration on one rank, and with models, or the sampler, side by side.

    python benchmarks/overlap.py

Every rank has one thread, so one rank does the work of all models in turn: the sum. Each figure is the median of the
iterations after the first of one run, in seconds; the last column is the share of the sum. Run it on a machine with as
many free cores as ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RLFLOWC = Path(sys.executable).with_name("rlflowc")
STEPS = 6
RUNS = (  # what it is, ranks, lag, `plan:`
    ("all on one rank", 1, 0, ""),
    ("all on two ranks, data parallel", 2, 0, ""),
    ("actor and ref beside critic and reward", 2, 0, "    actor: devices(1), colocate(ref)\n"),
    ("the sampler of the next batch beside all models", 2, 1, "    actor.generate: devices(1)\n"),
)


def seconds(folder: Path, ranks: int, lag: int, plan: str) -> float:
    program = (ROOT / "programs" / "ppo.rlflow").read_text(encoding="utf-8")
    path = ROOT / "programs" / f".overlap-{os.getpid()}.rlflow"  # beside its data
    path.write_text(program + ("\nplan:\n" + plan if plan else ""), encoding="utf-8")
    run = folder / "run"
    settings = ("-s", f"run.steps={STEPS}", "-s", f"run.lag={lag}", "-s", "e=8")
    try:
        command = [RLFLOWC, "run", path, *settings, "--ranks", str(ranks), "--run-dir", run]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    finally:
        path.unlink()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return statistics.median(line["seconds"] for line in lines if line["iteration"] > 1)


def main() -> None:
    table = Table("models", "ranks", "seconds", "of the sum", title="PPO, one iteration")
    total = 0.0
    for name, ranks, lag, plan in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            took = seconds(Path(folder), ranks, lag, plan)
        total = total or took
        table.add_row(name, str(ranks), f"{took:.2f}", f"{took / total:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
