"""What a run reads, looked at before any rank starts, so that a bad file costs a second and leaves no run folder.

Data is read and checked whole, weights by their headers, tokenizers by loading them; torch is not needed for that. The
ranks check again what they read.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Callable, Iterator

from compiler.plan import ColumnSpec, DataSpec, ExprRow, Plan
from compiler.proof.wellformed import shape_of
from compiler.resharding.transitions import engine_of
from compiler.sources import resolve_model
from rlhf_dsl.diagnostics import Diagnostic, DiagnosticError, fault
from runtime.data import Stream, Table
from runtime.executor.sources import open_sources
from runtime.places import place_of
from runtime.tokenizer import Tokenizer
from runtime.weight_files import WeightFiles

READS_TEXT = ("score",)  # operations that take a response in another tokenizer's tokens, as text


def check(plan: Plan) -> None:
    """Raises DiagnosticError (exit code 2): R0112 for a plan that does nothing, R0139 for an engine that is not there,
    else a fault of each source and model."""
    if not (plan.run.steps or plan.run.epochs or plan.evals):
        raise fault("R0112", place=plan.program.path)
    _check_engines(plan)
    folders = {name: resolve_model(spec.source, plan.program.folder) for name, spec in plan.models.items()}
    streams: dict[str, Stream] = {}
    tokenizers: dict[Path, Tokenizer] = {}
    found: list[Diagnostic] = []
    _collect(found, lambda: streams.update(open_sources(plan)))
    for name, spec in plan.models.items():
        _collect(found, lambda: WeightFiles(folders[name]).check(shape_of(plan, name), spec.role))
    for folder in dict.fromkeys(folders.values()):
        _collect(found, lambda: tokenizers.update({folder: Tokenizer(folder)}))
    if not found:
        known = {name: tokenizers[folder] for name, folder in folders.items()}
        for task in _row_checks(plan, streams, known):
            _collect(found, task)
    if found:
        raise DiagnosticError(dict.fromkeys(found))


def _check_engines(plan: Plan) -> None:
    wanting = [name for name in plan.layouts if engine_of(plan.layouts, name) == "vllm"]
    if wanting and importlib.util.find_spec("vllm") is None:
        asking = plan.constraints.get(wanting[0], ())
        line = next((line for line in asking if "engine" in plan.line_text(line)), 0)
        span, where = place_of(plan, line)
        raise fault("R0139", span, **where, target=wanting[0])


def _collect(found: list[Diagnostic], task: Callable[[], object]) -> None:
    try:
        task()
    except DiagnosticError as error:
        found.extend(error.diagnostics)


def _row_checks(plan: Plan, streams: dict[str, Stream],
                tokenizers: dict[str, Tokenizer]) -> Iterator[Callable[[], object]]:
    for section in plan.evals:
        for root in section.roots:
            yield lambda: streams[root].first(plan.dims[root].size)
    columns = {c.name: (spec, c) for spec in plan.data for c in spec.columns}
    for expr in plan.exprs:
        if expr.op == "call":
            yield lambda: _check_readable(plan, expr, tokenizers)
        if expr.op == "generate" and plan.exprs[expr.args[0]].op == "data":
            spec, column = columns[plan.exprs[expr.args[0]].attrs["column"]]
            yield lambda: _check_prompts(plan, spec, column, streams[spec.root].table, expr.attrs["model"], tokenizers)
    for spec, column in columns.values():
        if column.response:
            yield lambda: _check_responses(plan, spec, column, streams[spec.root].table, tokenizers)


# ---- tokenizers ----------------------------------------------------------------------------------

def _check_readable(plan: Plan, call: ExprRow, tokenizers: dict[str, Tokenizer]) -> None:
    """Raises R0316 if a model shall read tokens that another tokenizer made."""
    response, model = plan.exprs[call.args[0]], call.attrs["model"]
    writer = _writer(plan, response)
    if writer is None or call.attrs["operation"] in READS_TEXT or tokenizers[writer].identity == tokenizers[model].identity:
        return
    span, where = place_of(plan, call.line)
    raise fault("R0316", span, **where, reader=model, writer=writer, operation=call.attrs["operation"])


def _writer(plan: Plan, response: ExprRow) -> str | None:
    """The model whose tokens a response is in."""
    if response.op == "generate":
        return response.attrs["model"]
    policies = {c.name: c.policy for spec in plan.data for c in spec.columns}
    return policies.get(response.attrs.get("column")) or None


# ---- lengths -------------------------------------------------------------------------------------

def _check_prompts(plan: Plan, spec: DataSpec, column: ColumnSpec, table: Table, model: str,
                   tokenizers: dict[str, Tokenizer]) -> None:
    """Raises R0315 for a prompt that leaves the model's context no room for a response."""
    context, tokenizer = shape_of(plan, model).max_positions, tokenizers[model]
    for row, text in enumerate(table.columns[column.field]):
        if _most_tokens(tokenizer, text) < context:
            continue
        tokens = len(tokenizer.encode_prompt(text))
        if tokens >= context:
            raise fault("R0315", place=table.place(row), what="the prompt", tokens=tokens, model=model, context=context)


def _check_responses(plan: Plan, spec: DataSpec, column: ColumnSpec, table: Table,
                     tokenizers: dict[str, Tokenizer]) -> None:
    """Raises R0315 for a row that is longer than the context, R0311 for a tokenizer without an end token."""
    context, tokenizer = shape_of(plan, column.policy).max_positions, tokenizers[column.policy]
    bound = plan.dims[column.dims[-1]].size
    tokenizer.encode_response("", bound)
    after = next((c.field for c in spec.columns if c.name == column.after), None)
    prompts = table.columns[after] if after else [""] * table.size
    for row, (prompt, text) in enumerate(zip(prompts, table.columns[column.field])):
        if _most_tokens(tokenizer, prompt) + min(bound, len(text.encode()) + 1) <= context:
            continue
        head = len(tokenizer.encode_prompt(prompt)) if after else 1
        tokens = head + len(tokenizer.encode_response(text, bound)[0])
        if tokens > context:
            what = "the prompt with its response" if after else "the text"
            raise fault("R0315", place=table.place(row), what=what, tokens=tokens, model=column.policy, context=context)


def _most_tokens(tokenizer: Tokenizer, prompt: str) -> int:
    """More tokens than a prompt can have: a token stands for a byte or more, of the text or of the template around it."""
    return len(prompt.encode()) + len(tokenizer.chat_template or "") + 2
