"""Making responses: `y[b, t] = actor.generate(prompts)` and `y[b, t] = reply(prompts, texts)`."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Optional

from rlhf_dsl import ast
from rlhf_dsl.builtins import BUILTINS, OPERATIONS
from rlhf_dsl.checking import constants
from rlhf_dsl.checking.calls import Infer, known_keywords, model_of
from rlhf_dsl.checking.constants import is_count, is_number
from rlhf_dsl.checking.context import Context, Response
from rlhf_dsl.checking.names import lookup
from rlhf_dsl.diagnostics import Label
from rlhf_dsl.typed import Expr, Type

# option -> (default, rule, test); the default of max_tokens is the bound of the ragged dim
OPTIONS: dict[str, tuple[Any, str, Callable[[Any], bool]]] = {
    "temperature": (1.0, "a number of at least 0", lambda v: is_number(v) and v >= 0),
    "top_k": (0, "a whole number of at least 1", lambda v: is_count(v) and v >= 1),
    "top_p": (1.0, "a number in (0, 1]", lambda v: is_number(v) and 0 < v <= 1),
    "stop": ((), "a list of texts", lambda v: isinstance(v, tuple) and all(isinstance(s, str) and s for s in v)),
    "min_tokens": (0, "a whole number of at least 0", lambda v: is_count(v) and v >= 0),
    "max_tokens": (0, "a whole number of at least 1", lambda v: is_count(v) and v >= 1),
}
TURNS = ("env", "turns")


def makes_response(cx: Context, node: ast.Expr) -> bool:
    """Whether an expression is a call that makes a response."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id == "reply"
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "generate":
        return False
    found = cx.scope.find(node.func.value.id) if isinstance(node.func.value, ast.Name) else None
    return found is not None and found.kind == "model"


def make_response(cx: Context, target: ast.Target, node: ast.Call, infer: Infer) -> Optional[Expr]:
    """The response that a line binds; introduces its ragged dim and its group dims."""
    if not allowed_here(cx, node):
        return None
    dims = _target_dims(cx, target, node)
    is_reply = isinstance(node.func, ast.Name)
    made = _reply(cx, node, infer) if is_reply else _generate(cx, node, infer)
    if dims is None or made is None:
        return None
    model, args, attrs = made
    ragged = dims[-1]
    if not _dims_fit(cx, target, dims[:-1], args, is_reply):
        return None
    if not is_reply:
        attrs = _bounded(cx, node, attrs, cx.tables.dims[ragged].size)
    name = target.name.id
    expr = cx.expr("reply" if is_reply else "generate", [e for _, e in args], Type("tokens", dims), node, name=name,
                   keep=cx.keep, **attrs)
    introduce(cx, Response(name, expr.op, model, expr, target.span), ragged, dims[:-1])
    return expr


def introduce(cx: Context, response: Response, ragged: str, lead: tuple[str, ...]) -> None:
    """From now on `ragged` is the dim of this response's tokens."""
    cx.tables.responses[ragged] = response
    dim = cx.tables.dims[ragged]
    cx.tables.dims[ragged] = dataclasses.replace(dim, response=response.name, lead=lead)


def allowed_here(cx: Context, node: ast.Call) -> bool:
    name = "reply" if isinstance(node.func, ast.Name) else "generate"
    if cx.phase.startswith("update"):
        cx.error("E0405", node.span, name=name)
        return False
    if cx.frames or cx.state or cx.phase == "declaration":
        cx.error("E0305", node.span, name=name)
        return False
    return True


def _target_dims(cx: Context, target: ast.Target, node: ast.Call) -> Optional[tuple[str, ...]]:
    name = target.name.id
    if target.dims is None:
        cx.error("E0208", target.span, name=name)
        return None
    found = [cx.dim(d) for d in target.dims]
    if None in found:
        return None
    dims = cx.order(found)
    ragged = cx.ragged(dims)
    if len(ragged) != 1 or len(dims) != len(found):
        number = f"{len(ragged)} are" if ragged else "none is"
        reason = "a dim stands twice" if len(dims) != len(found) else f"of its dims one is ragged, here {number}"
        cx.error("E0209", target.span, name=name, reason=reason)
        return None
    owner = cx.tables.responses.get(ragged[0])
    if owner is not None:
        cx.error("E0206", target.span, [Label(owner.span, f"`{ragged[0]}` is the length of `{owner.name}`")],
                 dim=ragged[0], response=owner.name)
        return None
    return dims


