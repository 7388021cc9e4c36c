"""`generate`: prompts go from home to the generation layout, samples come home, their lengths become known to all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from compiler.layout import ModelLayout
from compiler.rows import home_range
from rlhf_dsl.typed import Expr
from runtime.engines.sampling import SamplingOptions
from runtime.exchange import Route, move_rows
from runtime.executor.loading import set_lengths
from runtime.executor.model_calls import home_units, kept_units_of
from runtime.executor.scope import Scope, gather, places
from runtime.sequences import Sequences, ragged_index
from runtime.tokenizer import Tokenizer
from runtime.values import Value
from runtime.world import World


def options_of(expr: Expr, bound: int, tokenizer: Tokenizer) -> SamplingOptions:
    """The sampling options of a `generate` expression; no option means the plain distribution of the model."""
    return SamplingOptions(
        max_tokens=min(int(expr.attr("max_tokens") or bound), bound), temperature=float(expr.attr("temperature", 1.0)),
        top_k=int(expr.attr("top_k") or 0), top_p=float(expr.attr("top_p") or 1.0), stop_ids=tokenizer.end_ids,
        stop_strings=tuple(expr.attr("stop") or ()), min_tokens=int(expr.attr("min_tokens") or 0))


class GenerateCall:
    """A response on its way to be sampled. draws: (seed, iteration), of which the numbers that draw tokens are made."""

    def __init__(self, world: World, layout: ModelLayout, scope: Scope, expr: Expr, tokenizer: Tokenizer,
                 draws: tuple[int, int]) -> None:
        self._world, self._layout, self._scope, self._expr = world, layout, scope, expr
        self._tokenizer, self._draws = tokenizer, draws
        self._unit = expr.args[0].type.dims
        self._drawn: Optional[Sequences] = None

    def arrive(self) -> None:
        world, scope, dims, unit = self._world, self._scope, self._scope.rows.dims, self._unit
        self._texts = scope.env[self._expr.args[0]].data
        samples = dims.group(dims.sample_dims(self._expr.type.dims)) // dims.group(unit)
        local = [self._tokenizer.encode_prompt(text) for text in self._texts]
        self._lengths = gather(world, scope, unit, torch.tensor([len(p) for p in local], dtype=torch.int64))
        prompts = kept_units_of(scope, unit, self._expr.attr("keep", 0))
        self._shares = _shares(prompts, self._layout, world.size, samples)
        tokens = torch.tensor([t for p in local for t in p], dtype=torch.int64)
        route = Route(*home_units(scope, unit), self._shares.wants)
        self._prompts = move_rows(world, route, [(tokens, self._lengths)])[0]

    def compute(self, engine: Any) -> None:
        if engine is None:
            return
        rows, shares, (seed, iteration) = self._scope.rows, self._shares, self._draws
        mine, group = shares.wants[self._world.rank], rows.dims.group(self._unit)
        options = options_of(self._expr, rows.dims.bounds[self._expr.type.dims[-1]], self._tokenizer)
        self._drawn = engine.generate(
            list(self._prompts.split(self._lengths[mine].tolist())), shares.samples,
            rows.position[self._unit[0]][mine // group].numpy(), self._expr.attr("name"), iteration, seed, options,
            self._tokenizer.decode, first_sample=(mine % group * shares.samples).numpy())

    def leave(self) -> None:
        scope, expr = self._scope, self._expr
        scope.prompt_texts[expr.attr("name")] = [text for text in self._texts for _ in range(self._shares.samples)]
        scope.env[expr] = _come_home(self._world, scope, expr, self._shares, self._lengths, self._drawn)
        scope.refresh()


class ToldCall:
    """A response that was sampled before the run went on from a checkpoint. told: of all samples, in their order."""

    def __init__(self, scope: Scope, expr: Expr, told: Sequences) -> None:
        self._scope, self._expr, self._told = scope, expr, told

    def arrive(self) -> None:
        """Nothing is asked."""

    def compute(self, engine: Any) -> None:
        """Nothing is sampled."""

    def leave(self) -> None:
        scope, expr, told = self._scope, self._expr, self._told
        dims, name = scope.rows.dims.sample_dims(expr.type.dims), expr.attr("name")
        known = torch.stack([told.prompt_lengths, told.response_lengths, told.response_lengths], 1)
        set_lengths(scope, name, expr.type.dims, known)
        here, texts = scope.rows.units(dims, scope.rows_of(dims[0], scope.rank)), scope.env[expr.args[0]].data
        scope.prompt_texts[name] = [text for text in texts for _ in range(here.numel() // max(len(texts), 1))]
        scope.env[expr] = Value(expr.type.dims, told.select(here))
        scope.refresh()


@dataclass(frozen=True)
class Shares:
    """Prompts over the data shards of a generation layout.

    prompts: unit numbers of all that are asked; wants: by rank, those it samples from, the same on all ranks of a shard
    """

    layout: ModelLayout
    prompts: Tensor
    wants: tuple[Tensor, ...]
    samples: int

    def reported(self, rank: int) -> Tensor:
        """Numbers of the samples that leave from `rank`; none where another rank of its shard reports."""
        return self.of(self.wants[rank] if rank in self.layout.outputs() else self.prompts[:0])

    def of(self, prompts: Tensor) -> Tensor:
        """Sample numbers of prompts, in their order."""
        return (prompts[:, None] * self.samples + torch.arange(self.samples)).flatten()


def _shares(prompts: Tensor, layout: ModelLayout, size: int, samples: int) -> Shares:
    """Contiguous runs of prompts, one for each data shard, to every rank of the shard."""
    wants = [prompts[:0]] * size
    for shard in range(layout.dp):
        start, stop = home_range(prompts.numel(), layout.dp, shard)
        for rank in layout.replica(shard):
            wants[rank] = prompts[start:stop]
    return Shares(layout, prompts, tuple(wants), samples)


def _come_home(world: World, scope: Scope, expr: Expr, shares: Shares, prompt_lengths: Tensor, drawn: Optional[Sequences]) -> Value:
    """The response at home; its lengths become known to all ranks. drawn: of this rank's shard, None outside the layout."""
    reports = drawn is not None and world.rank in shares.layout.outputs()
    known, truncated = _facts(world, shares, prompt_lengths, drawn if reports else None)
    set_lengths(scope, expr.attr("name"), expr.type.dims, known)
    whole, response = known[:, 0] + known[:, 1], known[:, 1]
    tokens = drawn.tokens if reports else torch.zeros(0, dtype=torch.int64)
    logprobs = drawn.logprobs if reports else torch.zeros(0)
    mine, route = _route_home(world, scope, expr.args[0].type.dims, shares, known.shape[0])
    moved = move_rows(world, route, [(tokens, whole), (logprobs, response)])
    arrived = places(mine, route.wants[world.rank])
    tokens, logprobs = (_fill(data, lengths[mine], arrived) for data, lengths in zip(moved, (whole, response)))
    return Value(expr.type.dims, Sequences(tokens, known[mine, 0], known[mine, 1], None, logprobs, truncated[mine]))


