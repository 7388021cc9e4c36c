"""`rlflowc eval --check-grad`: the answer's gradients beside finite differences of the objectives as written.

An objective f is evaluated in 64-bit arithmetic over a whole mini-batch, with one fed number x moved by h either way:
(f(x + h) - f(x - h)) / 2h. That shares neither automatic differentiation, nor micro-batches, nor shards with the
gradient. What stands in `stop(...)` keeps its value. Where f has a kink or a jump at x (a tie of `min`, a ratio at the
bound of a clip, a comparison of equal numbers) the slopes to the left and to the right differ: then the gradient has to
lie between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Iterator, Mapping

import torch
from torch import Tensor

from compiler.exprs import walk
from rlhf_dsl.ast import Span
from rlhf_dsl.builtins import call_text
from rlhf_dsl.diagnostics import diagnostic, DiagnosticError
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Expr, Train
from runtime.executor.scope import Scope
from runtime.feeds.answer import reintern
from runtime.feeds.executor import FeedExecutor
from runtime.sequences import ragged_index
from runtime.values import Value

STEP = 1e-6  # of x, relative beyond 1
CORNER = 1e-3  # between the slopes of both sides: of the largest slope of the call
RELATIVE = {"f64": 1e-5, "f32": 1e-3}  # what is allowed: of the call's largest slope
ROUNDING = 1e-9  # and of f, for what a division by 2h makes of its last digits


@dataclass(frozen=True)
class Slope:
    """At one fed number, `place` by dim: the program's gradient, the slopes to both sides and between them."""

    place: Mapping[str, int]
    gradient: float
    left: float
    right: float
    central: float

    @property
    def deviation(self) -> float:
        return abs(self.gradient - self.central)


@dataclass(frozen=True)
class Checked:
    """One call in one mini-batch. worst: where the deviation is largest, of those that are no kinks; None for none.

    kinks: where the objective has no derivative; wrong: slopes beyond the tolerance where it has one
    """

    model: str
    call: str
    step: int
    numbers: int
    worst: Slope | None
    kinks: tuple[Slope, ...]
    wrong: tuple[Slope, ...]
    span: Span

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model, "call": self.call, "step": self.step, "numbers": self.numbers,
            "largest_deviation": self.worst.deviation if self.worst else 0.0,
            "kinks": [_slope_json(slope) for slope in self.kinks],
            "wrong": [_slope_json(slope) for slope in self.wrong],
        }


def _slope_json(slope: Slope) -> dict[str, Any]:
    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    sides = {"left": number(slope.left), "right": number(slope.right)}
    return {"place": dict(slope.place), "gradient": slope.gradient, **sides}


def compared(executor: FeedExecutor, answer: Mapping[str, Any], dtype: str) -> tuple[Checked, ...]:
    """Every call that an objective differentiates into, in every mini-batch.

    executor: one shard in 64-bit arithmetic that has run the iteration; answer: of the run to be checked, in `dtype`
    """
    found, steps = [], dict.fromkeys(executor.plan.models, 0)
    for index, scope in executor.update_scopes:
        for train in executor.checked.updates[index].trains:
            entry = answer["train"][train.model][steps[train.model]]
            steps[train.model] += 1
            found += _compared_step(executor, scope, train, entry["grad"], (steps[train.model], RELATIVE[dtype]))
    return tuple(found)


def _compared_step(executor: FeedExecutor, scope: Scope, train: Train, grad: Mapping[str, Any],
                   numbered: tuple[int, float]) -> Iterator[Checked]:
    step, relative = numbered
    objective = _Objective(executor, scope, reintern(executor, train.objective))
    for call in objective.calls(train.model):
        given = torch.tensor(list(_flat(grad[call_text(call)])), dtype=torch.float64)
        slopes = list(_slopes(objective, call, given))
        worth = max((abs(s.gradient) for s in slopes), default=0.0)
        allowed = relative * worth + ROUNDING * max(1.0, abs(objective.value))
        kinks = tuple(s for s in slopes if _is_kink(s, allowed, CORNER * worth))
        smooth = [s for s in slopes if s not in kinks]
        worst = max(smooth, key=lambda s: s.deviation, default=None)
        wrong = tuple(s for s in smooth if s.deviation > allowed)
        yield Checked(train.model, call_text(call), step, len(slopes), worst, kinks, wrong, train.span)


def _slopes(objective: "_Objective", call: Expr, given: Tensor) -> Iterator[Slope]:
    """At each number of the mini-batch; a row outside of it must have no gradient."""
    positions = objective.positions(call)
    for i, position in enumerate(positions.tolist()):
        yield objective.slope(call, i, float(given[position]))
    outside = torch.ones_like(given, dtype=torch.bool)
    outside[positions] = False
    if outside.any() and bool(given[outside].any()):
        yield Slope({}, float(given[outside].abs().max()), 0.0, 0.0, 0.0)


