"""Prints expressions: on one line, or broken inside brackets where they are too long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Union

from rlhf_dsl import ast
from rlhf_dsl.source import Source

WIDTH = 120
INDENT = "    "
_OR, _AND, _NOT, _COMPARE, _SUM, _PRODUCT, _UNARY, _POWER, _ATOM = range(9)
_LEVELS = {"or": _OR, "and": _AND, "+": _SUM, "-": _SUM, "*": _PRODUCT, "/": _PRODUCT, "**": _POWER}
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}


def format_expr(expr: ast.Expr) -> str:
    """The expression on one line, as `rlflowc fmt` prints it: `actor.logprobs(y)`."""
    return Printer().flat(expr)


@dataclass(frozen=True)
class Printer:
    """`source` keeps numbers as they were written (`1e-4`)."""

    source: Optional[Source] = None

    def flat(self, expr: ast.Expr, least: int = _OR) -> str:
        """On one line; in parentheses if it binds looser than `least`."""
        text = self._flat(expr)
        return f"({text})" if _level(expr) < least else text

    def _flat(self, expr: ast.Expr) -> str:
        match expr:
            case ast.Name(id=name):
                return name
            case ast.Number():
                return self._number(expr)
            case ast.Bool(value=value):
                return "true" if value else "false"
            case ast.String(value=value):
                return quote(value)
            case ast.List(items=items):
                return f"[{', '.join(map(self.flat, items))}]"
            case ast.Unary(op=op, operand=operand):
                return f"not {self.flat(operand, _NOT)}" if op == "not" else f"-{self.flat(operand, _UNARY)}"
            case ast.Binary(op=op, left=left, right=right):
                low, high = _sides(op)
                return f"{self.flat(left, low)} {op} {self.flat(right, high)}"
            case ast.Compare(operands=operands, ops=ops):
                first, *rest = (self.flat(operand, _SUM) for operand in operands)
                return first + "".join(f" {op} {operand}" for op, operand in zip(ops, rest))
            case ast.Attribute(value=value, attr=attr):
                return f"{self._owner(value)}.{attr}"
            case ast.Call():
                return f"{self._callee(expr)}({', '.join(self._arguments(expr))})"
        raise TypeError(f"not an expression: {expr!r}")

    def _number(self, expr: ast.Number) -> str:
        return self.source.slice(expr.span) if self.source else repr(expr.value)

    def _owner(self, value: ast.Expr) -> str:
        """Of an attribute; a number would swallow the dot."""
        text = self.flat(value, _ATOM)
        return f"({text})" if isinstance(value, ast.Number) else text

    def _callee(self, call: ast.Call) -> str:
        dims = f"[{names(call.subscript.dims)}]" if call.subscript else ""
        return self.flat(call.func, _ATOM) + dims

    def _arguments(self, call: ast.Call) -> list[str]:
        return [*map(self.flat, call.args), *map(self.keyword, call.keywords)]

    def keyword(self, keyword: ast.Keyword) -> str:
        return f"{keyword.name}={self.flat(keyword.value)}"

    # ---- several lines

    def fit(
        self, expr: ast.Expr, column: int, indent: int, after: int = 0, least: int = _OR, bare: bool = False,
    ) -> str:
        """The expression from `column` on, broken if it passes the width; broken parts stand one level below `indent`.

        after: columns of what follows on the last line
        bare: True inside brackets, where a line may end anywhere
        """
        flat = self.flat(expr, least)
        if column + len(flat) + after <= WIDTH:
            return flat
        if _level(expr) < least or (not bare and not _has_brackets(expr)):
            return self._bracketed("(", [(expr, "")], ")", indent, comma=False)
        match expr:
            case ast.Call():
                parts = [(a, "") for a in expr.args] + [(k.value, f"{k.name}=") for k in expr.keywords]
                return self._bracketed(f"{self._callee(expr)}(", parts, ")", indent) if parts else flat
            case ast.List(items=items) if items:
                return self._bracketed("[", [(item, "") for item in items], "]", indent)
            case ast.Binary() | ast.Compare():
                return self._chain(expr, column, indent, after)
            case ast.Unary(op=op, operand=operand):
                sign = "not " if op == "not" else "-"
                return sign + self.fit(operand, column + len(sign), indent, after, _level(expr), bare)
        return flat

    def _bracketed(self, opening: str, parts, closing: str, indent: int, comma: bool = True) -> str:
        """One part a line."""
        inner = indent + len(INDENT)
        lines = []
        for expr, prefix in parts:
            text = self.fit(expr, inner + len(prefix), inner, after=1, bare=not prefix)
            lines.append(f"{' ' * inner}{prefix}{text}{',' if comma else ''}")
        return "\n".join([opening, *lines, " " * indent + closing])

    def _chain(self, expr: Union[ast.Binary, ast.Compare], column: int, indent: int, after: int) -> str:
        """`a + b - c`, an operand a line, the operators in front. Only inside brackets."""
        (_, first, least), *rest = _operands(expr)
        lines = [self.fit(first, column, indent, least=least, bare=True)]
        for sign, operand, least in rest:
            text = self.fit(operand, indent + len(sign) + 1, indent, after, least, bare=True)
            lines.append(f"{' ' * indent}{sign} {text}")
        return "\n".join(lines)


def _operands(expr: Union[ast.Binary, ast.Compare]) -> list[tuple[str, ast.Expr, int]]:
    """(operator before it, operand, its loosest bare level) of a chain of operators of one level."""
    if isinstance(expr, ast.Compare):
        return [(op, operand, _SUM) for op, operand in zip(("", *expr.ops), expr.operands)]
    found = []
    low, high = _sides(expr.op)
    level = _level(expr)
    while isinstance(expr, ast.Binary) and _level(expr) == level:
        found.append((expr.op, expr.right, high))
        expr = expr.left
    return [("", expr, low), *reversed(found)]


def names(dims: tuple[ast.Name, ...]) -> str:
    return ", ".join(dim.id for dim in dims)


def quote(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(c, c) for c in text) + '"'


def _level(expr: ast.Expr) -> int:
    match expr:
        case ast.Binary(op=op):
            return _LEVELS[op]
        case ast.Unary(op=op):
            return _NOT if op == "not" else _UNARY
        case ast.Compare():
            return _COMPARE
    return _ATOM


def _sides(op: str) -> tuple[int, int]:
    """The loosest levels that stand bare to the left and to the right of an operator."""
    level = _LEVELS[op]
    return (_ATOM, _UNARY) if op == "**" else (level, level + 1)


def _has_brackets(expr: ast.Expr) -> bool:
    """Can a line end inside it without further brackets?"""
    if isinstance(expr, ast.Call):
        return bool(expr.args or expr.keywords)
    return isinstance(expr, ast.List) and bool(expr.items)
