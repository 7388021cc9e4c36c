"""`generate`: prompts go from home to the generation layout, samples come home, their lengths become known to all."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from compiler.layout import ModelLayout
from compiler.rows import home_range
from rlhf_dsl.typed import Expr
from runtime.engines.sampling import SamplingOptions
from runtime.exchange import Route, move_rows
from runtime.executor.loading import set_lengths
from runtime.executor.model_calls import home_units
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


def generate(world: World, engine, layout: ModelLayout, scope: Scope, expr: Expr, tokenizer: Tokenizer,
             seed: int, iteration: int) -> None:
    """Samples the response `expr` into `scope`. engine: this rank's sampler, None outside the layout."""
    rows = scope.rows
    prompts, name = expr.args[0], expr.attr("name")
    lead = rows.dims.sample_dims(expr.type.dims)
    unit = prompts.type.dims
    samples = rows.dims.group(lead) // rows.dims.group(unit)
    keep = expr.attr("keep", 0)
    local = [tokenizer.encode_prompt(text) for text in scope.env[prompts].data]
    lengths = gather(world, scope, unit, torch.tensor([len(p) for p in local], dtype=torch.int64))
    units = rows.units(unit, scope.all_rows(unit[0]))
    mask = rows.kept_units(unit, keep)
    units = units if mask is None else units[mask[units]]
    wants = _shares(units, layout, world.size)
    here, owner = home_units(scope, unit)
    tokens = torch.tensor([t for p in local for t in p], dtype=torch.int64)
    moved = move_rows(world, Route(here, owner, wants), [(tokens, lengths)])[0]
    drawn = None
    if engine is not None:
        mine = wants[world.rank]
        group = rows.dims.group(unit)
        drawn = engine.generate(
            list(moved.split(lengths[mine].tolist())), samples, rows.position[unit[0]][mine // group].numpy(),
            name, iteration, seed, options_of(expr, rows.dims.bounds[expr.type.dims[-1]], tokenizer), tokenizer.decode,
            first_sample=(mine % group * samples).numpy())
    scope.prompt_texts[name] = [text for text in scope.env[prompts].data for _ in range(samples)]
    scope.env[expr] = _come_home(world, scope, expr, layout, units, wants, samples, lengths, drawn)
    scope.refresh()


def _shares(units: Tensor, layout: ModelLayout, size: int) -> tuple[Tensor, ...]:
    """Contiguous runs of prompts, one for each data shard, to every rank of the shard."""
    wants = [units[:0]] * size
    for shard in range(layout.dp):
        start, stop = home_range(units.numel(), layout.dp, shard)
        for rank in layout.replica(shard):
            wants[rank] = units[start:stop]
    return tuple(wants)


def _come_home(world: World, scope: Scope, expr: Expr, layout: ModelLayout, units: Tensor, wants: tuple[Tensor, ...],
               samples: int, prompt_lengths: Tensor, drawn: Optional[Sequences]) -> Value:
    rows, unit = scope.rows, expr.args[0].type.dims
    reports = layout.outputs()
    count = prompt_lengths.numel()
    sample_units = torch.cat([_samples_of(wants[rank], samples) for rank in reports])
    facts = torch.zeros(0, 2, dtype=torch.int64)
    if world.rank in reports:
        facts = torch.stack([drawn.response_lengths, drawn.truncated.long()], 1)
    sizes = [2 * samples * wants[r].numel() if r in reports else 0 for r in range(world.size)]
    gathered = world.all_gather(facts.flatten(), sizes).view(-1, 2)
    gathered_units = torch.cat([_samples_of(wants[r], samples) for r in range(world.size) if r in reports])
    # A dropped row has no response: one token keeps its place, and nothing ever reads it.
    known = torch.ones(count * samples, 3, dtype=torch.int64)
    known[:, 0] = prompt_lengths.repeat_interleave(samples)
    known[gathered_units, 1] = gathered[:, 0]
    known[gathered_units, 2] = gathered[:, 0]
    set_lengths(scope, expr.attr("name"), expr.type.dims, known)
    truncated = torch.zeros(count * samples, dtype=torch.bool)
    truncated[gathered_units] = gathered[:, 1].bool()

    source = torch.full((count * samples,), -1, dtype=torch.int64)
    for rank in reports:
        source[_samples_of(wants[rank], samples)] = rank
    all_units = _samples_of(units, samples)
    owner = home_units(scope, unit)[1].repeat_interleave(samples)
    home = tuple(all_units[owner[all_units] == rank] for rank in range(world.size))
    here = _samples_of(wants[world.rank], samples) if world.rank in reports else sample_units[:0]
    whole, response = known[:, 0] + known[:, 1], known[:, 1]
    empty = drawn is None or world.rank not in reports
    columns = [(torch.zeros(0, dtype=torch.int64) if empty else drawn.tokens, whole),
               (torch.zeros(0) if empty else drawn.logprobs, response)]
    tokens, logprobs = move_rows(world, Route(here, source, home), columns)
    mine = _samples_of(home_units(scope, unit)[0], samples)
    arrived = home[world.rank]
    tokens, logprobs = (_fill(data, lengths[mine], places(mine, arrived)) for data, lengths in ((tokens, whole), (logprobs, response)))
    return Value(expr.type.dims, Sequences(tokens, known[mine, 0], known[mine, 1], None, logprobs, truncated[mine]))


def _samples_of(units: Tensor, samples: int) -> Tensor:
    return (units[:, None] * samples + torch.arange(samples)).flatten()


def _fill(data: Tensor, lengths: Tensor, arrived: Tensor) -> Tensor:
    """Arrived sequences into the packing of all of this rank's; those of dropped rows hold zeros."""
    if arrived.numel() == lengths.numel():
        return data
    whole = data.new_zeros(int(lengths.sum()))
    whole[ragged_index(lengths, arrived)] = data
    return whole
