"""What changes nothing: splits over shards and micro-batches, the order of rows, a larger bound, the printed form.

For random programs on random ragged numbers, and for the shipped ones.
"""

from __future__ import annotations

import math
import random
import re
from typing import Any, Mapping

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from compiler.exprs import walk
from rlhf_dsl.ast import strip_spans
from rlhf_dsl.builtins import call_text
from rlhf_dsl.commands.fmt import formatted
from rlhf_dsl.diagnostics import DiagnosticError, Diagnostics
from rlhf_dsl.frontend import loads
from rlhf_dsl.parser import parse
from rlhf_dsl.scan import scan
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Bind, Checked
from runtime.feeds import differences
from runtime.feeds.command import evaluated, plan_for_feed
from runtime.feeds.executor import FeedExecutor
from runtime.feeds.feed import feed_of
from runtime.world import SoloWorld
from tests.programs.subjects import PROGRAMS, SUBJECTS, Numbers
from tests.property.random_programs import Program, programs

TOLERANCE = 1e-9
SETTINGS = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
SEEDS = st.integers(0, 10**6)
SHARDS, ROWS = st.integers(1, 4), st.integers(0, 3)


def load(program: Program, **overrides: str) -> Checked:
    """Programs whose objective has no gradient, by chance, are not looked at."""
    try:
        return loads(program.text, overrides)
    except DiagnosticError as error:
        assert {d.code for d in error.diagnostics if d.severity == "error"} <= {"E0404", "E0409"}, (program.text, error)
        assume(False)


def near(want: Any, got: Any, path: str = "answer") -> None:
    """Equal up to rounding, in the size of the numbers around."""
    if isinstance(want, dict):
        assert isinstance(got, dict) and want.keys() == got.keys(), path
        for key in want:
            near(want[key], got[key], f"{path}.{key}")
    elif isinstance(want, list):
        assert isinstance(got, list) and len(want) == len(got), path
        for i, pair in enumerate(zip(want, got)):
            near(*pair, f"{path}[{i}]")
    elif isinstance(want, float) and isinstance(got, float):
        assert math.isclose(want, got, rel_tol=1e-8, abs_tol=TOLERANCE), (path, want, got)
    else:
        assert want == got, (path, want, got)


# ---- splits ----------------------------------------------------------------------------------------------

@SETTINGS
@given(programs(), SEEDS, SHARDS, ROWS)
def test_no_split_changes_a_random_program(program, seed, shards, rows):
    checked, feed = load(program), feed_of("feed", program.feed(seed))
    near(evaluated(checked, feed), evaluated(checked, feed, shards, rows))


@pytest.mark.parametrize("name", SUBJECTS)
@settings(SETTINGS, max_examples=2)
@given(SEEDS, st.integers(2, 4), st.integers(1, 3))
def test_no_split_changes_a_shipped_program(name, seed, shards, rows):
    checked, feed = shipped(name, seed)
    near(evaluated(checked, feed), evaluated(checked, feed, shards, rows))


def shipped(name: str, seed: int, change=lambda text: text) -> tuple[Checked, Any]:
    feed = feed_of("feed", Numbers(name, seed).feed())
    path = PROGRAMS / f"{name}.rlflow"
    text = change(path.read_text(encoding="utf-8"))
    return loads(text, {dim: str(size) for dim, size in feed.dims.items()}, str(path)), feed


# ---- the order of rows -----------------------------------------------------------------------------------

@SETTINGS
@given(programs(), SEEDS, SEEDS)
def test_rows_may_stand_in_any_order(program, seed, order):
    whole = Program(re.sub(r"minibatches=\d", "minibatches=1", program.text), program.sizes)
    check_order(load(whole), whole.feed(seed), random.Random(order))


