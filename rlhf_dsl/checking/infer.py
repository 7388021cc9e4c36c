"""The type of every expression, and its form in primitives. None stands for one whose error is already reported."""

from __future__ import annotations

from typing import Callable, Optional

from rlhf_dsl import ast
from rlhf_dsl.builtins import BUILTINS, Builtin
from rlhf_dsl.checking import calls, constants, functions
from rlhf_dsl.checking.broadcast import Operand, choose, elementwise, expect, logical
from rlhf_dsl.checking.context import Context
from rlhf_dsl.checking.names import infer_name, lookup, next_of_state
from rlhf_dsl.checking.python_ops import call_op
from rlhf_dsl.checking.reductions import along, over_dims, reduce
from rlhf_dsl.checking.responses import allowed_here, makes_response
from rlhf_dsl.checking.scopes import Binding
from rlhf_dsl.typed import Expr

ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "/": "div", "**": "pow"}
COMPARISONS = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}


def infer(cx: Context, node: ast.Expr) -> Optional[Expr]:
    """An expression in primitives, or None with at least one report."""
    return _FORMS[type(node)](cx, node)


def infer_several(cx: Context, node: ast.Expr) -> list[Optional[Expr]]:
    """The values of the right side of a binding: several only of a function that returns several."""
    fn = _function(cx, node)
    return [infer(cx, node)] if fn is None else functions.expand(cx, node, fn, infer, bind_local)


def bind_local(cx: Context, line: ast.Bind) -> None:
    """A binding in the body of a function."""
    values = infer_several(cx, line.value)
    if len(values) != len(line.targets):
        report_count(cx, line, len(values))
        values = [None] * len(line.targets)
    for target, value in zip(line.targets, values):
        name = target.name.id
        if name in cx.scope.names:
            cx.error("E0103", target.span, name=name)
        check_annotation(cx, target, value)
        cx.scope.names[name] = Binding("value", name, target.span, value)


def report_count(cx: Context, line: ast.Bind, given: int) -> None:
    cx.error("E0111", line.span, given=f"{given} value{'s' * (given != 1)}",
             names=f"{len(line.targets)} name{'s' * (len(line.targets) != 1)}")


def check_annotation(cx: Context, target: ast.Target, value: Optional[Expr]) -> None:
    """`r[b, g] = ...` says which dims the value has."""
    dims = [cx.dim(d) for d in target.dims or ()]
    if target.dims is None or value is None or None in dims or set(dims) == set(value.type.dims):
        return
    written = f"{target.name.id}[{', '.join(dims)}]"
    cx.error("E0204", target.span, written=written, type=value.type)


def _function(cx: Context, node: ast.Expr) -> Optional[functions.Function]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    found = cx.scope.find(node.func.id)
    if found is None or found.kind != "fn":
        return None
    found.used = True
    return found.payload


# ---- leaves and operators ---------------------------------------------------------------------------

def _literal(cx: Context, node) -> Expr:
    return cx.const(node.value, node)


def _list(cx: Context, node: ast.List) -> None:
    cx.error("E0112", node.span)


def _operands(cx: Context, nodes) -> Optional[list[Operand]]:
    values = [(node, infer(cx, node)) for node in nodes]
    return None if any(v is None for _, v in values) else values


def _unary(cx: Context, node: ast.Unary) -> Optional[Expr]:
    operands = _operands(cx, [node.operand])
    if operands is None:
        return None
    return logical(cx, "not", operands, node) if node.op == "not" else elementwise(cx, "neg", operands, node)


def _binary(cx: Context, node: ast.Binary) -> Optional[Expr]:
    operands = _operands(cx, [node.left, node.right])
    if operands is None:
        return None
    if node.op in ("and", "or"):
        return logical(cx, node.op, operands, node)
    return elementwise(cx, ARITHMETIC[node.op], operands, node)


def _compare(cx: Context, node: ast.Compare) -> Optional[Expr]:
    """`a < b <= c` is `a < b and b <= c`."""
    operands = _operands(cx, node.operands)
    if operands is None:
        return None
    result: Optional[Operand] = None
    for op, left, right in zip(node.ops, operands, operands[1:]):
        link = elementwise(cx, COMPARISONS[op], [left, right], node, "bool")
        if link is None:
            return None
        result = (node, link if result is None else logical(cx, "and", [result, (node, link)], node))
        if result[1] is None:
            return None
    return result[1]


def _attribute(cx: Context, node: ast.Attribute) -> Optional[Expr]:
    if isinstance(node.value, ast.Name):
        found = cx.scope.find(node.value.id)
        if found is not None and found.kind == "model":
            found.used = True
            cx.error("E0115", node.span, call=f"{node.value.id}.{node.attr}")
            return None
    response = infer(cx, node.value)
    return None if response is None else calls.field(cx, node, response)


# ---- calls ------------------------------------------------------------------------------------------

