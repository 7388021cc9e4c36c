"""Python ops and the fields of responses: what leaves tensors for Python values, and comes back."""

from __future__ import annotations

from typing import Any, Iterable, Mapping

import torch

from compiler.plan import OpSpec, Plan
from rlhf_dsl.typed import Expr, PyOp
from runtime.executor import batched_calls
from runtime.executor.batched_calls import cells_of, kept_places
from runtime.executor.scope import Scope
from runtime.python_ops import OpRunner
from runtime.reducers import Reducer
from runtime.sequences import Sequences
from runtime.tokenizer import Tokenizer
from runtime.values import Value

ELEMENTS = {"f32": torch.float32, "bool": torch.bool}


def start_ops(plan: Plan) -> dict[str, OpRunner]:
    """A runner for each Python op of the plan; its worker starts while the rank does other work."""
    return {name: OpRunner(_pyop(name, spec)) for name, spec in plan.ops.items()}


def _pyop(name: str, spec: OpSpec) -> PyOp:
    from rlhf_dsl.ast import Span

    return PyOp(name, spec.module, spec.file, spec.line, spec.args, spec.result, spec.batched, spec.timeout, spec.on_error, Span(),
                spec.result_dims)


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


def call(scope: Scope, reducer: Reducer, expr: Expr, runner: OpRunner, args: Mapping[int, Value]) -> Value:
    """A Python op over this rank's rows that are kept; dropped rows hold an empty value. Collective if it is batched."""
    dims = expr.type.dims
    lead = scope.rows.dims.sample_dims(dims)
    if runner.op.batched:
        results = batched_calls.call(
            scope, reducer, runner, [args[i] for i in range(len(expr.args))], lead, expr.attr("keep", 0))
        return Value(dims, _assemble(expr, results, scope))
    chosen = kept_places(scope, lead, expr.attr("keep", 0))
    columns = [_column(scope, args[i], lead, chosen) for i in range(len(expr.args))]
    lengths = None
    if scope.frame.is_ragged(dims):
        own = scope.frame.row_lengths(dims).tolist()
        lengths = [own[i] for i in chosen]
    results = runner.call(columns, _row_numbers(scope, lead, chosen), lengths) if chosen else []
    return Value(dims, _assemble(expr, dict(zip(chosen, results)), scope))


def _column(scope: Scope, value: Value, lead: tuple[str, ...], chosen: list[int]) -> list[Any]:
    """One argument for each chosen row: a scalar, a text, or the list of a row's own tokens' values."""
    own, cells = cells_of(scope, value)
    at = scope.frame.index(own, lead)
    return [cells[i] for i in chosen] if at is None else [cells[i] for i in at[torch.tensor(chosen, dtype=torch.int64)].tolist()]


def _row_numbers(scope: Scope, lead: tuple[str, ...], chosen: list[int]) -> list[int]:
    """For messages: positions of the rows in their data stream."""
    if not lead:
        return [0] * len(chosen)
    group = scope.rows.dims.group(lead)
    rows = scope.rows_of(lead[0], scope.rank)
    return [int(scope.rows.position[lead[0]][rows[i // group]]) for i in chosen]


def _assemble(expr: Expr, results: Mapping[int, Any], scope: Scope):
    """The data of a value from the results of this rank's rows, by place; what has none is empty."""
    dims = expr.type.dims
    if scope.frame.is_ragged(dims):
        lengths = scope.frame.row_lengths(dims).tolist()
        rows = [results.get(place, [0.0] * length) for place, length in enumerate(lengths)]
        return torch.tensor([x for row in rows for x in row], dtype=ELEMENTS[expr.type.elem])
    empty = "" if expr.type.elem == "text" else 0.0
    found = [results.get(place, empty) for place in range(scope.frame.numel(dims))]
    return found if expr.type.elem == "text" else torch.tensor(found, dtype=ELEMENTS[expr.type.elem])
