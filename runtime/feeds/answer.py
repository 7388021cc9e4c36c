"""The answer of `rlflowc eval`: values as nested lists over all rows, metrics, states, objectives and gradients."""

from __future__ import annotations

import json
from typing import Any, Iterable, Optional

import torch
from torch import Tensor

from compiler import names
from rlhf_dsl import typed
from rlhf_dsl.builtins import call_text
from rlhf_dsl.diagnostics import fault
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Bind, Expr
from runtime.executor.scope import Scope
from runtime.feeds.executor import FeedExecutor
from runtime.values import Value, to_lists

FORMAT = "rlflow.eval/1"


def answer_of(executor: FeedExecutor) -> dict[str, Any]:
    """The whole answer, the same on every shard. Collective."""
    checked = executor.checked
    metrics = {m.name for section in (checked.rollout, *(u.body for u in checked.updates)) for m in section if isinstance(m, typed.Metric)}
    return {
        "format": FORMAT,
        "rollout": _values(executor, executor.scope, checked.rollout),
        "update": _update_values(executor),
        "metrics": {name: executor.iteration.metrics.get(name) for name in sorted(metrics)},
        "state": dict(executor.states),
        "kept": _kept(executor),
        "skipped": executor.iteration.skipped,
        "train": _train(executor),
    }


# ---- values ----------------------------------------------------------------------------------------

def _values(executor: FeedExecutor, scope: Scope, statements: Iterable) -> dict[str, Any]:
    found = {}
    for bind in (s for s in statements if isinstance(s, Bind)):
        expr = reintern(executor, bind.expr)
        if expr.type.elem != "tokens" and _fillable(executor, scope, expr):
            found[bind.name] = _lists(executor, scope, executor.value(scope, expr), bind)
    return found


def _update_values(executor: FeedExecutor) -> dict[str, Any]:
    """By name; with several mini-batches, a list with the values of each."""
    found: dict[str, Any] = {}
    for update in executor.checked.updates:
        scopes = [scope for index, scope in executor.update_scopes if index == update.index]
        series = [_values(executor, scope, update.body) for scope in scopes]
        for name in dict.fromkeys(name for values in series for name in values):
            each = [values.get(name) for values in series]
            found[name] = each[0] if len(each) == 1 else each
    return found


def reintern(executor: FeedExecutor, root: Expr) -> Expr:
    """The checked expression as the plan's own object: equal expressions are one."""
    made: dict[Expr, Expr] = {}
    stack = [root]
    while stack:
        expr = stack[-1]
        missing = [arg for arg in expr.args if arg not in made]
        if missing:
            stack.extend(missing)
            continue
        stack.pop()
        args = [made[arg] for arg in expr.args]
        made[expr] = executor.interner.expr(expr.op, args, expr.type, expr.grad, expr.span, **dict(expr.attrs))
    return made[root]


def _fillable(executor: FeedExecutor, scope: Scope, root: Expr) -> bool:
    """Fills calls and columns that nothing else needed; False if the feed has no numbers for one of them."""
    stack, seen = [root], set()
    while stack:
        expr = stack.pop()
        if expr in seen or expr in scope.env:
            continue
        seen.add(expr)
        if expr.op in ("call", "pyop"):
            if not _fed(executor, expr):
                return False
            executor.fill_call(scope, expr)
        elif expr.op == "data" and expr.type.dims[0] in scope.rows.size and expr.attr("column") in executor.feed.data:
            executor.scope.env[expr] = executor.column(executor.scope, expr.attr("column"), expr)
        elif expr.op == "field" and expr.args[0] in executor.fed:
            executor.fill_field(scope, expr)
        elif expr.op in ("generate", "data", "reply", "field", "next_state"):
            return False
        else:
            stack.extend(expr.args)
    return True


def _fed(executor: FeedExecutor, expr: Expr) -> bool:
    known = expr.op == "pyop" or expr.args[0] in executor.responses
    return known and executor.feed.call(call_text(expr), expr.attr("phase", "").startswith("update")) is not None


