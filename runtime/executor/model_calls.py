"""Forwards, and what all model calls share: how rows are split over a layout, and their ways there and home.

Rows are balanced over data shards by tokens. All ranks compute the same assignment from lengths that all of them know.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Mapping, Optional, Sequence

import torch
from torch import Tensor

from compiler.layout import ModelLayout
from compiler.plan import Forward
from compiler.rows import balance, micro_batches
from rlhf_dsl.typed import Expr
from runtime.engines.base import Engine
from runtime.exchange import Route, move_rows
from runtime.executor.scope import Rows, Scope, places
from runtime.sequences import Sequences, ragged_index
from runtime.values import Value
from runtime.world import World

PER_RESPONSE = ("score", "last_value")


@dataclass(frozen=True)
class Split:
    """Units of a scope over the data shards of a layout.

    shards: by data shard, unit numbers in the order of work; runs: by data shard, (start, stop) of each micro-batch in it
    """

    layout: ModelLayout
    unit: tuple[str, ...]
    units: Tensor
    shards: tuple[Tensor, ...]
    runs: tuple[tuple[tuple[int, int], ...], ...]

    def mine(self, rank: int) -> Tensor:
        """The units that `rank` works on; none outside the layout."""
        if rank not in self.layout:
            return self.units[:0]
        return self.shards[self.layout.coordinates(rank).dp]

    def my_runs(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The micro-batches of `rank` in `mine(rank)`."""
        return self.runs[self.layout.coordinates(rank).dp] if rank in self.layout else ()

    def wants(self, size: int, last_stage: bool = False) -> tuple[Tensor, ...]:
        """For each of `size` ranks, the units it shall get; with `last_stage`, only ranks that compute results get some."""
        def wanted(rank: int) -> Tensor:
            if last_stage and rank in self.layout and self.layout.coordinates(rank).pp != self.layout.pp - 1:
                return self.units[:0]
            return self.mine(rank)

        return tuple(wanted(rank) for rank in range(size))

    def reporters(self, count: int) -> Tensor:
        """int64 [count units of the iteration]: the rank from which each unit's results leave."""
        source = torch.full((count,), -1, dtype=torch.int64)
        for shard, rank in zip(self.shards, self.layout.outputs()):
            source[shard] = rank
        return source


def kept_units_of(scope: Scope, unit: tuple[str, ...], keep: int) -> Tensor:
    """Unit numbers of the scope that the first `keep` keeps left, ascending."""
    units = scope.rows.units(unit, scope.all_rows(unit[0]))
    mask = scope.rows.kept_units(unit, keep)
    return units if mask is None else units[mask[units]]


def split_units(scope: Scope, layout: ModelLayout, unit: tuple[str, ...], keep: int, cost: Tensor,
                micro_batch: int = 0, tokens: int = 0) -> Split:
    """Kept units over the layout's data shards by `cost` (int64 over all units), cut into micro-batches (0: no limit)."""
    units = kept_units_of(scope, unit, keep)
    shards, runs = [], []
    for chosen in balance(cost[units].tolist(), layout.dp):
        mine = units[torch.as_tensor(chosen, dtype=torch.int64)]
        batches = micro_batches(cost[mine].tolist(), micro_batch or None, tokens or None)
        order = [place for batch in batches for place in batch]
        stops = list(itertools.accumulate(len(batch) for batch in batches))
        shards.append(mine[torch.as_tensor(order, dtype=torch.int64)])
        runs.append(tuple(zip([0, *stops], stops)))
    return Split(layout, unit, units, tuple(shards), tuple(runs))


def response_name(expr: Expr) -> str:
    """The name of a response: what `generate` or `reply` was bound to, or the data column."""
    return expr.attr("name") or expr.attr("column")


def sequence_lengths(rows: Rows, name: str, lead: tuple[str, ...], unit: tuple[str, ...]) -> Tensor:
    """int64 over all units: tokens of prompts and responses."""
    return rows.per_unit(rows.prompt_lengths[name] + rows.response_lengths[name], lead, unit)