def _is_kink(slope: Slope, allowed: float, corner: float) -> bool:
    """Whether the objective has no derivative here, and the gradient is one that it may take.

    corner: between the slopes of both sides; less is curvature where the gradient agrees with the central difference
    """
    if not (math.isfinite(slope.left) and math.isfinite(slope.right)):
        return True
    low, high = sorted((slope.left, slope.right))
    differ = high - low > (corner if slope.deviation <= allowed else allowed)
    return differ and low - allowed <= slope.gradient <= high + allowed


class _Objective:
    """An objective over one mini-batch as a function of the fed numbers."""

    def __init__(self, executor: FeedExecutor, scope: Scope, root: Expr) -> None:
        self.executor, self.scope, self.root = executor, scope, root
        self.evaluator = executor.evaluator(scope)
        known = {expr: scope.env[expr] for expr in walk(root) if expr in scope.env}
        self.evaluator.evaluate(root, known)
        self.known = known
        self.value = float(known[root].data)

    def calls(self, model: str) -> list[Expr]:
        """What the model gives at its weights of now, if the objective reads it outside of `stop`."""
        reached = walk(self.root, stop=lambda e: e.op == "stop" or model not in e.grad)
        return [e for e in reached if e.op == "call" and model in e.grad]

    def positions(self, call: Expr) -> Tensor:
        """Where the mini-batch's numbers stand among those of the iteration."""
        lead = self.executor.dims.sample_dims(call.args[0].type.dims)
        _, counts = self.executor.call_value(call, True)
        return ragged_index(counts, self.executor.samples_here(self.scope, lead))

    def slope(self, call: Expr, position: int, gradient: float) -> Slope:
        x = float(self.known[call].data[position])
        step = STEP * max(1.0, abs(x))
        low, high = (self._at(call, position, x + way * step) for way in (-1, 1))
        left, right, central = (self.value - low) / step, (high - self.value) / step, (high - low) / (2 * step)
        return Slope(self.scope.frame.place(call.type.dims, position), gradient, left, right, central)

    def _at(self, call: Expr, position: int, x: float) -> float:
        data = self.known[call].data.clone()
        data[position] = x
        moved = self._readers(call)
        env = {expr: value for expr, value in self.known.items() if expr not in moved}
        env[call] = Value(call.type.dims, data)
        with torch.no_grad():
            return float(self.evaluator.evaluate(self.root, env).data)

    def _readers(self, call: Expr) -> set[Expr]:
        """What depends on `call`, itself included, but through `stop`."""
        found: set[Expr] = {call}
        for expr in walk(self.root):
            if expr.op != "stop" and any(arg in found for arg in expr.args):
                found.add(expr)
        return found


def _flat(value: Any) -> Iterator[float]:
    if not isinstance(value, list):
        yield value
        return
    for item in value:
        yield from _flat(item)


# ---- what is said ----------------------------------------------------------------------------------------

MOST_KINKS = 3  # that are shown of a call


def differences_text(checks: tuple[Checked, ...]) -> str:
    """A line for each call, below it where the objective has no derivative."""
    if not checks:
        return "check    no gradient: nothing was trained\n"
    lines = []
    for check in checks:
        size = f"{check.numbers} number{'' if check.numbers == 1 else 's'}"
        largest = f"largest deviation {check.worst.deviation:.1e}" if check.worst else "no derivative anywhere"
        lines.append(f"check    {check.model} step {check.step}: d/d {check.call}: {largest} of {size}")
        for kink in check.kinks[:MOST_KINKS]:
            slopes = f"slopes {kink.left:.6g} and {kink.right:.6g}, taken {kink.gradient:.6g}"
            lines.append(f"           a kink{_where(kink)}: {slopes}")
        if len(check.kinks) > MOST_KINKS:
            lines.append(f"           and {len(check.kinks) - MOST_KINKS} more kinks")
    return "\n".join(lines) + "\n"


def _where(slope: Slope) -> str:
    return " at " + ", ".join(f"{dim}={at}" for dim, at in slope.place.items()) if slope.place else ""


def refuse_wrong(checks: tuple[Checked, ...], source: Source) -> None:
    """Raises R0160 for every call with a gradient beyond the tolerance, at its largest deviation."""
    found = []
    for check in (c for c in checks if c.wrong):
        worst = max(check.wrong, key=lambda s: s.deviation)
        place = _where(worst) or " of a row outside of the mini-batch"
        found.append(diagnostic("R0160", check.span, source=source, model=check.model, call=check.call, step=check.step,
                                where=place, gradient=f"{worst.gradient:.9g}", difference=f"{worst.central:.9g}"))
    if found:
        raise DiagnosticError(found)
