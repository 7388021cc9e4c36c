"""An objective over a mini-batch as a sum over micro-batches: local sums times constants known before.

An objective is separable when it is affine in its reductions over root dims of trained outputs. Then `mean(x)` is
`sum(x) / n` with n known before the first micro-batch, and the gradients of the local parts, summed over micro-batches
and ranks, are the gradient of the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Iterable, Iterator, Mapping

from compiler.exprs import REDUCTIONS, is_root_reduction, walk
from rlhf_dsl.builtins import PRIMITIVES
from rlhf_dsl.diagnostics import fault
from rlhf_dsl.typed import Dim, Expr, Interner, Type

LINEAR_REDUCTIONS = frozenset(("sum", "mean"))
LOCAL = "local"  # attribute of a sum over the rows of a micro-batch, unlike the same sum as a statistic


def unit_samples(dims: Mapping[str, Any], unit: tuple[str, ...], responses: Iterable[Any]) -> int:
    """Samples in a unit, of all responses of its rows: one, a pair, or a row with its whole group.

    dims: by name, with `size` and `ragged`, of a program or a plan; responses: expressions, each once
    """
    inner = [[dims[d] for d in r.type.dims if d not in unit] for r in responses if unit[0] in r.type.dims]
    return sum(math.prod(dim.size for dim in one if not dim.ragged) for one in inner)


def joint_unit(dims: Mapping[str, Any], unit: tuple[str, ...], calls: Iterable[Expr]) -> tuple[str, ...]:
    """The unit of a step that makes `calls`: `unit`, or its root dim alone where rows of that root have other groups."""
    leads = (dims[e.args[0].type.dims[-1]].lead for e in calls)
    return unit if all(lead == unit for lead in leads if lead[0] == unit[0]) else unit[:1]


@dataclass(frozen=True)
class Separated:
    """partial: the local part. calls: current outputs of the model in it, in order of first use.

    statistics: reductions over the whole mini-batch in it; constants: everything in it that is known before, statistics
    among them. unit: the dims whose joint rows may be split, a root dim alone where a whole group is needed.
    """

    partial: Expr
    calls: tuple[Expr, ...]
    statistics: tuple[Expr, ...]
    constants: tuple[Expr, ...]
    unit: tuple[str, ...]


@dataclass(frozen=True)
class Separator:
    """model: the one to train; phase: the update whose calls of it are current outputs; dims: of the program.

    known: values that exist before the mini-batch (results of rollout and of calls that no training changes), by name.
    """

    model: str
    phase: str
    dims: dict[str, Dim]
    known: Mapping[Expr, str]
    interner: Interner

    def separate(self, objective: Expr) -> Separated:
        """Raises DiagnosticError E0409 if the objective is not separable; it must have a gradient."""
        partial = self._affine(objective)
        inside = tuple(walk(partial, stop=lambda e: self._is_constant(e) or self.is_current(e)))
        calls = tuple(e for e in inside if self.is_current(e))
        constants = tuple(e for e in inside if self._is_constant(e))
        return Separated(partial, calls, tuple(self._statistics(constants)), constants,
                         self._unit(partial, calls, constants))

    # ---- what kind of value ----------------------------------------------------------------------

    @property
    def roots(self) -> frozenset[str]:
        return frozenset(d.name for d in self.dims.values() if d.root)

    def is_current(self, expr: Expr) -> bool:
        return expr.op == "call" and expr.attr("model") == self.model and expr.attr("phase") == self.phase

    def _depends(self, expr: Expr) -> bool:
        return any(self.is_current(e) for e in walk(expr, stop=lambda e: e in self.known))

    def _trains(self, expr: Expr) -> bool:
        return self.model in expr.grad

    def _is_constant(self, expr: Expr) -> bool:
        """What a micro-batch is given: values that exist, statistics, and results of more than arithmetic.

        Arithmetic on constants is done with the rest: a value is sent once and not in all its forms.
        """
        if expr in self.known or expr.op in ("state", "next_state", "pyop"):
            return True
        if is_root_reduction(expr, self.roots):
            return not expr.attr(LOCAL, False)
        return not (PRIMITIVES[expr.op].kind == "elementwise" or expr.op in ("const", "at_end") or self._depends(expr))

    def _statistics(self, constants: tuple[Expr, ...]) -> Iterator[Expr]:
        """Reductions over the mini-batch in the constants, the outermost of them."""
        def stop(expr: Expr) -> bool:
            return expr in self.known or is_root_reduction(expr, self.roots)

        for expr in walk(*constants, stop=stop):
            if expr not in self.known and is_root_reduction(expr, self.roots):
                yield expr

    # ---- rewriting -------------------------------------------------------------------------------

    def _affine(self, expr: Expr) -> Expr:
        """`expr` with its root reductions of trained outputs made local; it may only be affine in them."""
        if not self._has_trained_reduction(expr):
            return expr
        if is_root_reduction(expr, self.roots):
            return self._local(expr)
        parts = [self._has_trained_reduction(a) for a in expr.args]
        if not self._is_affine(expr, parts):
            raise fault("E0409", expr.span)
        return self._rebuilt(expr, tuple(self._affine(a) if part else a for a, part in zip(expr.args, parts)))

    def _has_trained_reduction(self, expr: Expr) -> bool:
        """Whether a gradient passes through a root reduction in `expr`."""
        inside = walk(expr, stop=lambda e: not self._trains(e))
        return any(self._trains(e) and is_root_reduction(e, self.roots) for e in inside)

    def _is_affine(self, expr: Expr, parts: list[bool]) -> bool:
        """Whether `expr` is affine in the arguments marked in `parts`, with the others known before."""
        others = [a for a, part in zip(expr.args, parts) if not part]
        if expr.op in ("add", "sub", "neg"):
            return not any(self._has_rows(a) for a in others)
        if expr.op in ("mul", "div", "where") or expr.op in LINEAR_REDUCTIONS:
            movable = {"mul": sum(parts) == 1, "div": not parts[-1], "where": not parts[0]}.get(expr.op, parts[0])
            return movable and not any(self._has_rows(a) or self._trains(a) for a in others)
        return False

    def _has_rows(self, expr: Expr) -> bool:
        return any(dim in self.roots for dim in expr.type.dims)

    def _local(self, expr: Expr) -> Expr:
        """A sum stays, as the sum of this part's rows; a mean becomes such a sum over the count of all rows."""
        if expr.op not in LINEAR_REDUCTIONS or any(self._has_trained_reduction(a) for a in expr.args):
            raise fault("E0409", expr.span)
        facts = dict(expr.attrs)
        total = self.interner.expr("sum", expr.args, expr.type, expr.grad, expr.span, **facts, **{LOCAL: True})
        if expr.op == "sum":
            return total
        one = self.interner.expr("const", (), Type("f32"), value=1.0)
        counted = (self._counted(expr.args[0]), *expr.args[1:])
        count = self.interner.expr("count", counted, expr.type, frozenset(), expr.span, **facts)
        count = self.interner.expr("maximum", (count, one), expr.type, frozenset(), expr.span)
        return self.interner.expr("div", (total, count), expr.type, expr.grad, expr.span)

    def _counted(self, expr: Expr) -> Expr:
        """A value over the dims of `expr` that needs no current output: only how many elements it has matters."""
        there = next((e for e in self.known if e.type == expr.type), None)
        responses = (e.args[0] for e in walk(expr) if self.is_current(e))
        response = next((r for r in responses if set(expr.type.dims) <= set(r.type.dims)), None)
        if there is not None or response is not None:
            return there or self._lengths(response, expr)
        inner = next(e for e in walk(expr) if self._is_constant(e) and e.type.dims == expr.type.dims)
        zero = self.interner.expr("const", (), Type("f32"), value=0.0)
        return self.interner.expr("mul", (inner, zero), expr.type, frozenset(), expr.span)

    def _lengths(self, response: Expr, expr: Expr) -> Expr:
        """The lengths of `response`, brought to the dims of `expr`, which are some of those of the response."""
        ragged = response.type.dims[-1:]
        lengths = Type("f32", self.dims[ragged[0]].lead)
        length = self.interner.expr("length", (response,), lengths, frozenset(), expr.span, over=ragged)
        if ragged[0] in expr.type.dims:
            return self.interner.expr("at_end", (length,), expr.type, frozenset(), expr.span, over=ragged)
        spare = tuple(d for d in lengths.dims if d not in expr.type.dims)
        if not spare:
            return length
        return self.interner.expr("sum", (length,), expr.type, frozenset(), expr.span, over=spare, keep=0, phase="")

    def _rebuilt(self, expr: Expr, args: tuple[Expr, ...]) -> Expr:
        return self.interner.expr(expr.op, args, expr.type, expr.grad, expr.span, **dict(expr.attrs))

    # ---- the unit --------------------------------------------------------------------------------

    def _unit(self, partial: Expr, calls: tuple[Expr, ...], constants: tuple[Expr, ...]) -> tuple[str, ...]:
        """The leading dims of the responses, or their root dim alone where a reduction needs whole groups.

        It does where it runs over a group dim alone, and where it leaves a group dim behind after the rows are summed,
        as a constant may that is the same for all rows.
        """
        leads = tuple(dict.fromkeys(self.dims[e.args[0].type.dims[-1]].lead for e in calls))
        whole = any(self._needs_group(e) for e in walk(partial, stop=self._is_constant) if not self._is_constant(e))
        whole |= any(e.type.dims and not self.roots & set(e.type.dims) for e in constants)
        return leads[0][:1] if whole or len(leads) > 1 else leads[0]

    def _needs_group(self, expr: Expr) -> bool:
        if expr.op not in REDUCTIONS:
            return False
        over = expr.attr("over", ())
        if any(dim in self.roots for dim in over):
            return bool(expr.type.dims)
        return any(not self.dims[dim].ragged for dim in over)
