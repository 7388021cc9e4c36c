"""Equations by plain loops over named coordinates: the meaning of each primitive, one element at a time.

A value over dims is a dict: coordinates in the order of the dims → element. A coordinate of a root dim is the row's
number in the iteration, of a ragged dim the place among the row's own tokens. A number is a 0-d f64 tensor, so that
autograd follows it; a truth is a bool, a text a str. A response is a value over its dims less the ragged one.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Callable, Optional

import torch

from rlhf_dsl.typed import Dim, Expr

Dims = tuple[str, ...]
Cells = dict[tuple[int, ...], object]
Leaf = Callable[["Scope", Expr], Cells]


class Scope:
    """The rows that take part: those of an iteration, or, with a parent, those of one mini-batch of it.

    rows: root dim → row numbers; leaf: gives the cells of what is not an equation (data, model calls, Python ops)
    lengths: ragged dim → own tokens by coordinates of its lead; keeps: index → (dims, cells) of the conditions
    """

    def __init__(self, dims: dict[str, Dim], rows: dict[str, list[int]], leaf: Leaf, parent: Optional["Scope"] = None):
        self.dims, self.rows, self.leaf, self.parent = dims, rows, leaf, parent
        self.lengths: dict[str, dict] = parent.lengths if parent else {}
        self.keeps: dict[int, tuple[Dims, Cells]] = parent.keeps if parent else {}
        self.known: dict[Expr, Cells] = {}

    # ---- what exists

    def extent(self, dim: str, at: dict[str, int]) -> range | list[int]:
        spec = self.dims[dim]
        if spec.root:
            return self.rows[dim]
        return range(self.lengths[dim][tuple(at[d] for d in spec.lead)] if spec.ragged else spec.size)

    def coordinates(self, dims: Dims) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = [()]
        for dim in dims:
            found = [(*c, i) for c in found for i in self.extent(dim, dict(zip(dims, c)))]
        return found

    def kept(self, at: dict[str, int], keep: int) -> bool:
        """Whether the conditions 1..keep over a root dim among `at` leave anything there."""
        told = [(dims, cells) for i, (dims, cells) in self.keeps.items() if i <= keep and dims[0] in at]
        free = list(dict.fromkeys(d for dims, _ in told for d in dims if d not in at))
        whole = (at | dict(zip(free, places)) for places in product(*(range(self.dims[d].size) for d in free)))
        return any(all(cells[tuple(a[d] for d in dims)] for dims, cells in told) for a in whole)

    # ---- evaluation

    def scalar(self, expr: Expr) -> torch.Tensor:
        return number(self.evaluate(expr)[()])

    def evaluate(self, expr: Expr) -> Cells:
        """The cells of `expr`, found once. Those of the iteration hold more rows than a mini-batch asks for."""
        if expr not in self.known:
            self.known[expr] = self.parent.evaluate(expr) if self._is_outer(expr) else self._computed(expr)
        return self.known[expr]

    def _is_outer(self, expr: Expr) -> bool:
        return self.parent is not None and (expr in self.parent.known or expr.attr("phase") == "rollout")

    def _computed(self, expr: Expr) -> Cells:
        if expr.op == "const":
            return {(): constant(expr.attr("value"))}
        if expr.op in ELEMENTWISE:
            return self._elementwise(expr)
        if expr.op in REDUCTIONS or expr.op in ("argmax", "rank"):
            return self._reduction(expr)
        if expr.op in RAGGED:
            return self._ragged(expr)
        return self.leaf(self, expr)

    def _elementwise(self, expr: Expr) -> Cells:
        args = [(a.type.dims, self.evaluate(a)) for a in expr.args]
        return {c: ELEMENTWISE[expr.op](*(pick(cells, dims, c, expr.type.dims) for dims, cells in args))
                for c in self.coordinates(expr.type.dims)}

    def _reduction(self, expr: Expr) -> Cells:
        x, *others = expr.args
        q = others.pop(0) if expr.op == "quantile" else None
        cells, where = self.evaluate(x), self.evaluate(others[0]) if others else None
        dims, rest = x.type.dims, tuple(d for d in x.type.dims if d not in expr.attr("over"))
        groups: dict[tuple, dict] = defaultdict(dict)
        for c in self.coordinates(dims):
            part = where is None or pick(where, others[0].type.dims, c, dims)
            if part and self.kept(dict(zip(dims, c)), expr.attr("keep", 0)):
                groups[project(c, dims, rest)][c] = cells[c]
        if expr.op == "rank":
            return {c: self._rank(cells[c], groups[project(c, dims, rest)]) for c in self.coordinates(dims)}
        if expr.op == "argmax":
            return {c: self._argmax(groups[c], dims, expr.attr("over")[0]) for c in self.coordinates(rest)}
        more = [expr.attr("unbiased", True)] if expr.op == "std" else []
        levels = self.evaluate(q) if q else {}
        found = {}
        for c in self.coordinates(rest):
            level = [pick(levels, q.type.dims, c, rest)] if q else []
            found[c] = REDUCTIONS[expr.op](list(groups[c].values()), *more, *level)
        return found

    def _rank(self, own: object, group: dict) -> torch.Tensor:
        return constant(sum(bool(number(v) < number(own)) for v in group.values()))

    def _argmax(self, group: dict, dims: Dims, over: str) -> torch.Tensor:
        if not group:
            return constant(0)
        best = max(group, key=lambda c: number(group[c]).item())  # the first of equals
        at = dict(zip(dims, best))
        return constant(list(self.extent(over, at)).index(at[over]))

    def _ragged(self, expr: Expr) -> Cells:
        if expr.op == "length":
            ragged = expr.args[0].type.dims[-1]
            return {c: constant(self.lengths[ragged][c]) for c in self.coordinates(expr.type.dims)}
        args = [(a.type.dims, self.evaluate(a)) for a in expr.args]
        dims, found = expr.type.dims, {}
        for lead in self.coordinates(dims[:-1]):
            tokens = [(*lead, i) for i in self.extent(dims[-1], dict(zip(dims, lead)))]
            columns = [[number(pick(cells, d, c, dims)) for c in tokens] for d, cells in args]
            found |= zip(tokens, RAGGED[expr.op](*columns))
        return found


def pick(cells: Cells, dims: Dims, at: tuple[int, ...], within: Dims) -> object:
    """The element at coordinates `at` of `within`, broadcast by name."""
    return cells[project(at, within, dims)]


def project(at: tuple[int, ...], within: Dims, dims: Dims) -> tuple[int, ...]:
    place = dict(zip(within, at))
    return tuple(place[d] for d in dims)


def constant(value: object) -> object:
    return value if isinstance(value, (bool, str)) else torch.tensor(float(value), dtype=torch.float64)


def number(value: object) -> torch.Tensor:
    return constant(float(value)) if isinstance(value, bool) else value


# ---- elementwise -----------------------------------------------------------------------------------

def numeric(function: Callable) -> Callable:
    return lambda *values: function(*map(number, values))


def extreme(choose: Callable, values: list[torch.Tensor]) -> torch.Tensor:
    """The least or greatest of `values`; equal ones share the gradient."""
    plain = [v.item() for v in values]
    ties = [v for v, p in zip(values, plain) if p == choose(plain)]
    return sum(ties) / len(ties)


def clip(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return low if x < low else high if x > high else x


def same(x: object, y: object) -> bool:
    return x == y if isinstance(x, str) else bool(number(x) == number(y))


ELEMENTWISE: dict[str, Callable] = {
    "add": numeric(lambda x, y: x + y), "sub": numeric(lambda x, y: x - y), "mul": numeric(lambda x, y: x * y),
    "div": numeric(lambda x, y: x / y), "pow": numeric(lambda x, y: x ** y), "neg": numeric(lambda x: -x),
    "exp": numeric(torch.exp), "log": numeric(torch.log),
    "sqrt": numeric(lambda x: torch.sqrt(x) if x != 0 else x.detach()),
    "abs": numeric(lambda x: x if x > 0 else -x if x < 0 else x.detach()),
    "sign": numeric(lambda x: constant((x > 0).item() - (x < 0).item())),
    "sigmoid": numeric(lambda x: 1 / (1 + torch.exp(-x))), "log_sigmoid": numeric(torch.nn.functional.logsigmoid),
    "minimum": numeric(lambda *x: extreme(min, x)), "maximum": numeric(lambda *x: extreme(max, x)),
    "clip": numeric(clip), "where": lambda c, x, y: x if c else y,
    "stop": lambda x: x.detach() if isinstance(x, torch.Tensor) else x,
    "eq": same, "ne": lambda x, y: not same(x, y),
    "lt": numeric(lambda x, y: bool(x < y)), "le": numeric(lambda x, y: bool(x <= y)),
    "gt": numeric(lambda x, y: bool(x > y)), "ge": numeric(lambda x, y: bool(x >= y)),
    "and": lambda x, y: bool(x) and bool(y), "or": lambda x, y: bool(x) or bool(y), "not": lambda x: not x,
}


# ---- reductions of a list of elements ----------------------------------------------------------------

def total(values: list) -> torch.Tensor:
    return sum(map(number, values), constant(0))


def mean(values: list) -> torch.Tensor:
    """Around the first, so that the mean of equal values is their value."""
    if not values:
        return constant(0)
    base = number(values[0]).detach()
    return base + total([number(v) - base for v in values]) / len(values)


def std(values: list, unbiased: bool) -> torch.Tensor:
    squares = total([(number(v) - mean(values)) ** 2 for v in values])
    if squares == 0:
        return constant(0)
    return torch.sqrt(squares / (len(values) - 1 if unbiased else len(values)))


def extreme_of_some(choose: Callable) -> Callable:
    return lambda values: extreme(choose, list(map(number, values))) if values else constant(0)


def count(values: list) -> torch.Tensor:
    return constant(sum(1 for v in values if v is not False))


def quantile(values: list, q: torch.Tensor) -> torch.Tensor:
    ordered = sorted(map(number, values), key=torch.Tensor.item)
    if not ordered:
        return constant(0)
    place = q.item() * (len(ordered) - 1)
    below = min(int(place), len(ordered) - 1)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


REDUCTIONS: dict[str, Callable] = {
    "sum": total, "mean": mean, "std": std, "max": extreme_of_some(max), "min": extreme_of_some(min),
    "quantile": quantile, "count": count, "any": any, "all": all,
}


# ---- along the own tokens of a row -------------------------------------------------------------------

def following(x: list) -> list:
    return [*x[1:], constant(0)][: len(x)]


def togo(x: list, d: list) -> list:
    found, after = [], constant(0)
    for here, decay in zip(reversed(x), reversed(d)):
        after = here + decay * after
        found.append(after)
    return found[::-1]


def at_end(s: list, *length: list) -> list:
    return [*(constant(0) for _ in s[1:]), *s[-1:]]


RAGGED: dict[str, Callable] = {"next": following, "togo": togo, "at_end": at_end, "length": len}
