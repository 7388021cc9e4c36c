"""What a name means as a value, and what to say when it means nothing."""

from __future__ import annotations

from typing import Optional

from rlhf_dsl import ast
from rlhf_dsl.builtins import BUILTINS, ROLES
from rlhf_dsl.checking.context import Context
from rlhf_dsl.checking.scopes import KIND_WORDS, Binding
from rlhf_dsl.diagnostics import Label, closest, did_you_mean
from rlhf_dsl.typed import Expr

FEW = 8  # so many alternatives can be listed
VALUES = ("value", "dim", "param", "state", "column")


def lookup(cx: Context, name: ast.Name, *kinds: str) -> Optional[Binding]:
    """The binding of a name, of any of `kinds` if given; reports what is wrong otherwise."""
    found = cx.scope.find(name.id)
    if found is None:
        _report_unknown(cx, name, kinds or VALUES)
        return None
    found.used = True
    if kinds and found.kind not in kinds:
        wanted = "a value" if kinds == VALUES else " or ".join(KIND_WORDS[k] for k in kinds)
        cx.error("E0105", name.span, [Label(found.span, "bound here")] if cx.frames == () and found.span.end else (),
                 name=name.id, kind=KIND_WORDS[found.kind], wanted=wanted,
                 help=_instead(cx, found, name.id, kinds))
        return None
    return found


def _instead(cx: Context, found: Binding, name: str, kinds: tuple[str, ...]) -> Optional[str]:
    """What can stand where a name of another kind does, in the words of the program; None for the table's help."""
    if kinds == ("model",):
        return did_you_mean(name, cx.scope.visible(*kinds))
    if found.kind in ("fn", "op"):
        return f"call it: `{name}(...)`"
    model = cx.tables.models.get(name) if found.kind == "model" else None
    operation = next((op for op in ROLES[model.role].values() if op.per != "sample"), None) if model else None
    return f"call one of its operations, such as `{name}.{operation.name}(y)`" if operation else None


def _report_unknown(cx: Context, name: ast.Name, kinds: tuple[str, ...]) -> None:
    later = cx.scope.find_later(name.id)
    if later is not None:
        cx.error("E0102", name.span, [Label(later, "bound here")], name=name.id)
        return
    elsewhere = cx.scope.find_elsewhere(name.id)
    if elsewhere is not None:
        span, section = elsewhere
        cx.error("E0107", name.span, [Label(span, f"bound here, in `{section}`")], name=name.id)
        return
    near = closest(name.id, [*cx.scope.visible(), *BUILTINS])
    candidates = cx.scope.visible(*kinds)
    listed = did_you_mean(name.id, candidates) if len(candidates) <= FEW else ""
    cx.error("E0101", name.span, name=name.id, help=f"did you mean `{near}`?" if near else listed or None)


def infer_name(cx: Context, name: ast.Name) -> Optional[Expr]:
    """A name used as a value. A dim is its size, a param its value."""
    if name.id in cx.dim_vars and name.id not in cx.scope.names:
        return cx.const(cx.tables.dims[cx.dim_vars[name.id]].size, name)
    if name.id in BUILTINS and cx.scope.find(name.id) is None:
        help = f"call it: `{BUILTINS[name.id].signature}`"
        cx.error("E0105", name.span, name=name.id, kind="a function", wanted="a value", help=help)
        return None
    found = lookup(cx, name, *VALUES)
    return None if found is None else value_of(cx, found, name)


def value_of(cx: Context, found: Binding, node: ast.Name) -> Optional[Expr]:
    if found.kind == "value":
        return found.payload
    if found.kind in ("dim", "param"):
        table = cx.tables.dims if found.kind == "dim" else cx.tables.params
        entry = table.get(found.name)
        return None if entry is None else cx.const(entry.size if found.kind == "dim" else entry.value, node)
    if cx.phase == "declaration":
        cx.error("E0504", node.span)
        return None
    if found.kind == "column":
        return _column(cx, found, node)
    type = cx.tables.state_types.get(found.name)
    return None if type is None else cx.expr("state", (), type, node, name=found.name)


def _column(cx: Context, found: Binding, node: ast.Name) -> Optional[Expr]:
    column = cx.tables.columns.get(found.name)
    return None if column is None else cx.expr("data", (), column.type, node, column=column.name)


def next_of_state(cx: Context, node: ast.Call) -> Optional[Expr]:
    """`next(x)`: what the state will be in the next iteration."""
    name = node.args[0]
    found = cx.scope.find(name.id) if isinstance(name, ast.Name) else None
    if found is None or found.kind != "state":
        cx.error("E0212", node.span, name="next", wanted="one ragged dim, or a state in parentheses", found="none")
        return None
    found.used = True
    if cx.phase == "declaration":
        cx.error("E0504", node.span)
        return None
    if cx.phase.startswith("eval") or cx.phase == "rollout" and not cx.state and cx.keep < cx.last_keep:
        below = "a `keep` below decides what it is made from"
        reason = "an evaluation changes no state" if cx.phase.startswith("eval") else below
        cx.error("E0408", node.span, [Label(found.span, "the state")], name=found.name, reason=reason)
        return None
    type = cx.tables.state_types.get(found.name)
    return None if type is None else cx.expr("next_state", (), type, node, name=found.name)