class SequenceColumns:
    """A response as columns to move: its tokens and, where some are not the model's own, the mask."""

    def __init__(self, rows: Rows, response: Expr, unit: tuple[str, ...]) -> None:
        self.rows, self.unit = rows, unit
        self.name = response_name(response)
        self.lead = rows.dims.sample_dims(response.type.dims)

    def columns(self, batch: Sequences) -> list[tuple[Tensor, Tensor]]:
        columns = [(batch.tokens, sequence_lengths(self.rows, self.name, self.lead, self.unit))]
        if self.rows.own[self.name]:
            columns.append((batch.own, self.rows.per_unit(self.rows.response_lengths[self.name], self.lead, self.unit)))
        return columns

    def assemble(self, moved: Sequence[Tensor], units: Tensor) -> Sequences:
        def at(counts: Tensor) -> Tensor:
            return self.rows._at(counts, self.lead, self.unit, units)

        return Sequences(moved[0], at(self.rows.prompt_lengths[self.name]), at(self.rows.response_lengths[self.name]),
                         moved[1] if self.rows.own[self.name] else None)


def home_route(scope: Scope, split: Split, size: int, last_stage: bool = False) -> Route:
    """From home to the layout."""
    here, source = home_units(scope, split.unit)
    return Route(here, source, split.wants(size, last_stage))


def home_units(scope: Scope, unit: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """(units of this rank, the home rank of every unit)."""
    rows = scope.rows
    here = rows.units(unit, scope.rows_of(unit[0], scope.rank))
    return here, scope.home_of(unit[0]).repeat_interleave(rows.dims.group(unit))


def bring_home(world: World, scope: Scope, split: Split, types: Sequence[tuple[str, ...]], results: Sequence[Tensor]) -> list[Value]:
    """Results of each shard, packed in its order of work, as values of the scope; dropped units hold zeros.

    types: dims of each result; `results` count on the ranks that report, elsewhere they are ignored.
    """
    rows, unit = scope.rows, split.unit
    count = rows.size[unit[0]] * rows.dims.group(unit)
    reports = world.rank in split.layout.outputs()
    here = split.mine(world.rank) if reports else split.units[:0]
    owner = home_units(scope, unit)[1]
    wants = tuple(split.units[owner[split.units] == rank] for rank in range(world.size))
    counts = [rows.element_counts(dims, unit) for dims in types]
    columns = [(r if reports else r.new_zeros(0), c) for r, c in zip(results, counts)]
    moved = move_rows(world, Route(here, split.reporters(count), wants), columns)
    return [Value(dims, _place(scope, unit, wants[world.rank], data, c)) for dims, data, c in zip(types, moved, counts)]


def _place(scope: Scope, unit: tuple[str, ...], arrived: Tensor, data: Tensor, counts: Tensor) -> Tensor:
    """Arrived units into the packing of all of this rank's units."""
    here = scope.rows.units(unit, scope.rows_of(unit[0], scope.rank))
    if arrived.numel() == here.numel():
        return data
    whole = data.new_zeros(int(counts[here].sum()))
    whole[ragged_index(counts[here], places(here, arrived))] = data
    return whole


class ForwardCall:
    """A forward on its way.

    exprs: its calls by printed name; response: what the model reads, in its own tokens
    retain: whether a training goes on from its activations
    """

    def __init__(self, world: World, layout: ModelLayout, scope: Scope, step: Forward, exprs: Mapping[str, Expr],
                 response: Expr, retain: bool = False) -> None:
        self._world, self._layout, self._scope, self._step, self._response = world, layout, scope, step, response
        self._calls, self._retain = [exprs[c.name] for c in step.calls], retain
        self._outputs: Optional[dict[str, Tensor]] = None

    def arrive(self) -> None:
        rows, step = self._scope.rows, self._step
        unit = rows.dims.sample_dims(self._response.type.dims)
        keep = min(c.attr("keep", 0) for c in self._calls)
        sequences = SequenceColumns(rows, self._response, unit)
        cost = sequence_lengths(rows, sequences.name, unit, unit)
        self._split = split_units(self._scope, self._layout, unit, keep, cost, step.micro_batch, step.tokens)
        moved = move_rows(self._world, home_route(self._scope, self._split, self._world.size),
                          sequences.columns(self._scope.env[self._response].data))
        self._batch = sequences.assemble(moved, self._split.mine(self._world.rank))

    def compute(self, engine: Optional[Engine]) -> None:
        if engine is None:
            return
        operations = tuple(dict.fromkeys(c.attr("operation") for c in self._calls))
        runs = self._split.my_runs(self._world.rank)
        self._outputs = engine.forward(self._batch, operations, self._step.temperature, runs, self._retain)

    def leave(self) -> None:
        outputs = self._outputs
        results = [outputs[c.attr("operation")] if outputs else torch.zeros(0) for c in self._calls]
        types = [c.type.dims for c in self._calls]
        for expr, value in zip(self._calls, bring_home(self._world, self._scope, self._split, types, results)):
            self._scope.env[expr] = value
