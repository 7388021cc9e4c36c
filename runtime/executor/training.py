"""A train step: a mini-batch goes to the model's layout in micro-batches, and its gradient accumulates there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Mapping, Optional, Sequence

import torch
from torch import Tensor

from compiler.exprs import call_temperature
from compiler.layout import ModelLayout
from compiler.plan import TrainStep
from rlhf_dsl.typed import Expr
from runtime.engines.base import Call, Engine
from runtime.evaluator import Evaluator
from runtime.exchange import move_rows
from runtime.executor.model_calls import (
    SequenceColumns, Split, bring_home, home_route, sequence_lengths, split_units,
)
from runtime.executor.scope import Scope, spread_units
from runtime.reducers import SoloReducer
from runtime.sequences import Sequences, ragged_index
from runtime.values import Frame, Value
from runtime.world import World


@dataclass(frozen=True)
class Part:
    """One root dim's share of a train step on this rank: units in the order of work, cut into micro-batches.

    runs: (start, stop) into `units` for each micro-batch
    """

    split: Split
    units: Tensor
    runs: tuple[tuple[int, int], ...]
    sequences: Mapping[str, Sequences]
    constants: Mapping[Expr, Value]
    keeps: Mapping[int, Value]

    def run(self, index: int) -> Tensor:
        """Places of micro-batch `index`; nothing after the last."""
        start, stop = self.runs[index] if index < len(self.runs) else (0, 0)
        return torch.arange(start, stop)


class TrainCall:
    """A train step on its way.

    value: of an expression at home; a collective, where it has not been evaluated yet
    calls, constants: expressions, the first by printed name; partial: what a micro-batch evaluates
    keep: index of the last keep; temperature: by call
    """

    def __init__(self, world: World, layout: ModelLayout, scope: Scope, step: TrainStep, exprs: Sequence[Expr],
                 value: Callable[[Expr], Value]) -> None:
        self.world, self.layout, self.scope, self.step, self.value = world, layout, scope, step, value
        self.calls = {named.name: exprs[named.expr] for named in step.calls}
        self.constants = [exprs[named.expr] for named in step.constants]
        self.partial = exprs[step.partial]
        self.keep = max(scope.rows.kept, default=0)
        self.temperature = {name: call_temperature(expr) for name, expr in self.calls.items()}
        self._parts: dict[str, Part] = {}
        self._outputs: Optional[list[dict[str, Tensor]]] = None

    def arrive(self) -> None:
        dims = self.scope.rows.dims
        roots = dict.fromkeys(dims.root_of(e.type.dims) or e.args[0].type.dims[0] for e in self.calls.values())
        self._parts = {root: _part(self, root) for root in roots}

    def compute(self, engine: Optional[Engine]) -> None:
        """Accumulates the gradient of the mini-batch. Scalars that its objective reads are known on every rank."""
        for expr in self.constants:
            self.value(expr)
        if engine is not None:
            self._outputs = _on_engine(engine, self, list(self._parts.values()))

    def leave(self) -> None:
        """The model's outputs come home."""
        outputs, scope = self._outputs, self.scope
        for root, part in self._parts.items():
            chosen = [(name, e) for name, e in self.calls.items() if _root(scope, e) == root]
            results = [torch.cat([o[name] for o in outputs]) if outputs else torch.zeros(0) for name, _ in chosen]
            values = bring_home(self.world, scope, part.split, [e.type.dims for _, e in chosen], results)
            scope.env.update(zip((e for _, e in chosen), values))


def unit_of(root: str, step_unit: tuple[str, ...]) -> tuple[str, ...]:
    return step_unit if step_unit and step_unit[0] == root else (root,)


def _root(scope: Scope, expr: Expr) -> Optional[str]:
    return scope.rows.dims.root_of(expr.type.dims)


def _part(call: TrainCall, root: str) -> Part:
    world, scope, rows = call.world, call.scope, call.scope.rows
    unit = unit_of(root, call.step.unit)
    responses = list(dict.fromkeys(e.args[0] for e in call.calls.values() if _root(scope, e) == root))
    columns = [SequenceColumns(rows, r, unit) for r in responses]
    cost = sum(sequence_lengths(rows, c.name, c.lead, unit) for c in columns)
    split = split_units(scope, call.layout, unit, call.keep, cost, call.step.micro_batch, call.step.tokens)
    route = home_route(scope, split, world.size)
    mine = split.mine(world.rank)
    sequences = {}
    for response, column in zip(responses, columns):
        moved = move_rows(world, route, column.columns(scope.env[response].data))
        sequences[column.name] = column.assemble(moved, mine)
    constants, keeps = _constants(call, root, split)
    return Part(split, mine, split.my_runs(world.rank), sequences, constants, keeps)


