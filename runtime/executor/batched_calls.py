"""Batched Python ops: one call an iteration, which sees the whole batch, or what `keep` left of it.

The rows of all ranks are gathered and rank 0 calls, so that the result does not depend on the number of ranks. Arguments are
nested lists over the dims of the op's annotations, rows in the order of the data stream.
"""

from __future__ import annotations

import json
from typing import Any, Iterator, Sequence

import torch

from rlhf_dsl.ops import annotation_dims
from runtime.executor.scope import Scope
from runtime.python_ops import OpRunner
from runtime.reducers import Reducer
from runtime.values import Value

Nested = Any  # an int, or a list of Nested


def call(scope: Scope, reducer: Reducer, runner: OpRunner, args: Sequence[Value], lead: tuple[str, ...],
         keep: int) -> dict[int, Any]:
    """The results by their local place over `lead`, the result's dims without a ragged one. Collective."""
    orders = [_order(annotation_dims(annotation), value.dims) for (_, annotation), value in zip(runner.op.args, args)]
    means = {name: dim for (_, annotation), order in zip(runner.op.args, orders)
             for name, dim in zip(annotation_dims(annotation), order)}
    into = tuple(d for d in (means[name] for name in runner.op.result_dims) if d in lead)
    root = next((d for d in lead if d in scope.frame.rows), None)
    chosen = [0] if root is None else kept_places(scope, (root,), keep)
    columns = [_column(scope, value, order, root, chosen, keep) for value, order in zip(args, orders)]
    mine = [0] if root is None else scope.frame.rows[root][torch.tensor(chosen, dtype=torch.int64)].tolist()
    rows = sorted((row for part in _gathered(reducer, [mine, columns]) for row in zip(part[0], zip(*part[1]))), key=lambda r: r[0])
    if root is None:
        rows = rows[:1]
    axes = [order.index(root) if root in order else None for order in orders]
    whole = [_merged([cells[i] for _, cells in rows], axis) for i, axis in enumerate(axes)]
    result = runner.call([[argument] for argument in whole])[0] if rows and reducer.rank == 0 else None
    result = _gathered(reducer, result)[0]
    axis = into.index(root) if root in into else None
    place_of = {row: i for i, (row, _) in enumerate(rows)}
    parts = [_part(result, axis, place_of[row]) for row in mine] if rows else []
    places = [_places(scope, into, lead, root, row, keep) for row in chosen]
    return {place: leaf for where, part in zip(places, parts) for place, leaf in _pairs(where, part)}


def _gathered(reducer: Reducer, value: Any) -> list[Any]:
    """The Python values of all ranks, in their order, as the bytes of their JSON."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(bytes(part.tolist())) for part in reducer.all_gather_rows(data)]


def _merged(parts: list[Nested], axis: int | None) -> Nested:
    """Nested lists with one row each, as one with all rows along `axis`; what has no rows is the same everywhere."""
    if axis is None or not parts:
        return parts[0] if parts else []
    if axis == 0:
        return [entry for part in parts for entry in part]
    return [_merged(list(entries), axis - 1) for entries in zip(*parts, strict=True)]


def _part(result: Nested, axis: int | None, row: int) -> Nested:
    """One row of a result, which stays a list of one along `axis`."""
    if axis is None:
        return result
    return [result[row]] if axis == 0 else [_part(entry, axis - 1, row) for entry in result]


def kept_places(scope: Scope, lead: tuple[str, ...], keep: int) -> list[int]:
    """The local places over `lead` that the first `keep` keeps left."""
    mask = scope.rows.kept_units(lead, keep) if lead and keep else None
    if mask is None:
        return list(range(scope.frame.numel(lead)))
    here = scope.rows.units(lead, scope.rows_of(lead[0], scope.rank))
    return mask[here].nonzero().flatten().tolist()


def cells_of(scope: Scope, value: Value) -> tuple[tuple[str, ...], list]:
    """(dims without a ragged one, a cell for each of their elements): a scalar, a text, or the list of a row's tokens."""
    if scope.frame.is_ragged(value.dims):
        parts = value.data.split(scope.frame.row_lengths(value.dims).tolist())
        return value.dims[:-1], [part.tolist() for part in parts]
    return value.dims, value.data.tolist() if isinstance(value.data, torch.Tensor) else value.data


def _order(names: tuple[str, ...], dims: tuple[str, ...]) -> tuple[str, ...]:
    """The dims of an argument as its annotation nests them: by name where the names are there, else as they are."""
    return names if set(names) == set(dims) else dims


def _column(scope: Scope, value: Value, order: tuple[str, ...], root: str | None, chosen: list[int],
            keep: int) -> list:
    dims, cells = cells_of(scope, value)
    order = tuple(d for d in order if d in dims)
    return [_filled(_places(scope, order, dims, root, row, keep), cells) for row in chosen]


def _places(scope: Scope, order: tuple[str, ...], dims: tuple[str, ...], root: str | None, row: int, keep: int) -> Nested:
    """The local places over `dims` of one root row, nested in `order`, without those that were dropped."""
    grid = torch.arange(scope.frame.numel(dims)).view(scope.frame.shape(dims))
    if root in dims:
        grid = grid.narrow(dims.index(root), row, 1)
    kept = set(kept_places(scope, dims, keep)) if root in dims else None
    return _pruned(grid.permute([dims.index(d) for d in order]).tolist(), kept)


def _pruned(places: Nested, kept: set[int] | None) -> Nested:
    if kept is None or not isinstance(places, list):
        return places
    inner = (_pruned(p, kept) for p in places if isinstance(p, list) or p in kept)
    return [p for p in inner if p != []]


def _filled(places: Nested, cells: list) -> Nested:
    return [_filled(p, cells) for p in places] if isinstance(places, list) else cells[places]


def _pairs(places: Nested, result: Nested) -> Iterator[tuple[int, Any]]:
    if not isinstance(places, list):
        yield places, result
        return
    for inner, value in zip(places, result, strict=True):
        yield from _pairs(inner, value)
