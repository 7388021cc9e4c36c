"""Times `rlflowc explain --cluster` as a whole process on one thread, start of Python and imports included.

    python benchmarks/search.py           # all cases, the median of three runs each
    python benchmarks/search.py CASE      # one case, once, with what was found
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "programs"
# 1024 prompts of 1024 tokens, responses of 1024, all models Llama 2 7B
SIZES = ("-s", "base=catalog:llama-2-7b", "-s", "b=1024", "-s", "t=1024")
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


class Case(NamedTuple):
    """limit_s: what the process shall stay below."""

    program: str
    cluster: str
    limit_s: float


CASES = {
    "ppo-128": Case("ppo", "a100-16x8", 1.0),
    "ppo-1024": Case("ppo", "h100-128x8", 5.0),
    "safe-rlhf-1024": Case("safe_rlhf", "h100-128x8", 20.0),
}


def program_of(case: Case) -> str:
    """The shipped program with large models in place of the small scorers that come with it."""
    text = (PROGRAMS / f"{case.program}.rlflow").read_text()
    return text.replace('"builtin:tiny-reward"', '"catalog:llama-2-7b"') + "\nplan:\n    assume: prompt=1024\n"


def explain(case: Case, out: int | None) -> float:
    """Seconds of the whole process."""
    command = [sys.executable, "-P", "-m", "rlhf_dsl.cli", "explain", "-", "--cluster",
               str(PROGRAMS / "clusters" / f"{case.cluster}.toml"), *SIZES]
    environment = os.environ | ONE_THREAD | {"PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program has its bytecode
    began = time.perf_counter()
    subprocess.run(command, input=program_of(case), text=True, check=True, stdout=out, cwd=PROGRAMS, env=environment)
    return time.perf_counter() - began


def main() -> None:
    if len(sys.argv) > 1:
        explain(CASES[sys.argv[1]], None)
        return
    print("| case | cluster | seconds | at most |\n| --- | --- | ---: | ---: |")
    for name, case in CASES.items():
        seconds = statistics.median(explain(case, subprocess.DEVNULL) for _ in range(3))
        print(f"| {name} | {case.cluster} | {seconds:.2f} | {case.limit_s:g} |")


if __name__ == "__main__":
    main()
