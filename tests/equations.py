"""Building expressions and frames by hand, for tests of the equations."""

from __future__ import annotations

import torch

from rlhf_dsl.typed import Expr, Interner, Type
from runtime.evaluator import Evaluator
from runtime.reducers import SoloReducer, ThreadReducer
from runtime.values import Frame, Value, from_lists, to_lists

BOOLEAN = ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "any", "all")
CUTS = (*BOOLEAN, "stop", "sign", "count", "argmax", "rank", "length")


class Graph:
    """`g.add(x, 1.0)`, `g.mean(x, over=("t",), keep=1)`: expressions with their types, as the checker makes them."""

    def __init__(self) -> None:
        self.interner = Interner()

    def leaf(self, name: str, dims: tuple[str, ...] = (), elem: str = "f32", grad: bool = False) -> Expr:
        models = frozenset(["actor"]) if grad else frozenset()
        return self.interner.expr("call", (), Type(elem, dims), models, name=name)

    def const(self, value) -> Expr:
        elem = {bool: "bool", str: "text"}.get(type(value), "f32")
        return self.interner.expr("const", (), Type(elem), value=value)

    def __getattr__(self, op: str):
        def make(*args, **attrs) -> Expr:
            return self.make(op.rstrip("_"), *args, **attrs)

        return make

    def make(self, op: str, *args, dims=None, **attrs) -> Expr:
        args = tuple(a if isinstance(a, Expr) else self.const(a) for a in args)
        widest = max((a.type.dims for a in args), key=len, default=())
        if dims is None:
            dims = widest
            if op == "length":
                dims = widest[:-1]
            elif "over" in attrs and op not in ("rank", "next", "togo", "at_end"):
                dims = tuple(d for d in widest if d not in attrs["over"])
        elem = "bool" if op in BOOLEAN or op == "where" and args[1].type.elem == "bool" else "f32"
        grad = frozenset() if op in CUTS else frozenset().union(*(a.grad for a in args))
        return self.interner.expr(op, args, Type(elem, dims), grad, **attrs)


def frame(b=None, g=None, t=None, lead=None, start=0, total=None) -> Frame:
    """Rows b (with groups of g samples) of which the responses have the lengths t, nested lists over `lead`."""
    lead = lead or (("b", "g") if g else ("b",))
    rows = {"b": torch.arange(start, start + b)} if b is not None else {}
    sizes = {"g": g} if g else {}
    flat = t
    while flat and isinstance(flat[0], list):
        flat = [n for row in flat for n in row]
    lengths = {} if t is None else {"t": torch.tensor(flat, dtype=torch.int64)}
    return Frame(rows, sizes, lengths, {} if t is None else {"t": lead}, {"b": total or b} if b is not None else {})


def run(expr: Expr, on: Frame, feeds: dict[Expr, object], keeps=None, dtype=torch.float64):
    """Evaluates with leaves and keeps given as nested lists; the answer as nested lists."""
    env = {leaf: from_lists(lists, leaf.type.dims, on, leaf.type.elem, dtype) for leaf, lists in feeds.items()}
    masks = {i: from_lists(lists, dims, on, "bool") for i, (dims, lists) in (keeps or {}).items()}
    return to_lists(Evaluator(on, SoloReducer(), dtype, masks).evaluate(expr, env), on)


def gradient(expr: Expr, on: Frame, leaf: Expr, at, feeds=None, keeps=None, dtype=torch.float64):
    """d expr / d leaf as nested lists, with the leaf's value given as nested lists."""
    env = {e: from_lists(lists, e.type.dims, on, e.type.elem, dtype) for e, lists in (feeds or {}).items()}
    masks = {i: from_lists(lists, dims, on, "bool") for i, (dims, lists) in (keeps or {}).items()}
    x = from_lists(at, leaf.type.dims, on, "f32", dtype)
    x.data.requires_grad_()
    env[leaf] = x
    Evaluator(on, SoloReducer(), dtype, masks).evaluate(expr, env).data.backward()
    return to_lists(Value(x.dims, x.data.grad), on)


def sharded(expr: Expr, whole: Frame, env: dict[Expr, Value], keeps: dict[int, Value], parts: list[list[int]],
            dtype=torch.float64) -> list:
    """Evaluates over shards that hold the given rows of root b; each shard's (frame, value)."""
    selections = [whole.select("b", torch.tensor(rows, dtype=torch.int64)) for rows in parts]

    def shard(reducer: ThreadReducer):
        selection = selections[reducer.rank]
        local = {leaf: selection.value(value) for leaf, value in env.items()}
        masks = {i: selection.value(value) for i, value in keeps.items()}
        return selection.frame, Evaluator(selection.frame, reducer, dtype, masks).evaluate(expr, local)

    return ThreadReducer.run(len(parts), shard)
