"""Whether what a micro-batch evaluates adds up to the objective of its train step."""

from __future__ import annotations

from typing import Any, Iterator, Sequence

from compiler import names
from compiler.exprs import walk
from compiler.plan import Plan
from compiler.proof.wellformed import all_steps
from compiler.separate import LOCAL, Separator, joint_unit
from compiler.steps import UpdateLoop, exprs_of
from rlhf_dsl.ast import Span
from rlhf_dsl.diagnostics import DiagnosticError
from rlhf_dsl.typed import Dim, Expr, Interner


def objective_faults(plan: Plan) -> Iterator[str]:
    """The objective is separated again, by what is known before its update; the parts must be those of the step."""
    trained = [loop for loop in plan.steps if isinstance(loop, UpdateLoop)]
    if not trained:
        return
    interner = Interner()
    table = plan.expr_table(interner)
    dims = {name: Dim(name, d.size, d.ragged, d.root, d.response, d.lead, Span()) for name, d in plan.dims.items()}
    whole = [table[i] for _, step in all_steps(plan) for i in exprs_of(step)]
    if any(expr.attr(LOCAL, False) for expr in walk(*whole)):
        yield "a value of all rows is made of sums over a micro-batch"
        return
    begun = (step for step in plan.steps if getattr(step, "ahead", 0))
    known: dict[Expr, str] = {expr: name for step in begun for expr, name in _made(table, step)}
    for step in plan.steps:
        if isinstance(step, UpdateLoop):
            for inner in step.before:
                known.update(_made(table, inner))
            yield from _loop_faults(step, table, dims, known, interner)
        else:
            known.update(_made(table, step))


def _loop_faults(loop: UpdateLoop, table: tuple[Expr, ...], dims: dict[str, Dim], known: dict[Expr, str],
                 interner: Interner) -> Iterator[str]:
    for step in (s for s in loop.body if s.op == "train"):
        objective = table[step.objective]
        if objective.type.dims or step.model not in objective.grad:
            yield f"`{step.name}` has an objective that does not train {step.model}"
            continue
        try:
            parts = Separator(step.model, names.update(loop.index), dims, known, interner).separate(objective)
        except (DiagnosticError, StopIteration, IndexError, KeyError):
            yield f"`{step.name}` has an objective that is no sum over micro-batches"
            continue
        calls = [table[c.expr] for c in step.calls]
        if not _same(parts.partial, table[step.partial]):
            yield f"`{step.name}` evaluates another value over a micro-batch than its objective asks for"
        elif not set(parts.calls) <= set(calls) or step.unit != joint_unit(dims, parts.unit, calls):
            yield f"`{step.name}` lacks a call of its objective, or has another unit"
        elif not _are_same(parts.constants, [table[c.expr] for c in step.constants]):
            yield f"`{step.name}` has other constants than its objective"


def _are_same(wanted: Sequence[Expr], found: Sequence[Expr]) -> bool:
    """In any order, each once. Counts of the same elements may be several in one and one in the other."""
    each = all(any(_same(w, f) for f in found) for w in wanted) and all(any(_same(w, f) for w in wanted) for f in found)
    return each and len(set(found)) == len(found)


def _same(one: Expr, other: Expr) -> bool:
    """Equal, but for the numbers that a count counts: only how many there are matters, and that their type says."""
    stack, seen = [(one, other)], set()
    while stack:
        a, b = stack.pop()
        if a is b or (a, b) in seen:
            continue
        seen.add((a, b))
        if (a.op, a.attrs, a.type, len(a.args)) != (b.op, b.attrs, b.type, len(b.args)):
            return False
        pairs = list(zip(a.args, b.args))
        if a.op == "count" and {a.args[0].type, b.args[0].type} == {a.args[0].type} and a.args[0].type.elem == "f32":
            pairs = pairs[1:]
        stack += pairs
    return True


def _made(table: tuple[Expr, ...], step: Any) -> Iterator[tuple[Expr, str]]:
    """(expression, name) of what a step leaves behind."""
    if step.op == "load":
        yield from ((e, e.attr("column")) for e in table if e.op == "data" and e.attr("column") in step.columns)
    if step.op in ("generate", "reply", "pyop"):
        yield table[step.expr], step.name
        yield from ((e, step.name) for e in table if e.op == "field" and e.args[0] is table[step.expr])
    if step.op == "next_state":
        yield from ((e, step.name) for e in table if e.op == "next_state" and e.attr("name") == step.name)
    if step.op in ("forward", "equation"):
        yield from ((table[v.expr], v.name) for v in (*getattr(step, "calls", ()), *getattr(step, "values", ())))
