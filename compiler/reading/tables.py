"""What the readers of a plan look up in it: its steps with how often they run, and values under the user's names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Iterable, Iterator

from compiler.plan import Plan
from compiler.reading.units import plural, ranks_text
from compiler.resharding.transitions import resolve
from compiler.steps import HOME, UpdateLoop, exprs_of

ITERATION, SETUP = "an iteration", "once"
_TITLES = {"load": "load {}", "reshard": "{}", "transfer": "transfer {}", "record": "metric {}", "update": "{}",
           "optimizer": "{}", "train": "{}", "action": "{}", "commit_states": "commit states", "next_state": "state {}",
           "statistics": "{}"}


@dataclass(frozen=True)
class Row:
    """A step of a plan. times: that `section` runs it; part: the share of the rows that it sees each time."""

    step: Any
    section: str
    times: int = 1
    part: float = 1.0

    @property
    def title(self) -> str:
        return title_of(self.step)


def title_of(step: Any) -> str:
    """`forward logp_old`, `metric kl`: a step in one or two words, unique but for repeated moves."""
    return _TITLES.get(step.op, f"{step.op} {{}}").format(step.name)


def told(step: Any) -> str:
    """Its title, with what is worth saying of it."""
    title = f"load {step.name}: {', '.join(step.columns)}" if step.op == "load" else title_of(step)
    if getattr(step, "retained", ""):
        return f"{title}, on from {step.retained}"
    return f"{title}, of the next iteration" if getattr(step, "ahead", 0) else title


def layout_of(step: Any) -> str:
    """The layout in which a step works, "" for those at home and for moves."""
    return f"{step.model}.train" if step.op == "optimizer" else getattr(step, "layout", "")


def rows_of(plan: Plan) -> Iterator[Row]:
    """Every step in the order of execution, those of loops after their loop."""
    for section, steps in ((SETUP, plan.setup), (ITERATION, plan.steps), *((e.name, e.steps) for e in plan.evals)):
        yield from _rows(steps, section)


def _rows(steps: Iterable[Any], section: str, times: int = 1, part: float = 1.0) -> Iterator[Row]:
    for step in steps:
        yield Row(step, section, times, part)
        if isinstance(step, UpdateLoop):
            yield from _rows(step.before, section)
            yield from _rows(step.body, section, step.epochs * step.minibatches, 1 / step.minibatches)


@dataclass(frozen=True)
class Tables:
    """Look-ups in one plan."""

    plan: Plan

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return tuple(rows_of(self.plan))

    @cached_property
    def values(self) -> dict[str, int]:
        """Values by their names: columns, what steps make, and the states."""
        found: dict[str, int] = {}
        for i, expr in enumerate(self.plan.exprs):
            if expr.op in ("data", "state"):
                found.setdefault(expr.attrs.get("column") or expr.attrs.get("name"), i)
        for row in self.rows:
            for name, expr in _named(row.step):
                found.setdefault(name, expr)
        return found

    @cached_property
    def names(self) -> dict[int, str]:
        """The name of a value, by the id of its expression."""
        return {expr: name for name, expr in reversed(self.values.items())}

    def makers(self, expr: int) -> list[Row]:
        """Steps that make a value: they list it, and do not only move it."""
        return [row for row in self.rows if row.step.op in MAKERS and expr in made_by(self.plan, row.step)]

    def movers(self, expr: int) -> list[Row]:
        return [r for r in self.rows if r.step.op == "transfer" and any(v.expr == expr for v in r.step.values)]

    def readers(self, expr: int) -> list[Row]:
        """Steps that need a value in order to compute, other than those that make or move it."""
        makers = {id(row.step) for row in self.makers(expr)}
        return [row for row in self.rows
                if row.step.op != "transfer" and id(row.step) not in makers and expr in self.inputs(row.step)]

    def inputs(self, step: Any) -> set[int]:
        """The named values that a step reads: those nearest below what it makes."""
        direct = {getattr(step, field) for field in ("prompts", "response") if hasattr(step, field)}
        direct |= {v.expr for v in getattr(step, "constants", ())}
        made = set(exprs_of(step))
        stack = [arg for expr in made for arg in self.plan.exprs[expr].args]
        seen: set[int] = set()
        while stack:
            expr = stack.pop()
            if expr in seen or expr in made:
                continue
            seen.add(expr)
            if expr in self.names:
                direct.add(expr)
            else:
                stack.extend(self.plan.exprs[expr].args)
        own = made if step.op in READERS else set()
        return (direct - made) | {expr for expr in own if expr in self.names}

    def ranks(self, place: str) -> tuple[int, ...]:
        """The ranks of a layout; all of them at home."""
        if place in ("", HOME):
            return tuple(range(self.plan.world))
        return tuple(sorted(resolve(self.plan.layouts, place).ranks))

    def ranks_of(self, step: Any) -> tuple[int, ...]:
        """The ranks that take part in a step: rows leave and reach all ranks, weights those of both layouts."""
        if step.op == "reshard":
            return tuple(sorted({*self.ranks(step.src), *self.ranks(step.dst)}))
        return self.ranks(layout_of(step))

    def where(self, step: Any) -> str:
        """`in actor.train on ranks 0-3`, `from home to actor.train`."""
        if hasattr(step, "src"):
            return f"from {step.src} to {step.dst}"
        place = layout_of(step)
        return f"{f'in {place}' if place else 'at home'} on {ranks_text(self.ranks(place))}"


def microbatches(tables: Tables, layout: str) -> Iterator[str]:
    """`micro-batches of 4 samples`, `layers computed again`: how the steps of a layout go about their rows."""
    steps = [row.step for row in tables.rows if layout_of(row.step) == layout]
    found = dict.fromkeys(filter(None, map(_microbatch, steps)))
    if found:
        yield f"micro-batches of {' and '.join(found)}"
    if any(getattr(step, "recompute", False) for step in steps):
        yield "layers computed again"


def _microbatch(step: Any) -> str:
    """`4 samples`, `8192 tokens`, or ""."""
    samples, tokens = getattr(step, "micro_batch", 0), getattr(step, "tokens", 0)
    return " or ".join([plural(samples, "sample")] * bool(samples) + [plural(tokens, "token")] * bool(tokens))


MAKERS = ("load", "generate", "reply", "forward", "equation", "pyop", "statistics", "train", "next_state")
READERS = ("record", "keep", "next_state")  # they only look at their expression


def _named(step: Any) -> Iterator[tuple[str, int]]:
    for field in ("calls", "values", "exprs", "constants"):
        yield from ((v.name, v.expr) for v in getattr(step, field, ()))
    if step.op in ("generate", "reply", "pyop"):
        yield step.name, step.expr


def made_by(plan: Plan, step: Any) -> set[int]:
    """The expressions that a step makes."""
    if step.op == "load":
        return {i for i, e in enumerate(plan.exprs) if e.op == "data" and e.attrs["column"] in step.columns}
    if step.op == "next_state":
        return {i for i, e in enumerate(plan.exprs) if e.op in ("next_state", "state") and e.attrs["name"] == step.name}
    if step.op == "train":
        return {v.expr for v in step.calls}
    return set(exprs_of(step))