def _dims_fit(cx: Context, target: ast.Target, lead: tuple[str, ...], args: list, is_reply: bool) -> bool:
    """The leading dims are those of the arguments and, for `generate`, any group dims."""
    given = {d for _, e in args for d in e.type.dims}
    labels = [Label(node.span, str(e.type)) for node, e in args]
    missing = cx.order(given - set(lead))
    extra = cx.order(set(lead) - given)
    reason = ""
    if missing:
        reason = f"`{missing[0]}` of what it is made from is missing"
    elif not cx.roots(lead):
        reason = "what it is made from has no root dim"
    elif is_reply and extra:
        reason = f"`{extra[0]}` is no dim of what it is made from"
    elif cx.roots(extra):
        reason = f"`{cx.roots(extra)[0]}` counts rows of other data and cannot be a group"
    if reason:
        cx.error("E0209", target.span, labels, name=target.name.id, reason=reason)
    return not reason


def _texts(cx: Context, node: ast.Call, count: int, name: str, infer: Infer) -> Optional[list]:
    if len(node.args) != count:
        signature = next(known.signature for known in (*OPERATIONS, *BUILTINS.values()) if known.name == name)
        cx.error("E0109", node.span, name=name, expected=f"{count} argument{'s' * (count > 1)}", given=len(node.args),
                 help=f"it is `{signature}`")
        return None
    args = [(arg, infer(cx, arg)) for arg in node.args]
    if any(e is None for _, e in args):
        return None
    wrong = [(arg, e) for arg, e in args if e.type.elem != "text"]
    for arg, expr in wrong:
        help = "`y.text` is the text of a response" if expr.type.elem == "tokens" else ""
        cx.error("E0211", arg.span, wanted="text", found=expr.type, help=help)
    return None if wrong else args


def _reply(cx: Context, node: ast.Call, infer: Infer):
    args = _texts(cx, node, 2, "reply", infer)
    if args is None or not known_keywords(cx, node, "reply", ()):
        return None
    return "", args, {}


def _generate(cx: Context, node: ast.Call, infer: Infer):
    model = model_of(cx, node.func)
    args = _texts(cx, node, 1, "generate", infer)
    if node.subscript is not None:
        cx.error("E0114", node.subscript.span, name="generate")
    if model is None or args is None or not known_keywords(cx, node, "generate", (*OPTIONS, *TURNS)):
        return None
    attrs = {name: default for name, (default, _, _) in OPTIONS.items()}
    for keyword in node.keywords:
        attrs[keyword.name] = (_turns if keyword.name in TURNS else _option)(cx, keyword, infer)
    if None in attrs.values():
        return None
    given = [k for k in node.keywords if k.name in TURNS]
    if len(given) == 1:
        rule = "given together: `env=op, turns=N`"
        cx.error("E0308", given[0].name_span, option=given[0].name, rule=rule, value="alone")
        return None
    return model.name, args, {**attrs, "model": model.name}


def _option(cx: Context, keyword: ast.Keyword, infer: Infer) -> Any:
    _, rule, test = OPTIONS[keyword.name]
    if isinstance(keyword.value, ast.List):
        value = tuple(constants.constant(cx, item, infer(cx, item)) for item in keyword.value.items)
    else:
        value = constants.constant(cx, keyword.value, infer(cx, keyword.value))
    if value is None:
        return None
    if not test(value):
        cx.error("E0308", keyword.value.span, option=keyword.name, rule=rule, value=value)
        return None
    return float(value) if keyword.name in ("temperature", "top_p") else value


def _turns(cx: Context, keyword: ast.Keyword, infer: Infer) -> Any:
    """`env=op, turns=N`: the op answers each turn."""
    if keyword.name == "turns":
        value = constants.constant(cx, keyword.value, infer(cx, keyword.value))
        if value is not None and not (is_count(value) and value >= 1):
            cx.error("E0308", keyword.value.span, option="turns", rule="a whole number of at least 1", value=value)
            return None
        return value
    if not isinstance(keyword.value, ast.Name):
        cx.error("E0308", keyword.value.span, option="env", rule="the name of a Python op", value="an expression")
        return None
    found = lookup(cx, keyword.value, "op")
    return None if found is None else found.name


def _bounded(cx: Context, node: ast.Call, attrs: dict, bound: int) -> dict:
    """`max_tokens` is at most the bound of the ragged dim, `min_tokens` at most `max_tokens`."""
    most = attrs["max_tokens"] or bound
    for option, value, limit in (("max_tokens", most, bound), ("min_tokens", attrs["min_tokens"], most)):
        if value > limit:
            span = next((k.value.span for k in node.keywords if k.name == option), node.span)
            cx.error("E0308", span, option=option, rule=f"at most {limit}", value=value)
    return {**attrs, "max_tokens": min(most, bound)}