def _call(cx: Context, node: ast.Call) -> Optional[Expr]:
    if makes_response(cx, node):
        if allowed_here(cx, node):
            cx.error("E0305", node.span, name=node.func.attr if isinstance(node.func, ast.Attribute) else "reply")
        return None
    if isinstance(node.func, ast.Attribute):
        model = calls.model_of(cx, node.func)
        return None if model is None else calls.model_call(cx, node, model, infer)
    if node.func.id in BUILTINS and cx.scope.find(node.func.id) is None:
        return _builtin(cx, node, BUILTINS[node.func.id])
    return _named(cx, node)


def _named(cx: Context, node: ast.Call) -> Optional[Expr]:
    """A call of a function or a Python op."""
    found = cx.scope.find(node.func.id)
    if found is not None and found.kind not in ("fn", "op"):
        found.used = True
        help = f"`{node.func.id}` hides the function of the prelude" if cx.tables.prelude.find(node.func.id) else None
        cx.error("E0106", node.func.span, name=node.func.id, help=help)
        return None
    found = lookup(cx, node.func, "fn", "op")
    if found is None:
        for value in (*node.args, *(k.value for k in node.keywords)):
            infer(cx, value)
        return None
    if found.kind == "op":
        op = cx.tables.ops.get(found.name)
        return None if op is None else call_op(cx, node, op, infer)
    values = functions.expand(cx, node, found.payload, infer, bind_local)
    if len(values) != 1:
        cx.error("E0111", node.span, given=f"{len(values)} values", names="1 is used")
        return None
    return values[0]


def _builtin(cx: Context, node: ast.Call, builtin: Builtin) -> Optional[Expr]:
    if builtin.kind == "ragged" and _names_state(cx, node):
        return next_of_state(cx, node)
    several = builtin.kind == "choice" and len(node.args) > 1
    if several and (node.subscript is not None or node.keywords):
        cx.error("E0214", node.span, name=builtin.name)
        return None
    reduces = builtin.kind in ("reduction", "choice") and not several
    allowed = ("where", "unbiased") if builtin.name == "std" else ("where",) if reduces else ()
    if not calls.known_keywords(cx, node, builtin.name, allowed):
        return None
    least, most = builtin.arity
    if len(node.args) < least or 0 <= most < len(node.args):
        expected = f"{least} argument{'s' * (least != 1)}"
        cx.error("E0109", node.span, name=builtin.name, expected=expected, given=len(node.args),
                 help=f"it is `{builtin.signature}`")
        return None
    operands = _operands(cx, node.args)
    if operands is None:
        return None
    if reduces:
        return _reduction(cx, node, builtin, operands)
    if builtin.kind == "ragged":
        return along(cx, builtin.name, operands, node)
    return _pointwise(cx, node, builtin, operands)


def _names_state(cx: Context, node: ast.Call) -> bool:
    """`next(x)` without dims, where `x` is one name: the new value of a state."""
    return node.func.id == "next" and node.subscript is None and len(node.args) == 1


def _pointwise(cx: Context, node: ast.Call, builtin: Builtin, operands: list[Operand]) -> Optional[Expr]:
    if node.subscript is not None:
        cx.error("E0114", node.subscript.span, name=builtin.name)
        return None
    if builtin.name == "where":
        return choose(cx, operands, node)
    if builtin.name == "stop":
        _, x = operands[0]
        return cx.expr("stop", [x], x.type, node) if expect(cx, operands[0], "f32", "bool") else None
    op = {"min": "minimum", "max": "maximum"}.get(builtin.name, builtin.name)
    return elementwise(cx, op, operands, node)


def _reduction(cx: Context, node: ast.Call, builtin: Builtin, operands: list[Operand]) -> Optional[Expr]:
    over = None
    if node.subscript is not None:
        over = over_dims(cx, node.subscript)
        if over is None:
            return None
    keywords = {k.name: k.value for k in node.keywords}
    where, attrs = None, {}
    if "where" in keywords:
        where = (keywords["where"], infer(cx, keywords["where"]))
        if where[1] is None:
            return None
    if builtin.name == "std":
        unbiased = _unbiased(cx, keywords.get("unbiased"))
        if unbiased is None:
            return None
        attrs["unbiased"] = unbiased
    quantile = operands[1] if builtin.name == "quantile" else None
    if quantile and not _is_fraction(cx, quantile):
        return None
    return reduce(cx, builtin.name, operands[0], over, node, where, quantile, **attrs)


def _unbiased(cx: Context, node: Optional[ast.Expr]) -> Optional[bool]:
    if node is None:
        return True
    value = constants.constant(cx, node, infer(cx, node))
    if value is not None and not isinstance(value, bool):
        cx.error("E0211", node.span, wanted="`true` or `false`", found=repr(value), help="")
        return None
    return value


def _is_fraction(cx: Context, quantile: Operand) -> bool:
    node, expr = quantile
    if expr.type.dims or expr.type.elem != "f32":
        cx.error("E0215", node.span, what="the second argument of `quantile`", type=expr.type)
        return False
    return True


_FORMS: dict[type, Callable[[Context, ast.Expr], Optional[Expr]]] = {
    ast.Name: infer_name, ast.Number: _literal, ast.Bool: _literal, ast.String: _literal, ast.List: _list,
    ast.Unary: _unary, ast.Binary: _binary, ast.Compare: _compare, ast.Attribute: _attribute, ast.Call: _call,
}