@pytest.mark.parametrize("name", SUBJECTS)
@settings(SETTINGS, max_examples=2)
@given(SEEDS, SEEDS)
def test_rows_of_a_shipped_program_may_stand_in_any_order(name, seed, order):
    """In one mini-batch: which rows a smaller one has is decided by their places."""
    checked, _ = shipped(name, seed, lambda text: re.sub(r"(minibatches|epochs) *= *\d+", r"\1=1", text))
    check_order(checked, Numbers(name, seed).feed(), random.Random(order))


def check_order(checked: Checked, feed: dict[str, Any], order: random.Random) -> None:
    """The answers of permuted rows are the permuted answers; metrics, states and objectives are the same."""
    orders = {d.name: order.sample(range(d.size), d.size) for d in checked.dims.values() if d.root}
    kinds = dims_of(checked)
    before = evaluated(checked, feed_of("feed", feed), shuffle=False)
    after = evaluated(checked, feed_of("feed", permuted_feed(feed, kinds, orders)), shuffle=False)
    for part, order_of in (("rollout", orders), ("update", of_kept(orders, before["kept"]))):
        values = {name: permuted(value, kinds["values"][name], order_of) for name, value in before[part].items()}
        near(values, after[part], part)
    for part in ("metrics", "state", "skipped"):
        near(before[part], after[part], part)
    for key, kept in before["kept"].items():
        near(permuted(kept, tuple(key.split(",")), orders), after["kept"][key], "kept")
    for model, steps in before["train"].items():
        for one, other in zip(steps, after["train"][model]):
            near(one["objective"], other["objective"], model)
            near({c: permuted(g, kinds["calls"][c], orders) for c, g in one["grad"].items()}, other["grad"], model)


def of_kept(orders: Mapping[str, list[int]], kept: Mapping[str, list]) -> dict[str, list[int]]:
    """The orders of those rows that an update has: a row with any sample kept."""
    found = dict(orders)
    for key, rows in kept.items():
        left = [i for i, row in enumerate(rows) if (any(row) if isinstance(row, list) else row)]
        found[key.split(",")[0]] = [left.index(i) for i in orders[key.split(",")[0]] if i in left]
    return found


def dims_of(checked: Checked) -> dict[str, dict[str, tuple[str, ...]]]:
    """The dims of values, columns, responses and calls, by name or text."""
    sections = [checked.rollout, *(u.body for u in checked.updates)]
    lines = [line for section in sections for line in section]
    roots = [getattr(line, "expr", None) or getattr(line, "objective", None) or line.condition for line in lines]
    roots += [state.next for state in checked.states.values()]
    inside = list(walk(*roots))
    called = {call_text(e): e.type.dims for e in inside if e.op in ("call", "pyop")}
    responses = {e.attr("column") or e.attr("name"): e.type.dims for e in inside if e.type.elem == "tokens"}
    return {
        "values": {line.name: line.expr.type.dims for line in lines if isinstance(line, Bind)}, "calls": called,
        "columns": {c.name: c.type.dims for source in checked.data for c in source.columns}, "responses": responses}


def permuted(value: Any, dims: tuple[str, ...], orders: Mapping[str, list[int]]) -> Any:
    if not dims or not isinstance(value, list):
        return value
    rows = [value[i] for i in orders[dims[0]]] if dims[0] in orders else value
    return [permuted(row, dims[1:], orders) for row in rows]


def permuted_feed(feed: dict[str, Any], kinds, orders) -> dict[str, Any]:
    return feed | {
        "data": {n: permuted(v, kinds["columns"][n], orders) for n, v in feed.get("data", {}).items()},
        "responses": {n: {k: permuted(v, kinds["responses"][n][:-1], orders) for k, v in given.items()}
                      for n, given in feed["responses"].items()},
        "calls": {section: {text: permuted(v, kinds["calls"][text], orders)
                            for text, v in calls.items() if text in kinds["calls"]}
                  for section, calls in feed["calls"].items()}}


# ---- bounds, gradients -----------------------------------------------------------------------------------

