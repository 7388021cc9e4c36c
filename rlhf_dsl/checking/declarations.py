"""Dims, params and models."""

from __future__ import annotations

from typing import Any

from rlhf_dsl import ast
from rlhf_dsl.builtins import ROLES
from rlhf_dsl.checking import constants
from rlhf_dsl.checking.context import Context
from rlhf_dsl.checking.infer import infer
from rlhf_dsl.checking.optimizers import optimizer
from rlhf_dsl.checking.overrides import override
from rlhf_dsl.checking.scopes import Binding
from rlhf_dsl.diagnostics import Label, did_you_mean
from rlhf_dsl.typed import Dim, Model, Optimizer, Param, Schedule

LARGEST_DIM = 2 ** 31 - 1

# In place of a wrong size: the usual numbers divide it, so that one mistake gives one message.
_FAULTY_SIZE = 720_720

# In place of an optimizer with an error: the model counts as trained, so that one mistake gives one message.
_FAULTY = Optimizer(Schedule("constant", 0.0))


def dim(cx: Context, node: ast.Dim, roots: dict[str, ast.Span]) -> None:
    """`dim b = 64` or `dim t <= 32`."""
    cx.define(Binding("dim", node.name.id, node.name.span))
    size = override(cx, node.name.id, node.size.value, node.size.span)
    if size is not None and (not constants.is_count(size) or not 1 <= size <= LARGEST_DIM):
        cx.error("E0221", node.size.span, name=node.name.id, size=size)
        size = None
    name = node.name.id
    if name not in cx.tables.dims:
        cx.tables.dims[name] = Dim(name, size or _FAULTY_SIZE, node.ragged, name in roots, "", (), node.span)


def param(cx: Context, node: ast.Param) -> None:
    """`param eps = 0.2 in (0, 1)`: a constant of the dims and params above it."""
    name = node.name.id
    default = constants.constant(cx, node.default, infer(cx, node.default))
    cx.define(Binding("param", name, node.name.span))
    if default is None:
        return
    value = override(cx, name, default, node.default.span)
    if value is None or node.range is not None and not _in_range(cx, node, value):
        return
    cx.tables.params[name] = Param(name, value, node.span)


def _in_range(cx: Context, node: ast.Param, value: Any) -> bool:
    low, high = (constants.constant(cx, bound, infer(cx, bound)) for bound in (node.range.low, node.range.high))
    if low is None or high is None:
        return False
    if not all(map(constants.is_number, (low, high, value))) or low > high:
        reason = "its lower end is above its upper end" if constants.is_number(value) else "only a number has a range"
        cx.error("E0505", node.range.span, name=node.name.id, reason=reason)
        return False
    below = value <= low if node.range.low_open else value < low
    above = value >= high if node.range.high_open else value > high
    if below or above:
        written = f"{'(' if node.range.low_open else '['}{low}, {high}{')' if node.range.high_open else ']'}"
        overridden = node.name.id in cx.tables.overrides
        place = node.range.span if overridden else node.default.span
        labels = [Label(node.range.span, "by `-s`" if overridden else "the range")]
        cx.error("E0501", place, labels, name=node.name.id, value=value, range=written)
    return not (below or above)


def model(cx: Context, node: ast.Model) -> None:
    """`model actor = policy(base) trained by adamw(lr=1e-4)`."""
    name = node.name.id
    cx.define(Binding("model", name, node.name.span))
    source = constants.constant(cx, node.source, infer(cx, node.source))
    trained_by = None if node.optimizer is None else optimizer(cx, node.optimizer) or _FAULTY
    if node.role.id not in ROLES:
        cx.error("E0301", node.role.span, role=node.role.id, help=did_you_mean(node.role.id, ROLES))
        return
    if source is not None and (not isinstance(source, str) or not source):
        cx.error("E0307", node.source.span, name=name)
        return
    if name not in cx.tables.models:
        cx.tables.models[name] = Model(name, node.role.id, source or "", trained_by, node.span)
