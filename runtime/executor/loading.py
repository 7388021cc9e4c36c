"""Rows of data arrive at home: text and numbers as they are, responses encoded, lengths made known to all ranks."""

from __future__ import annotations

from typing import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from compiler.plan import ColumnSpec
from compiler.rows import home_range
from rlhf_dsl.typed import Expr
from runtime.data import Table
from runtime.executor.scope import Scope, gather
from runtime.sequences import Sequences
from runtime.tokenizer import Tokenizer
from runtime.values import Value
from runtime.world import World

ELEMENTS = {"f32": torch.float32, "bool": torch.bool}


def load(world: World, scope: Scope, root: str, table: Table, drawn: tuple[np.ndarray, np.ndarray],
         columns: Sequence[ColumnSpec], exprs: Mapping[str, Expr], tokenizers: Mapping[str, Tokenizer]) -> None:
    """Puts the columns of the drawn rows into `scope`.

    drawn: (positions in the stream, indices in the table); exprs: column → its `data` expression; tokenizers: by policy.
    """
    positions, indices = drawn
    rows = scope.rows
    rows.size[root] = len(indices)
    rows.position[root] = torch.as_tensor(positions)
    start, stop = home_range(len(indices), world.size, world.rank)
    mine = table.take(indices[start:stop])
    used = [c for c in columns if c.name in exprs]
    for column in used:
        if not column.response:
            scope.env[exprs[column.name]] = Value(tuple(column.dims), _plain(mine[column.field], column.elem))
            continue
        after = next((c.field for c in columns if c.name == column.after), None)
        encoded = _encode(tokenizers[column.policy], mine[column.field], mine[after] if after else None, scope, column)
        scope.prompt_texts[column.name] = list(mine[after]) if after else [""] * len(encoded)
        announce(world, scope, column.name, tuple(column.dims), encoded)
        scope.env[exprs[column.name]] = Value(tuple(column.dims), encoded)
    scope.refresh()


def _plain(values: list, elem: str):
    return list(values) if elem == "text" else torch.tensor(values, dtype=ELEMENTS[elem])


def _encode(tokenizer: Tokenizer, texts: list[str], prompts, scope: Scope, column: ColumnSpec) -> Sequences:
    bound = scope.rows.dims.bounds[column.dims[-1]]
    rows = []
    for i, text in enumerate(texts):
        if prompts is None:
            rows.append(tokenizer.encode_text(text, bound))
        else:
            rows.append((tokenizer.encode_prompt(prompts[i]), *tokenizer.encode_response(text, bound)))
    return pack(rows)


def reply(world: World, scope: Scope, expr: Expr, tokenizer: Tokenizer) -> None:
    """The response `expr`, made of its texts, each after its prompt."""
    dims = expr.type.dims
    lead, bound = scope.rows.dims.sample_dims(dims), scope.rows.dims.bounds[dims[-1]]
    prompts, texts = (_spread(scope, arg, lead) for arg in expr.args)
    encoded = pack([(tokenizer.encode_prompt(p), *tokenizer.encode_response(t, bound)) for p, t in zip(prompts, texts)])
    announce(world, scope, expr.attr("name"), dims, encoded)
    scope.prompt_texts[expr.attr("name")] = prompts
    scope.env[expr] = Value(dims, encoded)
    scope.refresh()


def _spread(scope: Scope, text: Expr, lead: tuple[str, ...]) -> list[str]:
    """One text for each of this rank's samples."""
    value = scope.env[text]
    index = scope.frame.index(value.dims, lead)
    return value.data if index is None else [value.data[i] for i in index.tolist()]


def pack(rows: Sequence[tuple[list[int], list[int], bool]]) -> Sequences:
    """Sequences of (prompt, response, truncated)."""
    tokens = [t for prompt, response, _ in rows for t in (*prompt, *response)]
    return Sequences(
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor([len(p) for p, _, _ in rows], dtype=torch.int64),
        torch.tensor([len(r) for _, r, _ in rows], dtype=torch.int64),
        truncated=torch.tensor([cut for _, _, cut in rows], dtype=torch.bool))


def announce(world: World, scope: Scope, name: str, dims: tuple[str, ...], local: Sequences) -> None:
    """Makes the lengths of a response known to all ranks."""
    facts = torch.stack([local.prompt_lengths, local.response_lengths, local.own_lengths], 1)
    set_lengths(scope, name, dims, gather(world, scope, scope.rows.dims.sample_dims(dims), facts))
    has_own = torch.tensor(float(local.own is not None))
    scope.rows.own[name] = bool(world.reducer.all_reduce(has_own, "max"))


def set_lengths(scope: Scope, name: str, dims: tuple[str, ...], known: Tensor) -> None:
    """known: int64 [samples, 3]: prompt, response and own lengths of all samples of the iteration."""
    rows = scope.rows
    rows.prompt_lengths[name], rows.response_lengths[name] = known[:, 0].contiguous(), known[:, 1].contiguous()
    rows.lengths[dims[-1]] = known[:, 2].contiguous()
    rows.own.setdefault(name, False)
