"""Python ops and the fields of responses: what leaves tensors for Python values, and comes back."""

from __future__ import annotations

from typing import Any, Iterable, Mapping

import torch

from compiler.plan import OpSpec, Plan
from rlhf_dsl.typed import Expr, PyOp
from runtime.executor.scope import Scope
from runtime.python_ops import OpRunner
from runtime.sequences import Sequences
from runtime.tokenizer import Tokenizer
from runtime.values import Value

ELEMENTS = {"f32": torch.float32, "bool": torch.bool}


def start_ops(plan: Plan) -> dict[str, OpRunner]:
    """A runner for each Python op of the plan; its worker starts while the rank does other work."""
    return {name: OpRunner(_pyop(name, spec)) for name, spec in plan.ops.items()}


def _pyop(name: str, spec: OpSpec) -> PyOp:
    from rlhf_dsl.ast import Span

    return PyOp(name, spec.module, spec.file, spec.line, spec.args, spec.result, spec.batched, spec.timeout, spec.on_error, Span())


def fill_fields(scope: Scope, response: Expr, fields: Iterable[Expr], tokenizer: Tokenizer) -> None:
    """The fields of a response that has just become known: `y.logprobs`, `y.truncated`, `y.text`."""
    for expr in fields:
        batch: Sequences = scope.env[response].data
        scope.env[expr] = Value(expr.type.dims, _field(expr.attr("field"), batch, tokenizer))


def _field(name: str, batch: Sequences, tokenizer: Tokenizer):
    if name == "logprobs":
        return batch.logprobs
    if name == "truncated":
        return batch.truncated
    return texts(batch, tokenizer)


def texts(batch: Sequences, tokenizer: Tokenizer) -> list[str]:
    """The text of each response."""
    found, tokens, start = [], batch.tokens.tolist(), 0
    for prompt, response in zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist()):
        found.append(tokenizer.decode(tokens[start + prompt:start + prompt + response]))
        start += prompt + response
    return found


def call(scope: Scope, expr: Expr, runner: OpRunner, args: Mapping[int, Value]) -> Value:
    """A Python op mapped over this rank's rows that are kept; dropped rows hold an empty value."""
    dims = expr.type.dims
    lead = scope.rows.dims.sample_dims(dims)
    count = scope.frame.numel(lead)
    chosen = _kept(scope, lead, expr.attr("keep", 0), count)
    columns = [_column(scope, args[i], lead, chosen) for i in range(len(expr.args))]
    results = runner.call(columns, rows=_row_numbers(scope, lead, chosen)) if chosen else []
    return Value(dims, _assemble(expr, results, chosen, count, scope, dims))


def _kept(scope: Scope, lead: tuple[str, ...], keep: int, count: int) -> list[int]:
    mask = scope.rows.kept_units(lead, keep) if lead and keep else None
    if mask is None:
        return list(range(count))
    here = scope.rows.units(lead, scope.rows_of(lead[0], scope.rank))
    return mask[here].nonzero().flatten().tolist()


def _column(scope: Scope, value: Value, lead: tuple[str, ...], chosen: list[int]) -> list[Any]:
    """One argument for each chosen row: a scalar, a text, or the list of a row's own tokens' values."""
    frame = scope.frame
    if frame.is_ragged(value.dims):
        cells = [part.tolist() for part in value.data.split(frame.row_lengths(value.dims).tolist())]
        own = value.dims[:-1]
    else:
        cells = value.data.tolist() if isinstance(value.data, torch.Tensor) else value.data
        own = value.dims
    at = frame.index(own, lead)
    return [cells[i] for i in chosen] if at is None else [cells[i] for i in at[torch.tensor(chosen, dtype=torch.int64)].tolist()]


def _row_numbers(scope: Scope, lead: tuple[str, ...], chosen: list[int]) -> list[int]:
    """For messages: positions of the rows in their data stream."""
    if not lead:
        return [0] * len(chosen)
    group = scope.rows.dims.group(lead)
    rows = scope.rows_of(lead[0], scope.rank)
    return [int(scope.rows.position[lead[0]][rows[i // group]]) for i in chosen]


def _assemble(expr: Expr, results: list, chosen: list[int], count: int, scope: Scope, dims: tuple[str, ...]):
    if expr.type.elem == "text":
        found = [""] * count
        for place, text in zip(chosen, results):
            found[place] = text
        return found
    if scope.frame.is_ragged(dims):
        return _assemble_tokens(results, chosen, scope, dims)
    data = torch.zeros(count, dtype=ELEMENTS[expr.type.elem])
    data[torch.tensor(chosen, dtype=torch.int64)] = torch.tensor(results, dtype=data.dtype)
    return data


def _assemble_tokens(results: list[list[float]], chosen: list[int], scope: Scope, dims: tuple[str, ...]) -> torch.Tensor:
    lengths = scope.frame.row_lengths(dims).tolist()
    found = [[0.0] * length for length in lengths]
    for place, row in zip(chosen, results):
        found[place] = row
    return torch.tensor([x for row in found for x in row], dtype=torch.float32)
