"""Times work that all ranks do at the same moment, as they do in a run: they share caches, memory and links."""

from __future__ import annotations

import time
from typing import Callable

import torch
import torch.distributed as dist

from runtime.meshes import Job

ROUND_S = 2e-3  # short enough that many a round is not interrupted by other work
LEAST_ROUNDS, MOST_ROUNDS = 5, 200


class Clock:
    """seconds: what one measurement may take, about"""

    def __init__(self, job: Job, seconds: float) -> None:
        self.job, self._seconds = job, seconds

    def __call__(self, work: Callable[[], object]) -> float:
        """Seconds of one `work()` on the slowest rank, in the quietest of many short rounds. Collective."""
        work()
        once = max(self._timed(work, 1), 1e-9)
        times = max(1, round(ROUND_S / once))
        rounds = int(min(max(self._seconds / (once * times), LEAST_ROUNDS), MOST_ROUNDS))
        return min(self._timed(work, times) for _ in range(rounds))

    def _timed(self, work: Callable[[], object], times: int) -> float:
        """All ranks hear the slowest, so that they agree on how often to repeat."""
        if self.job.size > 1:
            dist.barrier()
        began = time.perf_counter()
        for _ in range(times):
            work()
        if self.job.device.type == "cuda":
            torch.cuda.synchronize()
        spent = torch.tensor((time.perf_counter() - began) / times, dtype=torch.float64, device=self.job.device)
        if self.job.size > 1:
            dist.all_reduce(spent, dist.ReduceOp.MAX)
        return spent.item()
