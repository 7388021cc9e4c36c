"""The sections that compute: `rollout:`, `update:` and `eval:`."""

from __future__ import annotations

from typing import Iterable, Iterator, Optional

from rlhf_dsl import ast
from rlhf_dsl.checking.broadcast import NUMBERS, expect
from rlhf_dsl.checking.context import Context
from rlhf_dsl.checking.data import data
from rlhf_dsl.checking.infer import check_annotation, infer, infer_several, report_count
from rlhf_dsl.checking.responses import make_response, makes_response
from rlhf_dsl.checking.scopes import Binding, Scope
from rlhf_dsl.checking.settings import AT_LEAST_0, AT_LEAST_1, keyword_settings
from rlhf_dsl.checking.training import train, trained_models
from rlhf_dsl.diagnostics import Label
from rlhf_dsl.typed import Bind, Eval, Expr, Keep, Metric, Update, walk


def bound_names(section: ast.Section) -> dict[str, ast.Span]:
    """The names that the lines of a section bind, each with its first place."""
    targets = [t for line in section.body if isinstance(line, ast.Bind) for t in line.targets]
    return {t.name.id: t.name.span for t in reversed(targets)}


def enter(cx: Context, section: ast.Section, parent: Scope, others: Iterable[ast.Section], **place) -> Context:
    """The context of a section's first line; `others` are sections whose names cannot be seen from it."""
    elsewhere = {name: (span, other.kind) for other in others for name, span in bound_names(other).items()}
    return cx.at(scope=Scope(parent, later=bound_names(section), elsewhere=elsewhere), **place)


# ---- lines ------------------------------------------------------------------------------------------

def bind(cx: Context, line: ast.Bind) -> list[Bind]:
    """A line `a, b = E`; makes a response if E does."""
    if makes_response(cx, line.value) and len(line.targets) == 1:
        values = [make_response(cx, line.targets[0], line.value, infer)]
    else:
        values = infer_several(cx, line.value)
        if len(values) != len(line.targets):
            report_count(cx, line, len(values))
            values = [None] * len(line.targets)
        for target, value in zip(line.targets, values):
            check_annotation(cx, target, value)
    for target, value in zip(line.targets, values):
        name = target.name.id
        cx.define(Binding("value", name, target.name.span, value, quiet=name.startswith("_")))
    return [Bind(t.name.id, value, t.span) for t, value in zip(line.targets, values) if value is not None]


def metric(cx: Context, line: ast.Metric) -> Optional[Metric]:
    """`metric NAME = E`: names of their own, one scalar each."""
    name, group = line.name.id, "eval" if cx.phase.startswith("eval") else "train"
    before = cx.tables.metrics.setdefault(f"{group} {name}", line.name.span)
    if before is not line.name.span:
        cx.error("E0103", line.name.span, [Label(before, "first bound here")], name=name)
    value = infer(cx, line.value)
    if value is None or not expect(cx, (line.value, value), *NUMBERS):
        return None
    if value.type.dims:
        cx.error("E0215", line.value.span, [Label(line.value.span, str(value.type))], what="a metric", type=value.type)
        return None
    return Metric(name, value, line.span)


def keep(cx: Context, line: ast.Keep) -> Optional[Keep]:
    """`keep if C, refill=3`."""
    condition = infer(cx, line.condition)
    settings = keyword_settings(cx, "keep", line.keywords, {"refill": AT_LEAST_0})
    if condition is None or not expect(cx, (line.condition, condition), "bool"):
        return None
    ragged = cx.ragged(condition.type.dims)
    if ragged:
        label = Label(line.condition.span, str(condition.type))
        cx.error("E0205", line.condition.span, [label], dim=ragged[0])
        return None
    if not cx.roots(condition.type.dims):
        cx.error("E0223", line.condition.span, type=condition.type)
        return None
    return Keep(cx.keep + 1, condition, settings.get("refill", 0), line.span)


# ---- sections ---------------------------------------------------------------------------------------