@SETTINGS
@given(programs(), SEEDS)
def test_a_larger_bound_changes_nothing(program, seed):
    """There is no padding, so that there cannot be more of it."""
    feed = feed_of("feed", program.feed(seed))
    near(evaluated(load(program), feed), evaluated(load(program, t="500"), feed))


@SETTINGS
@given(programs(), SEEDS, SHARDS)
def test_gradients_are_finite_differences(program, seed, shards):
    checked, feed = load(program), feed_of("feed", program.feed(seed))
    check_gradients(checked, feed, shards)


@pytest.mark.parametrize("name", SUBJECTS)
def test_gradients_of_the_shipped_programs_are_finite_differences(name):
    check_gradients(*shipped(name, 7), 2)


def check_gradients(checked: Checked, feed, shards: int) -> None:
    executor = FeedExecutor(plan_for_feed(checked, feed, 1, 0), checked, SoloWorld(), feed, torch.float64, True)
    executor.run_iteration(1)
    checks = differences.compared(executor, evaluated(checked, feed, shards), "f64")
    assert not any(check.wrong for check in checks), [check.wrong for check in checks]


# ---- the printed form ------------------------------------------------------------------------------------

def reparsed(text: str):
    sink = Diagnostics(Source("p.rlflow", text))
    found = parse(sink.source, sink)
    assert not sink.items, (text, sink.items)
    return strip_spans(found)


def respaced(text: str, numbers: random.Random) -> str:
    """The program as somebody else would type it: other blanks, indentation and blank lines; the same words."""
    found = scan(text, Diagnostics(Source("p.rlflow", text)))
    indent = " " * numbers.choice((1, 2, 3, 8))
    pieces, at, depth = [], 0, 0
    marks = sorted([(t.start, t.end, t.kind) for line in found.lines for t in line.tokens]
                   + [(s.start, s.end, "comment") for s in found.comments])
    for start, end, kind in marks:
        between = text[at:start]
        if "\n" in between:
            inner = between.rpartition("\n")[2]
            lines = 1 if depth else min(between.count("\n"), 2)
            pieces.append("\n" * lines + (" " * numbers.randrange(9) if depth else indent if inner else ""))
        elif pieces:
            needs = text[at - 1:at].isalnum() and text[start:start + 1].isalnum() or (between and kind == "comment")
            pieces.append(" " * numbers.choice((1, 3)) if needs or (between and numbers.random() < 0.5) else "")
        pieces.append(text[start:end])
        depth += {"open": 1, "close": -1}.get(kind, 0)
        at = end
    return "".join(pieces) + numbers.choice(("", "\n", "\n\n  \n"))


def comments(text: str) -> list[str]:
    found = scan(text, Diagnostics(Source("p.rlflow", text))).comments
    return sorted(text[s.start:s.end].lstrip("#").strip() for s in found)


def fmt(text: str) -> str:
    return formatted(Source("p.rlflow", text))


@SETTINGS
@given(programs(), SEEDS)
def test_a_program_survives_its_printed_form(program, seed):
    printed = fmt(program.text)
    assert reparsed(printed) == reparsed(program.text) and fmt(printed) == printed
    checked, feed = load(program), feed_of("feed", program.feed(seed))
    again = loads(printed)
    assert evaluated(checked, feed) == evaluated(again, feed)


@pytest.mark.parametrize("name", SUBJECTS)
@settings(SETTINGS, max_examples=5)
@given(SEEDS)
def test_a_shipped_program_typed_anew_prints_the_same(name, seed):
    text = (PROGRAMS / f"{name}.rlflow").read_text(encoding="utf-8")
    typed = respaced(text, random.Random(seed))
    assert reparsed(typed) == reparsed(text) and comments(typed) == comments(text)
    assert fmt(typed) == fmt(text) == text


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_shipped_program_gives_the_same_in_its_printed_form(name):
    checked, feed = shipped(name, 3)
    again, _ = shipped(name, 3, lambda text: fmt(respaced(text, random.Random(3))))
    assert evaluated(checked, feed) == evaluated(again, feed)
