"""Contenders of a benchmark: processes that wait, do one round when they are told to, and say what it took.

Each has a process of its own, so that none changes threads or allocator of another; rounds are interleaved, so that a
busy minute of the machine meets all alike.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]


def environment(threads: int, *path: str) -> dict[str, str]:
    """Of a process with so many threads, that fetches nothing. path: folders in which it looks for packages first."""
    return os.environ | {
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join([*path, str(ROOT)])}


class Contender:
    """A waiting process. command: as for `subprocess`; it calls `serve`."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(env), cwd=ROOT)
        self.ready = self._answer()

    def round(self) -> Any:
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        """The next line that is ours; what libraries print stands between."""
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        sys.exit(f"{self.name} ended with code {self._process.wait()}")


def serve(one_round: Callable[[], Any], facts: Any = None) -> None:
    """Answers `facts` once, then each line of standard input with a round."""
    print("answer", json.dumps(facts), flush=True)
    for _ in sys.stdin:
        print("answer", json.dumps(one_round()), flush=True)


def interleave(contenders: Sequence[Contender], rounds: int) -> dict[str, list[Any]]:
    """The rounds of each by name, taken in turns."""
    taken: dict[str, list[Any]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            taken[contender.name].append(contender.round())
    return taken


def spread(seconds: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
