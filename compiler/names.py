"""The names that people see: of sections, values, layouts and metrics."""

from __future__ import annotations

from typing import Iterable, Mapping

from compiler.exprs import brief
from rlhf_dsl.typed import Bind, Expr

ROLLOUT, SETUP, COMMIT = "rollout", "setup", "commit"
AHEAD = "ahead"  # of the rollout with `lag = 1`: what an iteration does for the next one


def prefix(section: str, index: int) -> str:
    """`update/` for the first update, `update2/` for the second; likewise `eval/`; nothing for the rollout."""
    return f"{section}{index + 1 if index else ''}/"


def before(index: int) -> str:
    """The phase of what an update needs once, before its first mini-batch."""
    return f"before{index}"


def update(index: int) -> str:
    """The phase of one mini-batch of an update; also how calls say which weights they mean."""
    return f"update{index}"


def evaluation(index: int) -> str:
    return f"eval{index}"


def phase_order(updates: int, evals: int) -> tuple[str, ...]:
    """All phases in the order of execution."""
    loops = [phase for i in range(updates) for phase in (before(i), update(i))]
    return (SETUP, ROLLOUT, *loops, COMMIT, *map(evaluation, range(evals)))


def is_update(phase: str) -> bool:
    return phase.startswith("update")


def is_before(phase: str) -> bool:
    return phase.startswith("before")


def is_eval(phase: str) -> bool:
    return phase.startswith("eval")


def phase_index(phase: str) -> int:
    return int(phase.lstrip("abcdefghijklmnopqrstuvwxyz") or 0)


def bound_names(section_prefix: str, statements: Iterable) -> dict[Expr, str]:
    """The name of each bound expression: that of its first binding."""
    names: dict[Expr, str] = {}
    for statement in statements:
        if isinstance(statement, Bind):
            names.setdefault(statement.expr, section_prefix + statement.name)
    return names


def default_name(expr: Expr, known: Mapping[Expr, str]) -> str:
    """The name of a value that the user did not bind: its printed text, with the names of the values in it."""
    return brief(expr, {e: name.rpartition("/")[2] for e, name in known.items()})


def layout_name(model: str, stage: str) -> str:
    """`actor.train`, `ref.forward`, `actor.generate`."""
    return f"{model}.{stage}"


def training_metric(model: str, index: int) -> str:
    """The metric that records the objective of a model, as written: `train/actor`, then `train2/actor`."""
    return f"{prefix('train', index)}{model}"


def gradient(section_prefix: str, model: str) -> str:
    """What a train step makes and the optimizer's step reads."""
    return f"{section_prefix}{model}.gradient"
