"""Times a transition from training to generation by each strategy, on ranks of this machine.

    python benchmarks/transitions.py          # 4 and 8 ranks, the largest model that fits
    python benchmarks/transitions.py MODEL    # a model of the catalogue
    python benchmarks/transitions.py MODEL 1  # one transition by each strategy instead of five

Weights are bf16. All strategies of a number of ranks run in one job, in turn, so that what else the machine does meets
them alike; printed are medians of the slowest rank, each as a multiple of zero redundancy, and the processor time of
all ranks together, on which other work bears less.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SETTINGS = {4: ((4, 1, 1), 2), 8: ((4, 2, 1), 2)}  # ranks: training (tp, pp, dp), generation tp
MODELS = ("llama-3.2-1b", "qwen2.5-1.5b", "llama-3.2-3b", "llama-2-7b", "llama-2-13b")
BF16 = 2


def main(model: str = "", runs: str = "5") -> None:
    for ranks in SETTINGS:
        chosen = model or largest(ranks)
        print(f"{chosen} in bf16 on {ranks} ranks, {told(ranks)}; median of {runs} transitions in turn", flush=True)
        print(f"  {'strategy':16}{'seconds':>9}{'of zero redundancy':>20}{'processor seconds':>19}"
              f"{'GB received in all':>20}")
        for strategy, (seconds, ratio, busy, size) in measured(chosen, ranks, runs).items():
            print(f"  {strategy:16}{seconds:9.3f}{ratio:20.2f}{busy:19.2f}{size / 1e9:20.2f}")


def told(ranks: int) -> str:
    (tp, pp, dp), generate = SETTINGS[ranks]
    return f"tp{tp} pp{pp} dp{dp} to tp{generate}"


def largest(ranks: int) -> str:
    """The largest whose weights in both layouts, on all ranks, take half of the memory that is free."""
    from compiler.catalog.models import model_shape
    from compiler.shapes import parameters

    (_, _, dp), tp = SETTINGS[ranks]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sizes = {name: BF16 * parameters(model_shape(name), "policy") * (dp + ranks // tp) for name in MODELS}
    return max((name for name in MODELS if sizes[name] < free / 2), key=sizes.get, default=MODELS[0])


def measured(model: str, ranks: int, runs: str) -> dict[str, tuple[float, float, float, int]]:
    """By strategy: seconds, as a multiple of zero redundancy's, of all processors, bytes that all ranks receive."""
    from runtime.launch import mpiexec, rank_environment

    with tempfile.TemporaryDirectory() as scratch:
        command = [mpiexec(), "-n", str(ranks), sys.executable, "-P", "-m", "mpi4py", __file__, "--rank", model, runs]
        environment = rank_environment(ranks, scratch) | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    took, busy = ({name: statistics.median(one[of]) for name, one in found.items()} for of in ("seconds", "busy"))
    return {name: (took[name], took[name] / took["zero-redundancy"], busy[name], one["bytes"])
            for name, one in found.items()}


# ---- one rank --------------------------------------------------------------------------------------

def on_a_rank(model: str, runs: int) -> None:
    import torch
    from mpi4py import MPI

    from compiler.catalog.models import model_shape
    from compiler.resharding.gathers import STRATEGIES, transfer_by
    from compiler.layout import ModelLayout
    from compiler.resharding.transitions import ORDERS
    from compiler.weights import WeightLayout
    from runtime import meshes
    from runtime.transfer import WeightMover

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    mesh = meshes.Mesh(meshes.start(comm), [])
    degrees, tp = SETTINGS[comm.size]
    train, shape = ModelLayout(tuple(range(comm.size)), *degrees), model_shape(model)
    src = WeightLayout(shape, "policy", train, "megatron")
    source = {name: torch.ones(size, dtype=torch.bfloat16) for name, size in src.local_tensors(comm.rank).items()}
    movers, found = {}, {}
    for strategy in STRATEGIES:
        dst = WeightLayout(shape, "policy", ORDERS[strategy](train, tp), "torch")
        transfer = transfer_by(strategy, src, dst, BF16)
        mesh.make(transfer.groups)
        movers[strategy] = WeightMover(transfer, comm.rank, groups=mesh.group, dtype=torch.bfloat16)
        found[strategy] = {"seconds": [], "busy": [], "bytes": transfer.total_bytes}
    sizes = WeightLayout(shape, "policy", ORDERS[STRATEGIES[0]](train, tp), "torch").local_tensors(comm.rank)
    into = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    for run in range(runs + 1):  # the first warms up
        for strategy, mover in movers.items():
            comm.Barrier()
            began, worked = time.perf_counter(), time.process_time()
            mover.move(source, into)
            worked, took = time.process_time() - worked, time.perf_counter() - began
            times = comm.allreduce(took, op=MPI.MAX), comm.allreduce(worked)
            for what, seconds in zip(("seconds", "busy"), times):
                found[strategy][what] += [seconds] if run else []
    if comm.rank == 0:
        print(json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    on_a_rank(sys.argv[2], int(sys.argv[3])) if sys.argv[1:2] == ["--rank"] else main(*sys.argv[1:])
