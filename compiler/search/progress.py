"""Shows a search that takes its time: a bar on a terminal, a single line in a log."""

from __future__ import annotations

import math
import sys
import time
from typing import Any, Optional

from rlhf_dsl.terminal import say

PATIENCE = 2.0  # seconds in which nobody asks


class ShownProgress:
    """Called by the search with what is done, all there is to do, and the best seconds an iteration so far.

    A context: leaving it takes the bar away, whatever ended the search.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.shown = False
        self.bar: Optional[Any] = None
        self.task: Any = None

    def __enter__(self) -> "ShownProgress":
        return self

    def __exit__(self, *error: Any) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, done: int, total: int, best: float) -> None:
        if not self.shown and time.monotonic() - self.began > PATIENCE:
            self.shown = True
            self._begin(total)
        if self.bar is not None:
            reached = f"best so far {best:.4g} s an iteration" if best < math.inf else ""
            self.bar.update(self.task, completed=done, total=total, reached=reached)

    def _begin(self, total: int) -> None:
        if not sys.stderr.isatty():
            say("searching for a placement ...")
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("searching for a placement"), BarColumn(), TimeElapsedColumn(),
                   TextColumn("{task.fields[reached]}"))
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self.task = self.bar.add_task("", total=total, reached="")
        self.bar.start()
