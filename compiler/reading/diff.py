"""`rlflowc diff A B`: how two plans differ in what they do, as a person would say it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Iterable, Iterator, Mapping

from compiler import codec
from compiler.cluster import Cluster
from compiler.cost import CostModel, iteration_seconds
from compiler.groups import groups_of
from compiler.plan import LayoutSpec, Plan
from compiler.reading.phrases import DATA, MODEL, RUN, STEP, layout_said, said, told
from compiler.reading.tables import ITERATION, Row, Tables
from compiler.reading.units import bytes_text, degrees_text, plural, ranks_text, seconds_text

VERBS = {"train": "trains", "forward": "scores", "generate": "generates"}
MOVES = ("transfer", "reshard")
SENTENCES = {"model": MODEL, "data over": DATA}
# What of a step is said otherwise: where it works, which values it names, and ids, which mean nothing by themselves.
_ELSEWHERE = {"name", "line", "layout", "src", "dst", "expr", "prompts", "response", "objective", "partial", "values",
              "calls", "exprs", "constants", "before", "body", "total_bytes", "bytes"}
_OF_A_CALL = ("id", "text")  # attributes that tell calls of a Python op apart


@dataclass(frozen=True)
class Change:
    """what: "program", "layout", "model", "value", "step", "order", "transfers", "memory" or "estimate"."""

    what: str
    name: str
    text: str
    before: Any = None
    after: Any = None


def differences(before: Plan, after: Plan, cluster: Cluster) -> tuple[Change, ...]:
    """() for two plans that do the same, though their programs may lie elsewhere and be laid out otherwise."""
    bare = _bare(before), _bare(after)
    if bare[0] == bare[1]:
        return ()
    return tuple(_Diff(before, after, cluster).changes()) or tuple(_unspoken(*bare))


def _unspoken(before: Any, after: Any) -> Iterator[Change]:
    """Differences that no sentence is made for, by the table of the plan that they are in."""
    for path, x, y in _fields(before, after):
        yield Change("program", path[1:], f"the plans differ in `{path[1:]}`", x, y)


def diff_text(changes: Iterable[Change]) -> str:
    return "".join(f"{change.text}\n" for change in changes) or "both do the same\n"


def diff_json(changes: Iterable[Change]) -> dict[str, Any]:
    found = [dataclasses.asdict(change) for change in changes]
    return {"format": "rlflow.diff/1", "same": not found, "changes": found}


def _bare(plan: Plan) -> Any:
    """What a plan does: without where its program lies, places in its text, and what the search left."""
    program = dataclasses.replace(plan.program, path="", folder="", digest="", lines={})
    kept = dataclasses.replace(plan, program=program, cluster="", constraints={}, alternatives=(), search=None)
    return _without_lines(codec.encode(kept))


def _without_lines(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_lines(inner) for key, inner in value.items() if key != "line"}
    return [_without_lines(inner) for inner in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class _Side:
    """One of the two plans with what is looked up in it."""

    plan: Plan
    cluster: Cluster

    @cached_property
    def tables(self) -> Tables:
        return Tables(self.plan)

    @cached_property
    def costs(self) -> CostModel:
        return CostModel(self.plan, self.cluster)

    @cached_property
    def steps(self) -> dict[tuple[str, str, int], Row]:
        """Steps by section, title and, for those that come several times, their number."""
        found: dict[tuple[str, str, int], Row] = {}
        seen: Counter = Counter()
        for row in self.tables.rows:
            key = row.section, row.title
            found[*key, seen[key]] = row
            seen[key] += 1
        return found

    @cached_property
    def formulas(self) -> dict[str, Any]:
        """By value, how it is made of constants and of other named values."""
        return {name: self._formula(expr, top=True) for name, expr in self.tables.values.items()}

    def _formula(self, expr: int, top: bool = False) -> Any:
        row, name = self.plan.exprs[expr], self.tables.names.get(expr)
        if name is not None and not top:
            return name
        attrs = sorted((key, value) for key, value in row.attrs.items() if key not in _OF_A_CALL)
        return row.op, attrs, row.elem, row.dims, [self._formula(a) for a in row.args]

    def moved(self) -> tuple[int, float]:
        """(moves, bytes) of an iteration."""
        rows = [row for row in self.tables.rows if row.section == ITERATION and row.step.op in MOVES]
        moved = [(row.times, row.times * row.part * self.costs.moved(row.step).total) for row in rows]
        return sum(times for times, size in moved if size), sum(size for _, size in moved)

    def fullest(self) -> float:
        return max((self.costs.peak(group.members) for group in groups_of(self.plan)), default=0.0)

    @property
    def seconds(self) -> float:
        return iteration_seconds(self.costs)


class _Diff:
    def __init__(self, before: Plan, after: Plan, cluster: Cluster) -> None:
        self.before, self.after = _Side(before, cluster), _Side(after, cluster)

    def changes(self) -> Iterator[Change]:
        yield from self.program()
        yield from self.layouts()
        yield from self.values()
        yield from self.steps()
        yield from self.order()
        yield from self.amounts()

    # ---- tables

    def program(self) -> Iterator[Change]:
        a, b = self.before.plan, self.after.plan
        if a.program.name != b.program.name:
            text = f"the program is {b.program.name} instead of {a.program.name}"
            yield Change("program", b.program.name, text, a.program.name, b.program.name)
        if a.world != b.world:
            yield Change("program", "ranks", f"on {plural(b.world, 'rank')} instead of {a.world}", a.world, b.world)
        if a.cluster != b.cluster:
            yield Change("program", "cluster", "it is for another cluster", a.cluster, b.cluster)
        tables = (("param", a.settings, b.settings), ("dim", a.dims, b.dims), ("model", a.models, b.models),
                  ("op", a.ops, b.ops), ("assume", a.assume, b.assume), ("data over", _data(a), _data(b)),
                  ("eval", _evals(a), _evals(b)))
        for what, one, other in tables:
            yield from self.table(what, one, other)
        for path, x, y in _fields(dataclasses.asdict(a.run), dataclasses.asdict(b.run)):
            text = said(RUN, path[1:], "the run", x, y) or f"run{path} {told(x)} -> {told(y)}"
            yield Change("program", f"run{path}", text, x, y)

    def table(self, what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
        """Entries that came, went or changed. what: the word before a name."""
        kind = "model" if what == "model" else "program"
        for name in (n for n in before if n not in after):
            yield Change(kind, name, f"{what} {name} is gone", codec.encode(before[name]), None)
        for name in after:
            if name not in before:
                yield Change(kind, name, f"{what} {name} is new", None, codec.encode(after[name]))
                continue
            for path, x, y in _differing(before[name], after[name]):
                plain = f"{what} {name}{path.removeprefix('.size')} {told(x)} -> {told(y)}"
                yield Change(kind, name, said(SENTENCES.get(what, {}), path[1:], name, x, y) or plain, x, y)

    def layouts(self) -> Iterator[Change]:
        before, after = self.before.plan.layouts, self.after.plan.layouts
        for name in (n for n in after if n in before):
            model, _, stage = name.rpartition(".")
            text = layout_said(model, VERBS.get(stage, stage), before[name], after[name])
            if text:
                yield Change("layout", name, text, degrees_text(before[name]), degrees_text(after[name]))
        yield from self.moves([n for n in after if n in before])
        for name in (n for n in after if n in before and before[n].within != after[n].within):
            old, new = before[name].within, after[name].within
            where = f"the ranks of {new}" if new else f"{_ranks(after[name])}, which are its own"
            yield Change("layout", name, f"{name.rpartition('.')[0]} samples on {where}", old, new)

    def moves(self, layouts: list[str]) -> Iterator[Change]:
        """Models that have other ranks, those that moved alike in one sentence."""
        before, after = self.before.plan.layouts, self.after.plan.layouts
        moved: dict[str, tuple[str, str]] = {}
        for name in layouts:
            old, new = _ranks(before[name]), _ranks(after[name])
            if old != new and self._on_parts(name):
                moved.setdefault(name.rpartition(".")[0], (old, new))
        for old, new in dict.fromkeys(moved.values()):
            who = [model for model, ranks in moved.items() if ranks == (old, new)]
            yield Change("layout", ", ".join(who), f"{_and(who)} moved from {old} to {new.removeprefix('ranks ')}", old, new)

    def _on_parts(self, layout: str) -> bool:
        """Whether a layout leaves ranks out, before or after; else a number of ranks says all."""
        return any(side.plan.layouts[layout].ranks < side.plan.world for side in (self.before, self.after))

    # ---- values and steps

    def values(self) -> Iterator[Change]:
        """Values that are made otherwise; one made of such a value is not named for that."""
        before, after = self.before.formulas, self.after.formulas
        for name in (n for n in after if n in before and before[n] != after[n]):
            old, new = (self._line(side, name) for side in (self.before, self.after))
            shapes = [side.plan.exprs[side.tables.values[name]].dims for side in (self.before, self.after)]
            how = f", instead of {old}" if old != new else ", with other numbers" if shapes[0] == shapes[1] else (
                f", over [{', '.join(shapes[1])}] instead of [{', '.join(shapes[0])}]")
            yield Change("value", name, f"{name} is computed otherwise: {new}{how}", old, new)

    @staticmethod
    def _line(side: _Side, name: str) -> str:
        expr = side.tables.values[name]
        makers = side.tables.makers(expr)
        line = makers[0].step.line if makers else side.plan.exprs[expr].line
        return " ".join(side.plan.line_text(line).split())

    def steps(self) -> Iterator[Change]:
        """Steps of their own: moves are told by their number and bytes, and what offloading does by its model."""
        before, after = self.before.steps, self.after.steps
        for key in (k for k in before if k not in after and not self._told_elsewhere(before[k].step)):
            yield Change("step", key[1], f"{_in(key)} is gone", self._told(before[key]), None)
        for key in after:
            if key in before:
                yield from self.step(key, before[key], after[key])
            elif not self._told_elsewhere(after[key].step):
                yield Change("step", key[1], f"{_in(key)} is new", None, self._told(after[key]))

    def _told_elsewhere(self, step: Any) -> bool:
        if step.op not in ("reload", "offload"):
            return step.op in MOVES
        models = [side.plan.models.get(step.model) for side in (self.before, self.after)]
        return None in models or models[0].offload != models[1].offload

    def step(self, key: tuple[str, str, int], before: Row, after: Row) -> Iterator[Change]:
        fields = {f.name for f in (*dataclasses.fields(before.step), *dataclasses.fields(after.step))} - _ELSEWHERE
        if self._other_lag:
            fields -= {"ahead"}
        for field in sorted(fields):
            old, new = getattr(before.step, field, None), getattr(after.step, field, None)
            if old != new:
                words = field.replace("_", " ").replace("micro batch", "micro-batch")
                text = said(STEP, field, _in(key), old, new) or f"{_in(key)}: {words} {told(old)} -> {told(new)}"
                yield Change("step", key[1], text, old, new)

    @property
    def _other_lag(self) -> bool:
        """Whether the one plan samples ahead and the other does not: steps and their order follow."""
        return self.before.plan.run.lag != self.after.plan.run.lag

    @staticmethod
    def _told(row: Row) -> str:
        return f"{row.title}, line {row.step.line}"

    def order(self) -> Iterator[Change]:
        """The first of the steps that both have that comes earlier than it did."""
        before, after = self.before.steps, self.after.steps
        old, new = [k for k in before if k in after], [k for k in after if k in before]
        first = next((i for i, (x, y) in enumerate(zip(old, new)) if x != y), None)
        if first is not None and not self._other_lag:
            text = f"the order is another: {new[first][1]} runs before {old[first][1]}"
            yield Change("order", new[first][1], text, [k[1] for k in old], [k[1] for k in new])

    @property
    def is_elsewhere(self) -> bool:
        """Whether neither plan is of the cluster that estimates would be made for."""
        digest = self.before.cluster.digest
        return digest not in (self.before.plan.cluster, self.after.plan.cluster)

    # ---- amounts

    def amounts(self) -> Iterator[Change]:
        (count, size), (new_count, new_size) = self.before.moved(), self.after.moved()
        said = [_more(new_count - count, "transfer"), _more_bytes(new_size - size)]
        if any(said):
            text = f"{', '.join(filter(None, said))} an iteration"
            yield Change("transfers", "transfers", text, {"count": count, "bytes": round(size)},
                         {"count": new_count, "bytes": round(new_size)})
        if self.is_elsewhere:
            return
        old, new = self.before.fullest(), self.after.fullest()
        if bytes_text(old) != bytes_text(new):
            yield Change("memory", "memory", f"memory of the fullest rank {_arrow(old, new, bytes_text)}", old, new)
        old, new = self.before.seconds, self.after.seconds
        if seconds_text(old) != seconds_text(new):
            yield Change("estimate", "estimate", f"estimate {_arrow(old, new, seconds_text)} an iteration", old, new)


# ---- words ---------------------------------------------------------------------------------------

def _arrow(old: float, new: float, shown) -> str:
    """`1.90 s -> 1.40 s (-26 %)`, `2.00 s -> 9.00 s (4.5 times)`"""
    percent = 100 * (new / old - 1) if old else 0.0
    change = f" ({new / old:.1f} times)" if percent >= 200 else f" ({percent:+.0f} %)" if abs(percent) >= 0.5 else ""
    return f"{shown(old)} -> {shown(new)}{change}"


def _more(count: int, noun: str) -> str:
    return f"{plural(abs(count), noun)} {'more' if count > 0 else 'fewer'}" if count else ""


def _more_bytes(size: float) -> str:
    return f"{bytes_text(abs(size))} {'more' if size > 0 else 'less'}" if round(size) else ""


def _in(key: tuple[str, str, int]) -> str:
    section, title, number = key
    where = "" if section == ITERATION else f" ({section})"
    return f"{title}{where}" + (f", the {number + 1}. time," if number else "")


def _ranks(spec: LayoutSpec) -> str:
    return ranks_text(range(spec.first, spec.first + spec.ranks))


def _data(plan: Plan) -> dict[str, Any]:
    return {d.root: {"kind": d.kind, "path": d.path, "columns": [c.name for c in d.columns],
                     "fields": [c.field for c in d.columns]} for d in plan.data}


def _evals(plan: Plan) -> dict[str, Any]:
    return {e.name: dataclasses.replace(e, steps=()) for e in plan.evals}


def _differing(before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """As `_fields`, without places in the text, and without the shape that comes with another source."""
    pairs = [_without_lines(dataclasses.asdict(x) if dataclasses.is_dataclass(x) else x) for x in (before, after)]
    other_source = getattr(before, "source", "") != getattr(after, "source", "")
    for path, x, y in _fields(*pairs):
        if not (other_source and path.startswith(".shape")):
            yield path, x, y


def _and(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _fields(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, before, after) of the values that differ, the innermost."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            yield from _fields(before.get(key), after.get(key), f"{path}.{key}")
    elif before != after:
        yield path, before, after