def _constants(call: TrainCall, root: str, split: Split) -> tuple[dict, dict]:
    """Values over rows of `root` that the objective reads, and keep masks where a unit is a row whose group may have gaps."""
    world, scope = call.world, call.scope
    exprs = [e for e in call.constants if _root(scope, e) == root]
    keeps = [(i, v) for i, v in scope.keeps.items() if _root_of_value(scope, v) == root and i <= call.keep]
    values = [call.value(e) for e in exprs] + [v for _, v in keeps]
    if not values:
        return {}, {}
    rows, unit = scope.rows, split.unit
    numbers = scope.rows_of(root, scope.rank)
    columns = [(spread_units(v, rows, unit, numbers), rows.element_counts(v.dims, unit)) for v in values]
    moved = move_rows(world, home_route(scope, split, world.size, last_stage=True), columns)
    arrived = [Value(v.dims, data) for v, data in zip(values, moved)]
    return dict(zip(exprs, arrived)), {i: v for (i, _), v in zip(keeps, arrived[len(exprs):])}


def _root_of_value(scope: Scope, value: Value) -> Optional[str]:
    return scope.rows.dims.root_of(value.dims)


def _on_engine(engine: Engine, call: TrainCall, parts: Sequence[Part]) -> Optional[list[dict[str, Tensor]]]:
    count = max((len(p.runs) for p in parts), default=0)
    batches = [_micro_batch(call, parts, i) for i in range(count)]

    def objective(index: int, outputs: Mapping[str, Tensor]) -> Tensor:
        value = _evaluate(call, parts, index, outputs)
        return -value if call.step.maximize else value

    return engine.train(batches, objective, call.step.recompute, bool(call.step.retained))


def _micro_batch(call: TrainCall, parts: Sequence[Part], index: int) -> dict[str, Call]:
    batch, scope = {}, call.scope
    for name, expr in call.calls.items():
        part = next(p for p in parts if p.split.unit[0] == _root(scope, expr))
        column = SequenceColumns(scope.rows, expr.args[0], part.split.unit)
        rows = _samples(scope, part, column.lead, part.run(index))
        batch[name] = Call(expr.attr("operation"), part.sequences[column.name].select(rows), call.temperature[name])
    return batch


def _samples(scope: Scope, part: Part, lead: tuple[str, ...], places: Tensor) -> Tensor:
    """Places of units as places of their responses: a unit that is a row has its whole group of them."""
    group = scope.rows.dims.group(lead) if len(lead) > len(part.split.unit) else 1
    return (places[:, None] * group + torch.arange(group)).flatten()


def _evaluate(call: TrainCall, parts: Sequence[Part], index: int, outputs: Mapping[str, Tensor]) -> Tensor:
    """The partial objective on micro-batch `index`, differentiable in `outputs`."""
    scope = call.scope
    env = {e: scope.env[e] for e in scope.statistics}
    env |= {e: scope.env[e] for e in call.constants if _root(scope, e) is None}
    keeps: dict[int, Value] = {}
    frames = []
    for part in parts:
        places = part.run(index)
        frames.append(scope.rows.frame(part.split.unit, part.units[places]))
        for expr, value in part.constants.items():
            env[expr] = _cut(scope, part, value, places)
        for number, value in part.keeps.items():
            keeps[number] = _cut(scope, part, value, places)
    env |= {expr: Value(expr.type.dims, outputs[name]) for name, expr in call.calls.items()}
    evaluator = Evaluator(join_frames(frames), SoloReducer(), next(iter(outputs.values())).dtype, keeps, partial=True)
    return evaluator.evaluate(call.partial, env).data.reshape(())


def _cut(scope: Scope, part: Part, value: Value, places: Tensor) -> Value:
    counts = scope.rows.element_counts(value.dims, part.split.unit)[part.units]
    return Value(value.dims, value.data[ragged_index(counts, places)])


def join_frames(frames: Sequence[Frame]) -> Frame:
    """One frame over several root dims."""
    if len(frames) == 1:
        return frames[0]
    rows, lengths, lead, totals = {}, {}, {}, {}
    for frame in frames:
        rows |= frame.rows
        lengths |= frame.lengths
        lead |= frame.lead
        totals |= frame.totals
    return Frame(rows=rows, sizes=dict(frames[0].sizes), lengths=lengths, lead=lead, totals=totals)
