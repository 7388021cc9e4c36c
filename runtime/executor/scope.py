"""The rows that equations see: those of an iteration, or those of one mini-batch of it.

Rows are known in two ways. *Globally*, every rank knows which rows take part and how long each is (small integers, gathered
once after each `generate`), so that all ranks cut, balance and move rows by the same pure functions. *At home*, each
rank holds the values of its own contiguous range of rows.

A **unit** is what may be cut apart: a root row with its whole group, unit dims ("b",), or one sample, ("b", "g").
Unit numbers count row-major over the unit dims of the whole iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, Mapping, Optional

import torch
from torch import Tensor

from compiler.rows import home_range
from rlhf_dsl.typed import Expr
from runtime.sequences import Sequences, ragged_index
from runtime.values import Frame, Value
from runtime.world import World


@dataclass
class Dims:
    """Sizes as the plan declares them.

    sizes: fixed dims that are no root; lead: ragged dim → what its lengths vary over; bounds: ragged dim → its largest length
    """

    roots: tuple[str, ...]
    sizes: dict[str, int]
    lead: dict[str, tuple[str, ...]]
    bounds: dict[str, int]

    def root_of(self, dims: tuple[str, ...]) -> Optional[str]:
        return next((d for d in dims if d in self.roots), None)

    def group(self, dims: tuple[str, ...]) -> int:
        """Joint size of the fixed dims among `dims` that are no root."""
        return prod(self.sizes[d] for d in dims if d in self.sizes)

    def ragged(self, dims: tuple[str, ...]) -> Optional[str]:
        return next((d for d in dims if d in self.lead), None)

    def sample_dims(self, dims: tuple[str, ...]) -> tuple[str, ...]:
        """The dims that number the responses of a value with `dims`: `lead` of its ragged dim."""
        ragged = self.ragged(dims)
        return self.lead[ragged] if ragged else dims


@dataclass
class Rows:
    """What all ranks know of an iteration's rows.

    size: root dim → number of rows; position: their places in the data stream (int64)
    loads: root dim → rows that one load brings, where `refill` drew several; drawn: those of the iteration before these
    lengths: ragged dim → own tokens of each sample, int64 over all rows
    prompt_lengths, response_lengths: response name → int64 over all samples; own: responses with tokens that are not the model's
    kept: keep index → bool over the units of `keep_dims[index]`: what keeps 1..index leave
    """

    dims: Dims
    size: dict[str, int] = field(default_factory=dict)
    position: dict[str, Tensor] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
    drawn: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, Tensor] = field(default_factory=dict)
    prompt_lengths: dict[str, Tensor] = field(default_factory=dict)
    response_lengths: dict[str, Tensor] = field(default_factory=dict)
    own: dict[str, bool] = field(default_factory=dict)
    kept: dict[int, Tensor] = field(default_factory=dict)
    keep_dims: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def units(self, unit: tuple[str, ...], rows: Tensor) -> Tensor:
        """Unit numbers of whole rows, in the rows' order."""
        group = self.dims.group(unit)
        return (rows[:, None] * group + torch.arange(group)).flatten()

    def mean_lengths(self) -> dict[str, float]:
        """Tokens of a prompt and of a response, means over the samples of all responses, and of the longest response."""
        prompts, responses = (torch.cat([*lengths.values(), torch.zeros(0, dtype=torch.int64)]).double()
                              for lengths in (self.prompt_lengths, self.response_lengths))
        if not responses.numel():
            return {}
        return {"prompt": float(prompts.mean()), "response": float(responses.mean()), "longest": float(responses.max())}

    def kept_units(self, unit: tuple[str, ...], keep: int) -> Optional[Tensor]:
        """bool over all units, None if nothing was dropped; a row with any sample kept is kept as a row."""
        root = unit[0]
        masks = [self._spread(i, unit) for i in range(1, keep + 1) if self.keep_dims.get(i, ("",))[0] == root]
        if not masks:
            return None
        return torch.stack(masks).all(0)

    def _spread(self, index: int, unit: tuple[str, ...]) -> Tensor:
        """A mask over `unit`: any of the groups that a unit has not, and the same for all of those that it has more."""
        have, sizes = self.keep_dims[index], {unit[0]: self.size[unit[0]], **self.dims.sizes}
        mask = self.kept[index].view([sizes[d] for d in have])
        for axis in reversed([i for i, d in enumerate(have) if d not in unit]):
            mask = mask.any(axis)
        shared = [d for d in have if d in unit]
        mask = mask.permute([shared.index(d) for d in unit if d in shared])
        mask = mask.reshape([sizes[d] if d in shared else 1 for d in unit])
        return mask.expand([sizes[d] for d in unit]).reshape(-1)

    def element_counts(self, dims: tuple[str, ...], unit: tuple[str, ...]) -> Tensor:
        """int64 over all units: elements that a value with `dims` has in each."""
        rows, cells = self.size[unit[0]], self.dims.group(unit)
        ragged = self.dims.ragged(dims)
        if ragged is None:
            inside = self.dims.group(tuple(d for d in dims if d not in unit))
            return torch.full((rows * cells,), inside, dtype=torch.int64)
        return self.per_unit(self.lengths[ragged], self.dims.lead[ragged], unit)

    def per_unit(self, counts: Tensor, lead: tuple[str, ...], unit: tuple[str, ...]) -> Tensor:
        """Counts over `lead`, summed or repeated to counts over units."""
        if len(lead) > len(unit):
            return counts.view(self.size[unit[0]], -1).sum(1)
        if len(lead) < len(unit):
            return counts.repeat_interleave(self.dims.group(unit))
        return counts

    def frame(self, unit: tuple[str, ...], units: Tensor) -> Frame:
        """The frame of any units, in any order: each unit is a row of it, whose group has size 1 if a unit is a sample.

        Tokens of responses whose group a unit cuts are not in it.
        """
        root, group = unit[0], self.dims.group(unit)
        split = set(unit[1:])
        sizes = {d: 1 if d in split else n for d, n in self.dims.sizes.items()}
        lengths = {t: self._at(counts, self.dims.lead[t], unit, units) for t, counts in self.lengths.items()
                   if self.dims.lead[t][0] == root and (not split or set(self.dims.lead[t]) <= set(unit))}
        lead = {t: self.dims.lead[t] for t in lengths}
        return Frame({root: units // group}, sizes, lengths, lead, {root: self.size[root]}, folded=unit[1:])

    def _at(self, counts: Tensor, lead: tuple[str, ...], unit: tuple[str, ...], units: Tensor) -> Tensor:
        if len(lead) > len(unit):
            return counts.view(self.size[unit[0]], -1)[units].flatten()
        return counts[units // self.dims.group(unit)] if len(lead) < len(unit) else counts[units]


class Env(dict):
    """Values by expression; what is missing here and known outside is selected from there, once."""

    def __init__(self, scope: "Scope") -> None:
        super().__init__()
        self._scope = scope

    def __contains__(self, expr: object) -> bool:
        return dict.__contains__(self, expr) or self._scope.inherits(expr)

    def __missing__(self, expr: Expr) -> Value:
        value = self._scope.inherit(expr)
        self[expr] = value
        return value

    def get(self, expr: Expr, default=None):
        return self[expr] if expr in self else default


class Scope:
    """Rows that take part and the values known of them.

    rows: root dim → row numbers in the iteration, ascending, the same on all ranks; `frame`: of those that live on this rank
    keeps: keep index → bool Value of this rank's rows
    prompt_texts: response name → the prompt of each of this rank's responses, as text
    calls: model calls on their way, by the name of their step; statistics: what was evaluated for train steps
    """

    def __init__(self, rows: Rows, rank: int, shards: int, chosen: Optional[Mapping[str, Tensor]] = None,
                 parent: Optional["Scope"] = None) -> None:
        self.rows, self.rank, self.shards, self.parent = rows, rank, shards, parent
        self.chosen = dict(chosen) if chosen is not None else {}
        self.env = Env(self)
        self.keeps: dict[int, Value] = {}
        self.prompt_texts: dict[str, list[str]] = {}
        self.calls: dict[str, Any] = {}
        self.statistics: list[Expr] = []
        self.frame = Frame(rows={}, sizes=dict(rows.dims.sizes), lengths={}, lead={}, totals={})
        self.refresh()

    def all_rows(self, root: str) -> Tensor:
        """Row numbers of the scope, on all ranks."""
        return self.chosen.get(root, torch.arange(self.rows.size[root]))

    def rows_of(self, root: str, rank: int) -> Tensor:
        """The scope's rows whose home is `rank`, ascending."""
        loaded = self.rows.loads.get(root, self.rows.size[root])
        start, stop = home_range(loaded, self.shards, rank)
        rows = self.all_rows(root)
        place = rows % loaded if loaded < self.rows.size[root] else rows
        return rows[(place >= start) & (place < stop)]

    def home_of(self, root: str) -> Tensor:
        """int64 [rows of the iteration]: the rank that holds each."""
        size = self.rows.size[root]
        loaded = self.rows.loads.get(root, size)
        owner = torch.empty(loaded, dtype=torch.int64)
        for rank in range(self.shards):
            start, stop = home_range(loaded, self.shards, rank)
            owner[start:stop] = rank
        return owner.repeat(size // loaded) if loaded else owner

    def refresh(self) -> None:
        """The local frame, after roots or lengths became known."""
        frames = [self.rows.frame((root,), self.rows_of(root, self.rank)) for root in self.rows.size]
        rows, lengths, lead, totals = {}, {}, {}, {}
        for frame in frames:
            rows |= frame.rows
            lengths |= frame.lengths
            lead |= frame.lead
        totals = {root: int(self.all_rows(root).numel()) for root in self.rows.size}
        self.frame = Frame(rows=rows, sizes=dict(self.rows.dims.sizes), lengths=lengths, lead=lead, totals=totals)

    # ---- values of the scope outside, cut to the rows in here

    def inherits(self, expr: object) -> bool:
        return self.parent is not None and expr in self.parent.env

    def inherit(self, expr: Expr) -> Value:
        if not self.inherits(expr):
            raise KeyError(expr)
        return self.cut(self.parent.env[expr])

    def inherit_keeps(self) -> None:
        self.keeps = {index: self.cut(value) for index, value in self.parent.keeps.items()}

    def cut(self, value: Value) -> Value:
        """The rows in here of a value over the parent's rows on this rank."""
        root = self.rows.dims.root_of(value.dims)
        if root is None:
            return value
        outer = self.parent.rows_of(root, self.rank)
        local = torch.searchsorted(outer, self.rows_of(root, self.rank))
        return select_rows(value, self.rows, root, outer, local)

    def child(self, chosen: Mapping[str, Tensor]) -> "Scope":
        scope = Scope(self.rows, self.rank, self.shards, {**self.chosen, **chosen}, parent=self)
        scope.inherit_keeps()
        return scope


def select_rows(value: Value, rows: Rows, root: str, numbers: Tensor, local: Tensor) -> Value:
    """`numbers`: the rows that `value` holds; `local`: which of them, by place."""
    if isinstance(value.data, Sequences):
        group = rows.dims.group(rows.dims.sample_dims(value.dims))
        return Value(value.dims, value.data.select((local[:, None] * group + torch.arange(group)).flatten()))
    if isinstance(value.data, list):
        group = rows.dims.group(value.dims)
        return Value(value.dims, [value.data[i * group + j] for i in local.tolist() for j in range(group)])
    counts = rows.element_counts(value.dims, (root,))[numbers]
    return Value(value.dims, value.data[ragged_index(counts, local)])


def spread_units(value: Value, rows: Rows, unit: tuple[str, ...], numbers: Tensor) -> Tensor:
    """`value` over the rows `numbers`, packed over their units: what a unit lacks of the group's dims is repeated."""
    if len(unit) == 1 or set(unit) <= set(rows.dims.sample_dims(value.dims)):
        return value.data
    counts = rows.element_counts(value.dims, unit[:1])[numbers]
    return value.data[ragged_index(counts, torch.arange(numbers.numel()).repeat_interleave(rows.dims.group(unit)))]


def gather(world: World, scope: Scope, unit: tuple[str, ...], local: Tensor) -> Tensor:
    """What each rank has for its units ([units here, ..]), of all units of the iteration, on all ranks."""
    rows = scope.rows
    numbers = [rows.units(unit, scope.rows_of(unit[0], rank)) for rank in range(world.size)]
    width = prod(local.shape[1:])
    arrived = world.all_gather(local.flatten(), [width * n.numel() for n in numbers]).view(-1, *local.shape[1:])
    whole = torch.empty_like(arrived)
    whole[torch.cat(numbers)] = arrived
    return whole


def places(within: Tensor, chosen: Tensor) -> Tensor:
    """Where each of `chosen` stands in `within` (ascending, holding all of them)."""
    return torch.searchsorted(within, chosen)


