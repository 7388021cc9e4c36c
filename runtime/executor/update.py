"""An update section: epochs over mini-batches, each of which trains and steps every model once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Iterable

import torch

from compiler.plan import OptimizerStep, Record, UpdateLoop
from compiler.rows import minibatch_rows, permutation
from rlhf_dsl.typed import Expr, walk
from runtime.executor.scope import Scope

if TYPE_CHECKING:
    from runtime.executor.executor import Executor


def run(executor: "Executor", loop: UpdateLoop, scope: Scope) -> None:
    """All epochs of `loop`. Metrics are averaged over the iteration's mini-batches, of all updates that record them."""
    for step in loop.before:
        executor._do(step, scope)
    sums: dict[str, list[float]] = {}
    for epoch in range(loop.epochs):
        for chosen in minibatches(executor, loop, scope, epoch):
            if any(rows.numel() for rows in chosen.values()):
                _minibatch(executor, loop, scope.child(chosen), sums)
    series = executor.iteration.series
    for name, values in sums.items():
        series.setdefault(name, []).extend(values)
        executor.iteration.metrics[name] = math.fsum(series[name]) / len(series[name])


def minibatches(executor: "Executor", loop: UpdateLoop, scope: Scope, epoch: int) -> Iterable[dict[str, torch.Tensor]]:
    """By mini-batch, the rows of each root dim, ascending: the kept rows, permuted and cut into runs."""
    runs = {root: _runs(executor, loop, scope, root, epoch) for root in loop.roots}
    for index in range(loop.minibatches):
        yield {root: torch.tensor(sorted(cuts[index]), dtype=torch.int64) for root, cuts in runs.items()}


def _runs(executor: "Executor", loop: UpdateLoop, scope: Scope, root: str, epoch: int) -> tuple[tuple[int, ...], ...]:
    rows = scope.rows
    number = rows.size[root]
    named = executor.plan.run.seed, root, executor.iteration.number, epoch
    order = permutation(*named, number) if executor.shuffle else range(number)
    mask = rows.kept_units((root,), max(rows.kept, default=0))
    kept = [row for row in order if mask is None or bool(mask[row])]
    return minibatch_rows(kept, loop.minibatches)


def _minibatch(executor: "Executor", loop: UpdateLoop, scope: Scope, sums: dict[str, list[float]]) -> None:
    """Steps as they stand; all norms are agreed on at the end, so that no model waits for another's step."""
    stepped: dict[OptimizerStep, tuple[float, float]] = {}  # (gradient norm, learning rate)
    executor.on_minibatch(loop, scope)
    for step in loop.body:
        if isinstance(step, Record):
            with executor.timed(step):
                sums.setdefault(step.name, []).append(executor.scalar(scope, executor.exprs[step.expr], step))
        elif isinstance(step, OptimizerStep):
            with executor.timed(step):
                rate, norm = executor.models.optimizer_step(step.model)
            stepped[step] = norm, rate
        else:
            executor._do(step, scope)
    _agree(executor, stepped, sums)


def _agree(
    executor: "Executor", stepped: dict[OptimizerStep, tuple[float, float]], sums: dict[str, list[float]]
) -> None:
    """Gradient norms on all ranks; one that does not train a model has 0 for it. Raises R0151."""
    if not stepped:
        return
    norms = torch.tensor([norm for norm, _ in stepped.values()], dtype=torch.float64)
    known = executor.world.reducer.all_reduce(norms, "max")
    for (step, (_, rate)), norm in zip(stepped.items(), known.tolist()):
        if not math.isfinite(norm):
            raise executor.fault_at(step, "R0151", model=step.model)
        sums.setdefault(f"{step.model}/grad_norm", []).append(norm)
        sums.setdefault(f"{step.model}/lr", []).append(rate)


def keeps_read(expr: Expr) -> int:
    """How many keeps have a say in what a value counts."""
    return max(node.attr("keep", 0) for node in walk(expr))
