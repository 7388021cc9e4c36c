"""Learning rates over optimizer steps."""

from __future__ import annotations

import math

from rlhf_dsl.typed import Schedule


def learning_rate(schedule: Schedule, step: int, run_steps: int) -> float:
    """The rate of optimizer step `step`, counted from 0; `run_steps` is the total where the schedule names none.

    The first `warmup` steps rise linearly and reach the full rate with the last of them. Then it stays (constant), or falls
    to `low` with the last step: linearly, or along half a cosine (arXiv 1608.03983, equation 5, without restarts).
    """
    if step < schedule.warmup:
        return schedule.lr * (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return schedule.lr
    span = max(1, (schedule.steps or run_steps) - schedule.warmup)
    done = min(1.0, (step - schedule.warmup) / span)
    share = 1 - done if schedule.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return schedule.low + (schedule.lr - schedule.low) * share
