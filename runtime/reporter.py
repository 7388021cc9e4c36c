"""What a run says while it runs: events from rank 0, shown as one live line and a bar, or as plain lines.

An event is a JSON object with `event`: start, step, iteration, message, saved, failed, done. On a terminal the current
step is one line that is redrawn and each iteration one line that stays; in a log file only the latter is printed.
"""

from __future__ import annotations

import json
import sys
import time
from typing import IO, Any, Optional, Protocol

SHOWN = 6  # metrics on an iteration's line; the rest stands in metrics.jsonl


class Reporter(Protocol):
    def __call__(self, event: dict[str, Any]) -> None: ...


class PipeReporter:
    """Rank 0 under the launcher: one JSON line an event."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __call__(self, event: dict[str, Any]) -> None:
        self._stream.write(json.dumps(event, ensure_ascii=False) + "\n")
        self._stream.flush()


def silent(event: dict[str, Any]) -> None:
    """Every rank but the first."""


def number(value: Optional[float]) -> str:
    """Four significant digits, no exponent where none is needed; a metric without rows is a dash."""
    if value is None:
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4f}".rstrip("0").rstrip(".") or "0"
    return f"{value:.2e}"


def iteration_line(event: dict[str, Any]) -> str:
    """`step 12/60  success 0.71  reward 1.3  ...  2.1 s`"""
    width = len(str(event["of"]))
    metrics = event["metrics"]
    names = [n for n in metrics if n in event.get("fresh", metrics)]
    eval_first = sorted(names, key=lambda n: not n.startswith("eval/"))
    shown = "  ".join(f"{n} {number(metrics[n])}" for n in eval_first[:SHOWN])
    return f"step {event['iteration']:>{width}}/{event['of']}  {shown}  {event['seconds']:.1f} s"


class LineReporter:
    """A log file, or a terminal that cannot redraw: one plain line an iteration."""

    def __init__(self, stream: IO[str] = sys.stderr) -> None:
        self._stream = stream
        self._began = time.monotonic()

    def __call__(self, event: dict[str, Any]) -> None:
        text = self.text(event)
        if text:
            print(text, file=self._stream, flush=True)

    def text(self, event: dict[str, Any]) -> str:
        kind = event["event"]
        if kind == "start":
            return f"{event['program']}: {event['of']} steps on {event['ranks']} rank{'s' * (event['ranks'] > 1)}, in {event['folder']}"
        if kind == "iteration":
            return iteration_line(event)
        if kind in ("message", "saved"):
            return event["text"]
        if kind == "done":
            return f"done in {time.monotonic() - self._began:.0f} s: {event['text']}"
        return ""


class LiveReporter(LineReporter):
    """A terminal: a bar over the iterations, the current step beside it, finished iterations above."""

    def __init__(self, stream: IO[str] = sys.stderr, color: bool = True) -> None:
        super().__init__(stream)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            console=Console(file=stream, no_color=not color, highlight=False), transient=True)
        self._progress.start()
        self._task = self._progress.add_task("starting the ranks", total=None)

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "start":
            self._progress.update(self._task, total=event["of"])
        if kind == "step":
            self._progress.update(self._task, description=event["text"])
        if kind == "iteration":
            self._progress.update(self._task, completed=event["iteration"])
        text = self.text(event)
        if text:
            self._progress.console.print(text, markup=False, soft_wrap=True)
        if kind in ("done", "failed"):
            self.close()

    def close(self) -> None:
        self._progress.stop()


def for_stream(stream: IO[str] = sys.stderr, color: bool = True) -> LineReporter:
    return LiveReporter(stream, color) if stream.isatty() else LineReporter(stream)