def _facts(world: World, shares: Shares, prompt_lengths: Tensor, drawn: Optional[Sequences]) -> tuple[Tensor, Tensor]:
    """(int64 [samples, 3]: prompt, response and own lengths, bool [samples]: truncated), on all ranks."""
    mine = torch.zeros(0, 2, dtype=torch.int64)
    if drawn is not None:
        mine = torch.stack([drawn.response_lengths, drawn.truncated.long()], 1)
    from_ranks = [shares.reported(rank) for rank in range(world.size)]
    gathered = world.all_gather(mine.flatten(), [2 * samples.numel() for samples in from_ranks]).view(-1, 2)
    places_of = torch.cat(from_ranks)
    # A dropped row has no response: one token keeps its place, and nothing ever reads it.
    known = torch.ones(prompt_lengths.numel() * shares.samples, 3, dtype=torch.int64)
    known[:, 0] = prompt_lengths.repeat_interleave(shares.samples)
    known[places_of, 1:] = gathered[:, :1]
    truncated = torch.zeros(known.shape[0], dtype=torch.bool)
    truncated[places_of] = gathered[:, 1].bool()
    return known, truncated


def _route_home(world: World, scope: Scope, unit: tuple[str, ...], shares: Shares, count: int) -> tuple[Tensor, Route]:
    """(the samples whose home is this rank, the way of all that were drawn)."""
    here, owner = home_units(scope, unit)
    source = torch.full((count,), -1, dtype=torch.int64)
    for rank in shares.layout.outputs():
        source[shares.reported(rank)] = rank
    asked, owner = shares.of(shares.prompts), owner.repeat_interleave(shares.samples)
    wants = tuple(asked[owner[asked] == rank] for rank in range(world.size))
    return shares.of(here), Route(shares.reported(world.rank), source, wants)


def _fill(data: Tensor, lengths: Tensor, arrived: Tensor) -> Tensor:
    """Arrived sequences into the packing of all of this rank's; those of dropped rows hold zeros."""
    if arrived.numel() == lengths.numel():
        return data
    whole = data.new_zeros(int(lengths.sum()))
    whole[ragged_index(lengths, arrived)] = data
    return whole
