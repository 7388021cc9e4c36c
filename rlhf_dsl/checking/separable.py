"""Whether an objective is a sum over root rows, so that its gradient is a sum over micro-batches and ranks.

It is if it is affine in its reductions over root dims of trained outputs: then each of them may be taken in parts.
Reductions of constants and of `stop(...)` are numbers that are known before, wherever they stand.
"""

from __future__ import annotations

from typing import Callable, Optional

from rlhf_dsl.typed import Expr

Fault = tuple[Expr, str]
_LINEAR = ("add", "sub", "neg")


def why_not(objective: Expr, model: str, is_root: Callable[[str], bool]) -> Optional[Fault]:
    """None if an objective of `model` is separable, else the statistic in the way and the reason.

    Outputs of other models are constants here: they get no gradient from it.
    """
    return _Separability(model, is_root).affine(objective)


class _Separability:
    def __init__(self, model: str, is_root: Callable[[str], bool]):
        self.model = model
        self.is_root = is_root
        self.memo: dict[int, Optional[Expr]] = {}

    def affine(self, expr: Expr) -> Optional[Fault]:
        if self.statistic(expr) is None:
            return None
        if self.is_statistic(expr):
            return self.reduction(expr)
        if expr.op in _LINEAR:
            return next(filter(None, map(self.affine, expr.args)), None)
        trained = [arg for arg in expr.args if self.model in arg.grad]
        known = {"mul": len(trained) == 1, "div": trained == [expr.args[0]], "where": True}
        if known.get(expr.op, False):
            return next(filter(None, map(self.affine, trained)), None)
        return self.statistic(expr), f"it stands inside `{expr.op}`, which is not linear in it"

    def reduction(self, expr: Expr) -> Optional[Fault]:
        if expr.op not in ("sum", "mean"):
            return expr, f"a `{expr.op}` over rows is not a sum over rows"
        inner = self.statistic(expr.args[0])
        return None if inner is None else (inner, f"it stands inside another `{expr.op}` over rows")

    def is_statistic(self, expr: Expr) -> bool:
        return self.model in expr.grad and any(map(self.is_root, expr.attr("over", ())))

    def statistic(self, expr: Expr) -> Optional[Expr]:
        """The first statistic of trained outputs that an expression differentiates into."""
        if self.model not in expr.grad:
            return None
        if id(expr) not in self.memo:
            inside = None if self.is_statistic(expr) else next(filter(None, map(self.statistic, expr.args)), None)
            self.memo[id(expr)] = expr if self.is_statistic(expr) else inside
        return self.memo[id(expr)]