def rollout(cx: Context, section: ast.Section) -> tuple[Context, list]:
    """The lines of `rollout:`, and the context after its last."""
    keyword_settings(cx, "rollout", section.keywords, {})
    body: list = []
    for line in section.body:
        if isinstance(line, ast.Bind):
            body.extend(bind(cx, line))
        elif isinstance(line, ast.Metric):
            body.append(metric(cx, line))
        elif isinstance(line, ast.Keep):
            body.append(keep(cx, line))
            cx = cx.at(keep=cx.keep + 1)
    return cx, [line for line in body if line is not None]


def update(cx: Context, section: ast.Section, index: int) -> Update:
    """An `update:`; `cx.changed` are the models that earlier updates train."""
    settings = keyword_settings(cx, "update", section.keywords, {"epochs": AT_LEAST_1, "minibatches": AT_LEAST_1})
    trained = trained_models(cx, section.body)
    cx = cx.at(trained=trained, changed=cx.changed | trained)
    body: list = []
    before: dict[str, ast.Span] = {}
    for line in section.body:
        if isinstance(line, ast.Bind):
            body.extend(bind(cx, line))
        elif isinstance(line, ast.Metric):
            body.append(metric(cx, line))
        elif isinstance(line, ast.Train):
            body.append(train(cx, line, before))
    if not any(isinstance(line, ast.Train) for line in section.body):
        cx.error("W0104", section.head_span)
    lines = tuple(line for line in body if line is not None)
    roots = roots_read(cx, needed(lines))
    minibatches = settings.get("minibatches", 1)
    _check_division(cx, section, minibatches, roots)
    return Update(index, settings.get("epochs", 1), minibatches, roots, lines, section.span)


def _check_division(cx: Context, section: ast.Section, minibatches: int, roots: tuple[str, ...]) -> None:
    place = next((k.value.span for k in section.keywords if k.name == "minibatches"), section.head_span)
    for root in roots:
        dim = cx.tables.dims[root]
        if dim.size % minibatches:
            cx.error("E0406", place, [Label(dim.span, f"`{root}` is {dim.size}")], minibatches=minibatches, dim=root,
                     size=dim.size)


def evaluation(cx: Context, section: ast.Section, index: int) -> Eval:
    """An `eval:` with its own data, responses and metrics."""
    settings = keyword_settings(cx, "eval", section.keywords, {"every": AT_LEAST_1})
    body: list = []
    for line in section.body:
        if isinstance(line, ast.Data):
            data(cx, line)
        elif isinstance(line, ast.Bind):
            body.extend(bind(cx, line))
        elif isinstance(line, ast.Metric):
            body.append(metric(cx, line))
    lines = tuple(line for line in body if line is not None)
    roots = roots_read(cx, (expr_of(line) for line in lines))
    return Eval(settings.get("every", 0), lines, roots, section.span)


def expr_of(line) -> Expr:
    return line.condition if isinstance(line, Keep) else line.objective if hasattr(line, "objective") else line.expr


def needed(lines: Iterable) -> Iterator[Expr]:
    """What an update computes whoever reads it: its lines but those that bind, and Python ops."""
    for line in lines:
        if isinstance(line, Bind):
            yield from (expr for expr in walk(line.expr) if expr.op == "pyop")
        else:
            yield expr_of(line)


def roots_read(cx: Context, exprs: Iterable[Expr]) -> tuple[str, ...]:
    """The root dims whose rows a section reads; those under a statistic of another section are not read again."""
    found: set[str] = set()
    seen: set[int] = set()
    stack = list(exprs)
    while stack:
        expr = stack.pop()
        if id(expr) in seen:
            continue
        seen.add(id(expr))
        found.update(cx.roots(expr.type.dims))
        if expr.attr("phase", "") in ("", cx.phase) or expr.op == "call":
            stack.extend(expr.args)
    return tuple(d.root for d in cx.tables.data if d.root in found)
