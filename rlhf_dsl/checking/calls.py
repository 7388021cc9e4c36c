"""Calls of models on a response, and the fields of a response."""

from __future__ import annotations

from typing import Callable, Optional

from rlhf_dsl import ast
from rlhf_dsl.builtins import FIELDS, OPERATIONS, ROLES, TEMPERED
from rlhf_dsl.checking import constants
from rlhf_dsl.checking.context import Context
from rlhf_dsl.checking.names import lookup
from rlhf_dsl.diagnostics import Label, did_you_mean, listing
from rlhf_dsl.typed import Expr, Model, Type

Infer = Callable[[Context, ast.Expr], Optional[Expr]]
RESPONSES = ("generate", "reply", "data")


def model_of(cx: Context, callee: ast.Attribute) -> Optional[Model]:
    """The model before the dot, whose role must know the operation after it."""
    if not isinstance(callee.value, ast.Name):
        cx.error("E0106", callee.span, name=callee.attr)
        return None
    found = lookup(cx, callee.value, "model")
    model = None if found is None else cx.tables.models.get(found.name)
    if model is None:
        return None
    operations = ROLES[model.role]
    if callee.attr not in operations:
        other = next((role for role, table in ROLES.items() if callee.attr in table), None)
        alternatives = f"a {model.role} can {listing(operations)}; `{callee.attr}` needs a {other}"
        help = alternatives if other else did_you_mean(callee.attr, operations)
        cx.error("E0302", callee.attr_span, [Label(model.span, f"`{model.name}` is a {model.role}")], help=help,
                 role=model.role, operation=callee.attr)
        return None
    return model


def model_call(cx: Context, node: ast.Call, model: Model, infer: Infer) -> Optional[Expr]:
    """`actor.logprobs(y)`: one number a response or a token."""
    operation = ROLES[model.role][node.func.attr]
    name = f"{model.name}.{operation.name}"
    if not _well_formed(cx, node, name, ("temperature",) if operation.name in TEMPERED else ()):
        return None
    temperature = _temperature(cx, node, infer)
    response = infer(cx, node.args[0])
    if response is None or not is_response(cx, node.args[0], response):
        return None
    cx.tables.users.setdefault(id(response), []).append((model, operation.name, cx.span(node), response))
    dims = response.type.dims if operation.per == "token" else response.type.dims[:-1]
    phase = _phase(cx, model, operation.name, response, temperature)
    grad = frozenset({model.name} & cx.trained)
    return cx.tables.interner.expr(
        "call", (response,), Type("f32", dims), grad, cx.span(node),
        model=model.name, operation=operation.name, phase=phase, temperature=temperature, keep=cx.keep)


def _phase(cx: Context, model: Model, operation: str, response: Expr, temperature: Optional[float]) -> str:
    """Which weights: a model that no update so far has trained gives what its first equal call gave."""
    if model.name in cx.changed or cx.phase.startswith("eval"):
        return cx.phase
    return cx.tables.calls.setdefault((model.name, operation, id(response), temperature, cx.keep), cx.phase)


def _well_formed(cx: Context, node: ast.Call, name: str, keywords: tuple[str, ...]) -> bool:
    if node.subscript is not None:
        cx.error("E0114", node.subscript.span, name=name)
        return False
    if len(node.args) != 1:
        signature = next(op.signature for op in OPERATIONS if op.name == name.rpartition(".")[2])
        help = f"it is `{signature}`"
        cx.error("E0109", node.span, name=name, expected="1 argument", given=len(node.args), help=help)
        return False
    return known_keywords(cx, node, name, keywords)


def known_keywords(cx: Context, node: ast.Call, name: str, allowed) -> bool:
    """Whether a call's keywords are among those allowed, each once; reports each that is not."""
    good, seen = True, set()
    for keyword in node.keywords:
        if keyword.name not in allowed or keyword.name in seen:
            help = did_you_mean(keyword.name, allowed) if keyword.name not in allowed else "give it once"
            cx.error("E0110", keyword.name_span, name=name, keyword=keyword.name, help=help or "it takes none")
            good = False
        seen.add(keyword.name)
    return good


def _temperature(cx: Context, node: ast.Call, infer: Infer) -> Optional[float]:
    for keyword in node.keywords:
        value = constants.constant(cx, keyword.value, infer(cx, keyword.value))
        if value is not None and (not constants.is_number(value) or value < 0):
            cx.error("E0308", keyword.value.span, option="temperature", rule="a number of at least 0", value=value)
            return None
        return None if value is None else float(value)
    return None


def is_response(cx: Context, node: ast.Expr, expr: Expr) -> bool:
    """Whether a value is a response; reports if not."""
    if expr.op in RESPONSES and expr.type.elem == "tokens":
        return True
    cx.error("E0303", node.span, found=expr.type)
    return False


def field(cx: Context, node: ast.Attribute, response: Expr) -> Optional[Expr]:
    """`y.logprobs`, `y.truncated`, `y.text`."""
    if response.type.elem != "tokens":
        cx.error("E0303", node.value.span, found=response.type)
        return None
    if node.attr not in FIELDS:
        cx.error("E0113", node.attr_span, field=node.attr, help=did_you_mean(node.attr, FIELDS))
        return None
    if node.attr == "logprobs" and response.op != "generate":
        cx.error("E0304", node.attr_span)
        return None
    lead = response.type.dims[:-1]
    type = {"logprobs": Type("f32", response.type.dims), "truncated": Type("bool", lead), "text": Type("text", lead)}
    return cx.expr("field", (response,), type[node.attr], node, field=node.attr)
