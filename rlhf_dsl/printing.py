"""Expressions as text: trees of the syntax in canonical form, and calls of checked programs."""

from __future__ import annotations

import json

from rlhf_dsl import ast

# How tightly a form binds; an operand that binds less gets parentheses.
_LEVELS = {"or": 1, "and": 2, "not": 3, "compare": 4, "+": 5, "-": 5, "*": 6, "/": 6, "negative": 7, "**": 8}
_ATOM = 9


def expr_text(node: ast.Expr) -> str:
    """An expression in the canonical form: one space around binary operators, no needless parentheses."""
    return _print(node)[0]


def _print(node: ast.Expr) -> tuple[str, int]:
    """The text and how tightly it binds."""
    if isinstance(node, ast.Name):
        return node.id, _ATOM
    if isinstance(node, ast.Number):
        return repr(node.value), _ATOM
    if isinstance(node, ast.Bool):
        return str(node.value).lower(), _ATOM
    if isinstance(node, ast.String):
        return json.dumps(node.value, ensure_ascii=False), _ATOM
    if isinstance(node, ast.List):
        return f"[{', '.join(map(expr_text, node.items))}]", _ATOM
    if isinstance(node, ast.Attribute):
        return f"{_at_least(node.value, _ATOM)}.{node.attr}", _ATOM
    return _operators(node)


def _operators(node: ast.Expr) -> tuple[str, int]:
    if isinstance(node, ast.Call):
        return _call(node), _ATOM
    if isinstance(node, ast.Unary):
        level = _LEVELS["not" if node.op == "not" else "negative"]
        return f"{node.op}{' ' if node.op == 'not' else ''}{_at_least(node.operand, level)}", level
    if isinstance(node, ast.Compare):
        operands = [_at_least(x, _LEVELS["compare"] + 1) for x in node.operands]
        pairs = zip(node.ops, operands[1:])
        return " ".join([operands[0], *(f"{op} {x}" for op, x in pairs)]), _LEVELS["compare"]
    level = _LEVELS[node.op]
    power = node.op == "**"
    left = _at_least(node.left, _ATOM if power else level)
    right = _at_least(node.right, _LEVELS["negative"] if power else level + 1)
    return f"{left} {node.op} {right}", level


def _at_least(node: ast.Expr, level: int) -> str:
    text, binds = _print(node)
    return text if binds >= level else f"({text})"


def _call(node: ast.Call) -> str:
    dims = f"[{', '.join(d.id for d in node.subscript.dims)}]" if node.subscript else ""
    args = [*map(expr_text, node.args), *(f"{k.name}={expr_text(k.value)}" for k in node.keywords)]
    return f"{expr_text(node.func)}{dims}({', '.join(args)})"
