"""Times the placement search as a whole process on one thread, start of Python and imports included.

    python benchmarks/search.py           # all cases, the median of three runs each
    python benchmarks/search.py CASE      # one case, once, in this process
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PPO = ("actor", "ref", "critic", "reward")
SAFE_RLHF = ("actor", "ref", "critic", "cost_critic", "reward", "cost")


class Case(NamedTuple):
    """limit_s: what the search shall stay below."""

    models: tuple[str, ...]
    cluster: str
    limit_s: float


CASES = {
    "ppo-128": Case(PPO, "a100-16x8", 1.0),
    "ppo-1024": Case(PPO, "h100-128x8", 5.0),
    "safe-rlhf-1024": Case(SAFE_RLHF, "h100-128x8", 20.0),
}


def run(case: Case) -> None:
    """1024 prompts of 1024 tokens, responses of 1024, 8 mini-batches, all models Llama 2 7B."""
    from compiler.catalog import model_shape
    from compiler.cluster_file import read_cluster
    from compiler.cost.workload import ppo
    from compiler.search import search

    cluster = read_cluster(ROOT / "programs" / "clusters" / f"{case.cluster}.toml")
    workload = ppo(dict.fromkeys(case.models, model_shape("llama-2-7b")), 1024, 1024, 1024, minibatches=8)
    found = search(workload, cluster.machines)
    for one in (found, *found.alternatives):
        groups = " | ".join(f"{' '.join(m.model for m in g.models)}: {g.devices}" for g in one.groups)
        print(f"{one.iteration_s:8.2f} s  {groups}")
    print(f"considered {found.considered} allocations in {found.partitions} partitions, {found.search_s:.2f} s")


def whole_process(name: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-P", __file__, name], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    if len(sys.argv) > 1:
        run(CASES[sys.argv[1]])
        return
    print("| case | devices | models | seconds | at most |\n| --- | --- | ---: | ---: | ---: |")
    for name, case in CASES.items():
        seconds = statistics.median(whole_process(name) for _ in range(3))
        print(f"| {name} | {case.cluster} | {len(case.models)} | {seconds:.2f} | {case.limit_s:g} |")


if __name__ == "__main__":
    main()
