"""`keep if C, refill=N`: rows are dropped, and the statements above run again on the next rows until enough are kept.

The rows of all draws together are the iteration's rows. Each draw has the homes of the first, so what a rank holds of
the iteration is what it held of the first draw, then of the second, and so on: no row moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compiler.plan import KeepRows, Step
from runtime.executor.scope import Rows, Scope, gather
from runtime.values import Value, concat

if TYPE_CHECKING:
    from runtime.executor.executor import Executor

# What steps make. All else is an equation, which is evaluated anew: its statistics are those of all rows.
MADE = frozenset(("data", "generate", "reply", "reencoded", "call", "pyop", "field", "state"))


def keep(executor: "Executor", step: KeepRows, scope: Scope) -> None:
    """Notes which rows the condition of `step` leaves, here and on all ranks."""
    mask = executor.value(scope, executor.exprs[step.expr])
    scope.keeps[step.index] = Value(mask.dims, mask.data.bool())
    scope.rows.kept[step.index] = gather(executor.world, scope, mask.dims, mask.data.bool())
    scope.rows.keep_dims[step.index] = mask.dims


def kept_rows(scope: Scope, index: int) -> int:
    """Rows of its root dim that the `index`-th keep and those before it leave; of groups, those with any sample."""
    return int(scope.rows.kept_units(scope.rows.keep_dims[index][:1], index).sum())


def refill(executor: "Executor", step: KeepRows, scope: Scope) -> None:
    """Draws further rows into `scope`, at most `step.refill` times, and drops what is kept beyond the dim's size."""
    root = scope.rows.keep_dims[step.index][0]
    size, steps = executor.plan.dims[root].size, executor.plan.steps
    above = steps[:steps.index(step)]
    again = [s for s in above if _makes_rows(executor, s, root)]
    draws = 0
    while draws < step.refill and kept_rows(scope, step.index) < size:
        draws += 1
        _extend(scope, root, _draw(executor, again, root, scope.rows.size[root]))
        keep(executor, step, scope)
    for metric in (s for s in above if s.op == "record" and draws):
        executor._do(metric, scope)
    _drop_surplus(scope, step.index, size)


def _makes_rows(executor: "Executor", step: Step, root: str) -> bool:
    """Whether a step brings or makes values of rows of `root` that equations cannot make, or a model that does."""
    if step.op in ("reload", "offload"):
        return True
    if step.op == "load":
        return step.name == root
    if step.op == "transfer":
        return any(root in executor.exprs[value.expr].type.dims for value in step.values)
    place = {"generate": "expr", "reply": "expr", "pyop": "expr", "keep": "expr", "forward": "response"}.get(step.op)
    return place is not None and root in executor.exprs[getattr(step, place)].type.dims


def _draw(executor: "Executor", steps: list[Step], root: str, drawn: int) -> Scope:
    """The next rows, on a scope of their own. drawn: rows of the iteration so far."""
    scope = Scope(Rows(executor.dims, drawn={root: drawn}), executor.world.rank, executor.world.size)
    executor._seed_states(scope)
    for step in steps:
        executor._do(step, scope)
    return scope


def _extend(scope: Scope, root: str, more: Scope) -> None:
    """Puts the rows of `more` behind those of `scope`."""
    rows, new, frames = scope.rows, more.rows, [scope.frame, more.frame]
    values = {e: v for e, v in scope.env.items() if e.op in MADE}
    values = {e: concat([v, more.env[e]], frames, root) if root in v.dims else v for e, v in values.items()}
    scope.env.clear()
    scope.env.update(values)
    scope.keeps.update({i: concat([v, more.keeps[i]], frames, root) for i, v in scope.keeps.items() if i in more.keeps})
    rows.loads.setdefault(root, rows.size[root])
    rows.size[root] += new.size[root]
    for table in ("position", "lengths", "prompt_lengths", "response_lengths", "kept"):
        _append(getattr(rows, table), getattr(new, table))
    for name, own in new.own.items():
        rows.own[name] |= own
    for name, texts in more.prompt_texts.items():
        scope.prompt_texts[name] = scope.prompt_texts[name] + texts
    scope.refresh()


def _append(table: dict[Any, torch.Tensor], more: dict[Any, torch.Tensor]) -> None:
    table.update({key: torch.cat([table[key], tensor]) for key, tensor in more.items()})


def _drop_surplus(scope: Scope, index: int, size: int) -> None:
    """Rows count in stream order."""
    rows, dims = scope.rows, scope.rows.keep_dims[index]
    left = rows.kept_units(dims[:1], index)
    surplus = left & (torch.cumsum(left, 0) > size)
    if not bool(surplus.any()):
        return
    fits = ~surplus.repeat_interleave(rows.dims.group(dims))
    rows.kept[index] = rows.kept[index] & fits
    here = rows.units(dims, scope.rows_of(dims[0], scope.rank))
    scope.keeps[index] = Value(dims, scope.keeps[index].data & fits[here])
