"""The folder of a run: everything that went in and everything that came out, in files a person can read.

    program.rlflow      the program as it ran            plan.json         the plan as it ran
    metrics.jsonl       one line an iteration (truth)    trace.jsonl       seconds of each step, one line an iteration
    logs/rank-N.log     what rank N printed              state/rank-N      where rank N stands, for a report of its death
    failure-N.json      why rank N gave up               checkpoints/      one folder a saving
    tensorboard/        the metrics once more, for TensorBoard
"""

from __future__ import annotations

import json
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

POSITION = struct.Struct("<qq")  # iteration, index of the step in the plan's list


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank}.log"

    def stop_request(self) -> Path:
        """Exists when the run shall save and end at the next boundary."""
        return self.path / "state" / "stop"

    def create(self) -> "RunFolder":
        for name in ("logs", "state", "checkpoints"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        return self

    def write_failure(self, rank: int, report: dict[str, Any]) -> None:
        """Whole or not at all: the launcher may read it at any time."""
        beside = self.path / f".failure-{rank}.json"
        beside.write_text(json.dumps({"rank": rank, "time": time.time(), **report}, ensure_ascii=False))
        os.replace(beside, self.path / f"failure-{rank}.json")

    def first_failure(self) -> Optional[dict[str, Any]]:
        """The earliest report of a rank that failed by itself, not because another was gone."""
        reports = [json.loads(p.read_text()) for p in self.path.glob("failure-*.json")]
        return min((r for r in reports if not r["consequence"]), key=lambda r: r["time"], default=None)

    def position_of(self, rank: int) -> tuple[int, int]:
        """(iteration, step index) that a rank reached, or (0, -1) if it never began."""
        try:
            return POSITION.unpack((self.path / "state" / f"rank-{rank}").read_bytes()[: POSITION.size])
        except (OSError, struct.error):
            return 0, -1


class Position:
    """A rank's own mark of where it stands: one small write a step, readable after the rank was killed."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self._file = os.open(folder.path / "state" / f"rank-{rank}", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self.iteration, self.step = 0, -1

    def at(self, iteration: int, step: int) -> None:
        self.iteration, self.step = iteration, step
        os.pwrite(self._file, POSITION.pack(iteration, step), 0)

    def close(self) -> None:
        os.close(self._file)


def new_run_path(root: Path, name: str) -> Path:
    """`root/name-YYYYMMDD-HHMMSS`, with a suffix if that is taken."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    taken = (root / (stem + suffix) for suffix in ["", *(f"-{i}" for i in range(2, 1000))])
    return next(p for p in taken if not p.exists())
