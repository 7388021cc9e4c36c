"""The folder of a run: everything that went in and everything that came out, in files a person can read.

    program.rlflow      the program as it ran            plan.json         the plan as it ran
    overrides.json      what `-s` set
    metrics.jsonl       one line an iteration (truth)    trace.jsonl       seconds of each step, one line an iteration
    logs/rank-N.log     what rank N printed              state/rank-N      where rank N stands, for a report of its death
    failure-N.json      why rank N gave up               checkpoints/      one folder a saving
    tensorboard/        the metrics once more, for TensorBoard
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POSITION = struct.Struct("<qq")  # iteration, index of the step in the plan's list


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def program(self) -> Path:
        return self.path / "program.rlflow"

    @property
    def overrides(self) -> Path:
        return self.path / "overrides.json"

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
        """Makes the folder. Raises FileExistsError if it holds a run already; only one of two at once gets it."""
        self.path.mkdir(parents=True, exist_ok=True)
        open(self.plan, "x").close()
        for name in ("logs", "state", "checkpoints"):
            (self.path / name).mkdir(exist_ok=True)
        return self

    def write_failure(self, report: dict[str, Any]) -> None:
        """Of the rank `report["rank"]`. Whole or not at all: the launcher may read it at any time."""
        beside = self.path / f".failure-{report['rank']}.json"
        beside.write_text(json.dumps(report, ensure_ascii=False))
        os.replace(beside, self.path / f"failure-{report['rank']}.json")

    def claim_report(self) -> bool:
        """True for the first who asks: that rank reports the job's failure."""
        try:
            open(self.path / "state" / "reported", "x").close()
        except FileExistsError:
            return False
        return True

    def failures(self) -> list[dict[str, Any]]:
        """What ranks wrote down about their ends."""
        return [json.loads(p.read_text()) for p in self.path.glob("failure-*.json")]

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


def new_run_folder(root: Path, name: str) -> RunFolder:
    """`root/name-YYYYMMDD-HHMMSS`, with a suffix if that is taken."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in itertools.chain([""], (f"-{i}" for i in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            return RunFolder((root / (stem + suffix)).absolute()).create()
    raise AssertionError("the suffixes never end")
