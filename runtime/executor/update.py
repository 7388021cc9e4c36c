"""An update section: epochs over mini-batches, each of which trains every model once and then steps them all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Iterable

import torch

from compiler.exprs import call_temperature
from compiler.plan import OptimizerStep, Record, Statistics, TrainStep, UpdateLoop
from compiler.rows import minibatch_rows, permutation
from rlhf_dsl.typed import Expr
from runtime.executor import training
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
    order = permutation(executor.plan.run.seed, root, executor.iteration.number, epoch, number) if executor.shuffle else range(number)
    mask = rows.kept_units((root,), max(rows.kept, default=0))
    kept = [row for row in order if mask is None or bool(mask[row])]
    return minibatch_rows(kept, loop.minibatches)


def _minibatch(executor: "Executor", loop: UpdateLoop, scope: Scope, sums: dict[str, list[float]]) -> None:
    statistics: list[Expr] = []
    executor.on_minibatch(loop, scope)
    for step in loop.body:
        executor.on_step(executor.iteration.number, step)
        if isinstance(step, Statistics):
            statistics += [executor.exprs[named.expr] for named in step.exprs]
            for expr in statistics:
                executor.value(scope, expr)
        elif isinstance(step, TrainStep):
            _train(executor, step, scope, statistics)
        elif isinstance(step, Record):
            sums.setdefault(step.name, []).append(executor.scalar(scope, executor.exprs[step.expr], step))
        elif isinstance(step, OptimizerStep):
            _step(executor, step, sums)
        else:
            executor._do(step, scope)


def _train(executor: "Executor", step: TrainStep, scope: Scope, statistics: list[Expr]) -> None:
    exprs = executor.exprs
    calls = {named.name: exprs[named.expr] for named in step.calls}
    constants = [exprs[named.expr] for named in step.constants]
    for expr in constants:
        executor.value(scope, expr)
    call = training.TrainCall(
        step, calls, constants, statistics, exprs[step.partial], max(scope.rows.kept, default=0),
        {name: call_temperature(expr) for name, expr in calls.items()})
    models = executor.models
    training.train(executor.world, models.engine(step.layout), models.layouts[step.layout], scope, call)


def _step(executor: "Executor", step: OptimizerStep, sums: dict[str, list[float]]) -> None:
    rate, norm = executor.models.optimizer_step(step.model)
    norm = float(executor.world.reducer.all_reduce(torch.tensor([norm], dtype=torch.float64), "max"))
    if not math.isfinite(norm):
        raise executor.fault_at(step, "R0151", model=step.model)
    sums.setdefault(f"{step.model}/grad_norm", []).append(norm)
    sums.setdefault(f"{step.model}/lr", []).append(rate)


def reads_keep(expr: Expr) -> bool:
    """True if the value counts only what a keep left."""
    seen, stack = set(), [expr]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.attr("keep", 0):
            return True
        stack.extend(node.args)
    return False
