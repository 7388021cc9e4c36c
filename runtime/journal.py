"""What a run writes down as it goes: `metrics.jsonl`, which is the truth, and `trace.jsonl`, where the time went.

With `--tensorboard` the metrics go there once more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Mapping, Optional

from compiler.reading.tables import ITERATION
from rlhf_dsl.diagnostics import fault
from runtime.run_folder import RunFolder
from runtime.times import Times


class Journal:
    """Appends whole lines and flushes each, so that a killed run leaves every finished iteration."""

    def __init__(self, folder: RunFolder) -> None:
        self._metrics = open(folder.metrics, "a", encoding="utf-8")
        self._trace = open(folder.trace, "a", encoding="utf-8")
        self._board = _tensorboard(folder.tensorboard) if folder.tensorboard.is_dir() else None

    def write(self, iteration: int, metrics: Mapping[str, Optional[float]], seconds: float, times: Times,
              lengths: Mapping[str, float]) -> None:
        """seconds: of the whole iteration with its evaluations; times: of steps, a loop's own includes what is in it;
        lengths: tokens of its samples, `Rows.mean_lengths`"""
        _line(self._metrics, {"iteration": iteration, "seconds": round(seconds, 4), "metrics": dict(metrics)})
        told = {section: {title: round(spent, 6) for title, spent in steps.items()} for section, steps in times.items()}
        _line(self._trace, {"iteration": iteration, "seconds": round(seconds, 4), "steps": told.pop(ITERATION, {}),
                            **({"evals": told} if told else {}),
                            **({"lengths": {name: round(n, 3) for name, n in lengths.items()}} if lengths else {})})
        if self._board is not None:
            self._show(iteration, metrics)

    def _show(self, iteration: int, metrics: Mapping[str, Optional[float]]) -> None:
        for name, value in metrics.items():
            if value is not None:
                self._board.add_scalar(name, value, iteration)
        self._board.flush()

    def close(self) -> None:
        self._metrics.close()
        self._trace.close()


def _tensorboard(path: Path):
    """A writer of event files; the library is imported for runs that ask for them alone."""
    from tensorboard.summary import Writer

    return Writer(str(path))


def _line(file: IO[str], value: dict) -> None:
    """Raises DiagnosticError R0163 if the disk takes no more."""
    try:
        file.write(json.dumps(value, ensure_ascii=False) + "\n")
        file.flush()
    except OSError as error:
        raise fault("R0163", place=file.name, reason=error.strerror) from error
