"""How much memory ranks hold while a model is read and a checkpoint written: `python benchmarks/memory.py`.

A model of 200 million random parameters, trained on two ranks with tp=2. Of each rank: what it holds once the model is
there, and the most it held on the way, in memory of its own (`RssAnon`; pages of files that it reads are the system's).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Iterator

import torch

RANKS = 2
CONFIG = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 16, "intermediate_size": 2816, "vocab_size": 24000, "max_position_embeddings": 2048,
}
PROGRAM = """
dim b = 2
dim t <= 4
data good[b, t] = jsonl("rows.jsonl", "text")
model actor = policy("model") trained by adamw(lr=1e-4)
update:
    train actor to maximize mean(actor.logprobs(good))
run:
    steps = 1
plan:
    actor: parallel(tp=2)
"""
MB = 1e6


def main() -> int:
    if len(sys.argv) > 1:
        return on_rank(Path(sys.argv[1]))
    from runtime.launch import mpiexec, rank_environment

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = make(folder)
        command = [mpiexec(), "-n", str(RANKS), sys.executable, "-m", "mpi4py", __file__, name]
        done = subprocess.run(command, env=rank_environment(RANKS, name), capture_output=True, text=True)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            sys.exit(done.stdout + done.stderr)
    print(f"model {size / MB:.0f} MB of parameters in 32 bits, on each rank as many bytes again of gradients and moments")
    for line in lines:
        print(json.dumps(line))
    return 0


def make(folder: Path) -> int:
    """A model folder of random weights, made a file at a time. → its bytes"""
    from compiler.shapes import shape_from_config, tensors
    from runtime.hf_folder import in_parts, write_parts

    sizes = tensors(shape_from_config(CONFIG), "policy")
    parts = in_parts({name: 4 * math.prod(size) for name, size in sizes.items()}, 100 << 20)
    made = ({name: torch.randn(sizes[name]) / 32 for name in part} for part in parts)
    write_parts(folder / "model", CONFIG | {"tie_word_embeddings": False}, made)
    (folder / "rows.jsonl").write_text('{"text": "1"}\n' * 2)
    return 4 * sum(math.prod(size) for size in sizes.values())


def on_rank(folder: Path) -> int:
    from mpi4py import MPI

    from compiler.compile import compile_program
    from rlhf_dsl.frontend import loads
    from runtime import checkpoint, meshes
    from runtime.executor.models import Models

    torch.set_num_threads(1)
    job = meshes.start(MPI.COMM_WORLD)
    plan = compile_program(loads(PROGRAM, {}, str(folder / "memory.rlflow")), ranks=RANKS)
    models = Models(plan, job)
    before = held()
    with peak() as loading:
        models.prepare()
    there = held()
    progress = SimpleNamespace(positions={}, states={}, following=None, models=models)
    with peak() as saving:
        checkpoint.write(folder / "checkpoints", models, progress, 1)
    engine = models.engine("actor.train")
    found = {
        "rank": job.rank, "parameters": engine.parameter_bytes, "held": there - before,
        "reading, more": loading[0] - there, "writing, more": saving[0] - there,
    }
    for line in MPI.COMM_WORLD.allgather({k: round(v / MB) if k != "rank" else v for k, v in found.items()}):
        if job.rank == 0:
            print(json.dumps(line), flush=True)
    torch.distributed.destroy_process_group()
    return 0


def held() -> int:
    """Bytes of this process's own memory that are resident."""
    line = next(x for x in Path(f"/proc/{os.getpid()}/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most that was held in the meantime, looked at every few milliseconds."""
    most, done = [held()], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        done.set()
        watcher.join()
        most[0] = max(most[0], held())


if __name__ == "__main__":
    sys.exit(main())