def _lists(executor: FeedExecutor, scope: Scope, value: Value, bind: Bind) -> Any:
    """Nested lists over all shards' rows; dropped rows are null. Raises R0159 for a number that is not finite."""
    index = max(scope.keeps, default=0)
    _check_finite(executor, scope, value, bind, index)
    if not value.dims:
        return to_lists(value, scope.frame)
    root = executor.dims.root_of(value.dims)
    mine = to_lists(value, scope.frame)
    if root is None:
        return mine
    depth = value.dims.index(root)
    parts = gather(executor, mine)
    whole = parts[0]
    for part in parts[1:]:
        whole = _concat(whole, part, depth)
    return whole


def _concat(left: list, right: list, depth: int) -> list:
    return left + right if depth == 0 else [_concat(a, b, depth - 1) for a, b in zip(left, right)]


def gather(executor: FeedExecutor, part: Any) -> list[Any]:
    """Every shard's Python value, in shard order: as the bytes of its JSON."""
    data = torch.tensor(list(json.dumps(part).encode()), dtype=torch.uint8)
    return [json.loads(bytes(p.tolist()).decode()) for p in executor.world.reducer.all_gather_rows(data)]


def _check_finite(executor: FeedExecutor, scope: Scope, value: Value, bind: Bind, keep: int) -> None:
    if not isinstance(value.data, Tensor) or not value.data.is_floating_point():
        return
    wrong = executor.evaluator(scope).check_finite(value, keep)
    if wrong is not None:
        where = ", ".join(f"{dim}={at}" for dim, at in wrong.place.items())
        source = Source(executor.checked.path, executor.checked.text)
        raise fault("R0159", bind.span, source=source, name=bind.name, value=wrong.number, place_in_value=f"at {where}" if where else "")


# ---- the rest --------------------------------------------------------------------------------------

def _kept(executor: FeedExecutor) -> dict[str, Any]:
    rows = executor.scope.rows
    if not rows.kept:
        return {}
    last = max(rows.kept)
    finest: dict[str, tuple[str, ...]] = {}
    for dims in rows.keep_dims.values():
        finest[dims[0]] = max(finest.get(dims[0], ()), dims, key=len)
    found = {}
    for dims in finest.values():
        flat = rows.kept_units(dims, last).tolist()
        sizes = [executor.plan.dims[d].size for d in dims]
        for size in reversed(sizes[1:]):
            flat = [flat[i:i + size] for i in range(0, len(flat), size)]
        found[",".join(dims)] = flat
    return found


def _train(executor: FeedExecutor) -> dict[str, list[dict[str, Any]]]:
    """By model, an entry for each mini-batch, those of all its updates one after another."""
    found: dict[str, list[dict[str, Any]]] = {}
    for update in executor.checked.updates:
        for train in update.trains:
            key = update.index, train.model
            objectives = executor.iteration.series.get(names.training_metric(train.model, update.index), [])
            entries = executor.gradients.get(key, [])
            if executor.iteration.skipped:
                objectives, entries = [None] * update.minibatches * update.epochs, []
            found.setdefault(train.model, []).extend(
                {"objective": objective, "grad": _gradients(executor, key, entries[i] if i < len(entries) else None)}
                for i, objective in enumerate(objectives))
    return found


def _gradients(executor: FeedExecutor, key: tuple[int, str], entry: Optional[dict[str, Tensor]]) -> dict[str, Any]:
    found = {}
    for named in executor.trains[key].calls:
        expr = executor.exprs[named.expr]
        text = call_text(expr)
        values, counts = executor.call_value(expr, True)
        mine = torch.zeros_like(values) if entry is None else entry[text]
        whole = executor.world.reducer.all_reduce(mine.detach(), "sum")
        found[text] = _nest(executor, whole, counts, expr)
    return found


def _nest(executor: FeedExecutor, flat: Tensor, counts: Tensor, expr: Expr) -> Any:
    response = expr.args[0]
    lead = executor.dims.sample_dims(response.type.dims)
    items: list[Any] = flat.tolist()
    if len(expr.type.dims) > len(lead):
        items = [part.tolist() for part in flat.split(counts.tolist())]
    for size in reversed([executor.plan.dims[d].size for d in lead][1:]):
        items = [items[i:i + size] for i in range(0, len(items), size)]
    return items
