"""One rank of a measurement: `python -m runtime.profile.rank REQUEST`, started by `runtime.profile.command`.

Rank 0 writes a line of JSON for each result to standard output: name, value, unit.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from compiler import codec
from compiler.shapes import ModelShape
from runtime.launch import die_with_parent
from runtime.meshes import BACKENDS, Job, start
from runtime.messages import swap
from runtime.profile.clock import Clock
from runtime.profile.layers import measured_layers

WIDTH = 1024  # of the matrices
STREAMED = 1 << 26  # bytes, beyond what caches hold
SENT = 1 << 24  # bytes of a large message


@dataclass(frozen=True)
class Measured:
    """name: as in `runtime.profile.found.Found`; about: what it is, for people"""

    name: str
    value: float
    unit: str
    about: str


def main() -> int:
    die_with_parent()
    from mpi4py import MPI

    request = json.loads(sys.argv[1])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    job = start(MPI.COMM_WORLD)
    shape = codec.decode(ModelShape, request["shape"], "shape")
    for found in measured(job, Clock(job, request["seconds"]), shape):
        if job.rank == 0:
            print(json.dumps(vars(found)), flush=True)
    dist.destroy_process_group()
    return 0


def measured(job: Job, clock: Clock, shape: ModelShape) -> Iterator[Measured]:
    yield from _products(job, clock)
    yield from _memory(job, clock)
    if job.size > 1:
        yield from _links(job, clock)
    for name, value, unit, about in measured_layers(job, clock, shape):
        yield Measured(name, value, unit, about)


def _products(job: Job, clock: Clock) -> Iterator[Measured]:
    for name, dtype in (("flops", torch.float32), ("flops_bf16", torch.bfloat16)):
        a, b = (torch.randn(WIDTH, WIDTH, device=job.device).to(dtype) for _ in range(2))
        seconds = clock(lambda: a @ b)
        about = f"products of {WIDTH} x {WIDTH} matrices in {str(dtype).removeprefix('torch.')}"
        yield Measured(name, 2 * WIDTH**3 / seconds, "FLOP/s", about)


def _memory(job: Job, clock: Clock) -> Iterator[Measured]:
    source, target = (torch.zeros(STREAMED, dtype=torch.uint8, device=job.device) for _ in range(2))
    yield Measured("memory_bandwidth", 2 * STREAMED / clock(lambda: target.copy_(source)), "B/s", "copying in memory")
    if job.device.type == "cuda":
        there = torch.zeros(STREAMED, dtype=torch.uint8, pin_memory=True)
        yield Measured("host", STREAMED / clock(lambda: source.copy_(there)), "B/s", "copying from the host's memory")


def _links(job: Job, clock: Clock) -> Iterator[Measured]:
    """As the cost model counts: a ring of n passes 2 (n - 1) messages of 1/n of the bytes for an all-reduce."""
    messages = 2 * (job.size - 1)
    one, large = (torch.zeros(n, device=job.device) for n in (1, SENT // 4))
    latency = clock(lambda: _round_trip(job, one)) / 2
    yield Measured("latency", latency, "s", f"a message of {BACKENDS[job.device.type]}")
    entered = clock(lambda: dist.all_reduce(one))
    waited = max(entered - messages * latency, 0.0)
    yield Measured("collective", waited, "s", "entering a collective, beside its messages")
    seconds = clock(lambda: dist.all_reduce(large)) - messages * latency
    rate = messages * SENT / job.size / max(seconds, 1e-9)
    yield Measured("links", rate, "B/s", f"an all-reduce of {SENT >> 20} MiB over {job.size} ranks")
    yield Measured("step", clock(_exchange(job)), "s", "an exchange of rows among all ranks")


def _round_trip(job: Job, message: Tensor) -> None:
    """There and back between the first two ranks; others wait in the clock's barrier."""
    if job.rank == 0:
        dist.send(message, 1)
        dist.recv(message, 1)
    elif job.rank == 1:
        dist.recv(message, 0)
        dist.send(message, 0)


def _exchange(job: Job) -> Callable[[], Any]:
    others = [rank for rank in range(job.size) if rank != job.rank]
    out, into = ({rank: torch.zeros(8) for rank in others} for _ in range(2))
    return lambda: swap(out, into)


if __name__ == "__main__":
    sys.exit(main())
