"""Makes the syntax tree out of Lark's: one method a rule of the grammar, called from the leaves up."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from typing import Iterable, Optional, Union

from lark import Token, Tree, v_args
from lark.tree import Meta
from lark.visitors import Transformer_NonRecursive

from rlhf_dsl import ast
from rlhf_dsl.ast import Span
from rlhf_dsl.diagnostics import Diagnostics, Label, listing

RESERVED = frozenset({"and", "or", "not", "true", "false"})
PYTHON_VALUES = {"True": "write `true`", "False": "write `false`", "None": "leave the argument out"}
MAX_DEPTH = 100

STATEMENTS = {
    "rollout": (ast.Bind, ast.Metric, ast.Keep),
    "update": (ast.Bind, ast.Metric, ast.Train),
    "eval": (ast.Data, ast.Bind, ast.Metric),
    "plan": (ast.Constraint,),
    "run": (ast.Setting, ast.Every),
}
WORDS = {
    ast.Bind: "a binding", ast.Metric: "`metric`", ast.Keep: "`keep`", ast.Train: "`train`", ast.Data: "`data`",
    ast.Constraint: "a constraint", ast.Setting: "a setting `name = value`", ast.Every: "`every`",
}
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", '"': '"', "'": "'", "\n": ""}


def build(tree: Tree, sink: Diagnostics) -> ast.Program:
    """The program of a parse; faults that the grammar lets through go to the sink."""
    program = _Builder(sink).transform(tree)
    _check_depth(program, sink)
    return program


def _span(meta: Meta) -> Span:
    return Span(meta.start_pos, meta.end_pos)


def _of(token: Token) -> Span:
    return Span(token.start_pos, token.end_pos)


def _unescape(text: str) -> str:
    """Backslashes as in Python, an unknown one stays."""
    return re.sub(r"\\(.|\n)", lambda m: _ESCAPES.get(m[1], m[0]), text)


@v_args(meta=True, inline=True)
class _Builder(Transformer_NonRecursive):
    """Each method takes the rule's position and its children, already built; None stands for an absent part."""

    def __init__(self, sink: Diagnostics):
        super().__init__()
        self._sink = sink

    def program(self, meta, doc: Optional[str], *items) -> ast.Program:
        return ast.Program(doc or "", items)

    def doc(self, meta, token: Token) -> str:
        quotes = 3 if token.startswith('"""') else 1
        return inspect.cleandoc(_unescape(token[quotes:-quotes]))

    # ---- declarations

    def dim(self, meta, name, relation: Token, size) -> ast.Dim:
        return ast.Dim(name, relation == "<=", size, _span(meta))

    def param(self, meta, name, default, range_) -> ast.Param:
        return ast.Param(name, default, range_, _span(meta))

    def range(self, meta, opening: Token, low, high, closing: Token) -> ast.Range:
        return ast.Range(low, high, opening == "(", closing == ")", _span(meta))

    def state(self, meta, name, init, next_) -> ast.State:
        return ast.State(name, init, next_, _span(meta))

    def data(self, meta, *parts) -> ast.Data:
        *columns, after, source = (part for part in parts if not isinstance(part, Token))
        return ast.Data(tuple(columns), after, source, _span(meta))

    def column(self, meta, name, dims: ast.Subscript, elem: Optional[ast.Name]) -> ast.Column:
        return ast.Column(name, dims.dims, elem.id if elem else "", _span(meta))

    def model(self, meta, name, role, source, optimizer) -> ast.Model:
        return ast.Model(name, role, source, optimizer, _span(meta))

    def import_(self, meta, module: str, *names) -> ast.Import:
        return ast.Import(module, names, _span(meta))

    def module(self, meta, *parts: Token) -> str:
        return ".".join(parts)

    def fn(self, meta, name, formals, doc, *rest) -> ast.Fn:
        *body, returns = rest
        span = Span(meta.start_pos, returns[-1].span.end)
        return ast.Fn(name, formals or (), tuple(body), returns, doc or "", span)

    def formals(self, meta, *formals) -> tuple:
        return tuple(f for f in formals if f is not None)

    def formal(self, meta, name, dims: Optional[ast.Subscript]) -> ast.Formal:
        return ast.Formal(name, dims.dims if dims else None, _span(meta))

    def return_(self, meta, *values) -> tuple:
        return values

    # ---- sections

    def section(self, meta, head, *body) -> ast.Section:
        kind, arguments, head_span = head
        _, keywords = self._split(arguments, positional=False)
        if kind == "run":
            body = tuple(self._setting(s) if isinstance(s, ast.Bind) else s for s in body)
        for statement in body:
            self._check_place(statement, kind)
        return ast.Section(kind, keywords, body, head_span, Span(meta.start_pos, body[-1].span.end))

    def section_head(self, meta, kind: Token, arguments) -> tuple:
        return str(kind), arguments or (), _span(meta)

    def _setting(self, bind: ast.Bind) -> Union[ast.Bind, ast.Setting]:
        target = bind.targets[0]
        if len(bind.targets) > 1 or target.dims is not None:
            return bind
        return ast.Setting(target.name, bind.value, bind.span)

    def _check_place(self, statement, section: str) -> None:
        if isinstance(statement, STATEMENTS[section]):
            return
        homes = listing((f"{name}:" for name, kinds in STATEMENTS.items() if isinstance(statement, kinds)), "or")
        allowed = f"it belongs in {homes}; `{section}:` takes {_takes(section)}"
        what = WORDS[type(statement)]
        self._sink.error("E0025", statement.span, what=what, where=f"in `{section}:`", allowed=allowed)

    def bind(self, meta, *parts) -> ast.Bind:
        *targets, value = parts
        return ast.Bind(tuple(targets), value, _span(meta))

    def target(self, meta, name, dims: Optional[ast.Subscript]) -> ast.Target:
        return ast.Target(name, dims.dims if dims else None, _span(meta))

    def metric(self, meta, word, name, value) -> ast.Metric:
        return ast.Metric(name, value, _span(meta))

    def keep(self, meta, word, condition, *keywords) -> ast.Keep:
        return ast.Keep(condition, self._split(keywords)[1], _span(meta))

    def train(self, meta, word, model, direction: Token, objective) -> ast.Train:
        return ast.Train(model, str(direction), objective, _span(meta))

    def constraint(self, meta, model, stage, arguments) -> ast.Constraint:
        items, keywords = self._split(arguments)
        return ast.Constraint((model, stage) if stage else (model,), items, keywords, _span(meta))

    def every(self, meta, word, period, *actions) -> ast.Every:
        return ast.Every(period, actions, _span(meta))

    # ---- expressions

    def binary(self, meta, left, op: Token, right) -> ast.Binary:
        return ast.Binary(str(op), left, right, _span(meta))

    def unary(self, meta, op: Token, operand) -> ast.Unary:
        return ast.Unary(str(op), operand, _span(meta))

    def compare(self, meta, *parts) -> ast.Compare:
        return ast.Compare(parts[::2], parts[1::2], _span(meta))

    def comparison(self, meta, op: Token) -> str:
        return str(op)

    def attribute(self, meta, value, attr: Token) -> ast.Attribute:
        return ast.Attribute(value, str(attr), _of(attr), _span(meta))

    def call(self, meta, func, dims, arguments) -> ast.Call:
        args, keywords = self._split(arguments or ())
        return ast.Call(func, dims, args, keywords, _span(meta))

    def callee(self, meta, *parts):
        if len(parts) == 1:
            return self.name(meta, *parts)
        return self.attribute(meta, *parts)

    def name(self, meta, token: Token) -> ast.Name:
        if token in RESERVED:
            self._sink.error("E0028", _of(token), name=token)
        elif token in PYTHON_VALUES:
            self._sink.error("E0019", _of(token), word=token, instead=PYTHON_VALUES[token])
        return ast.Name(str(token), _of(token))

    soft = name

    def number(self, meta, token: Token) -> ast.Number:
        is_int = token.isdigit()
        if is_int and len(token) < 20:
            return ast.Number(int(token), _of(token))
        value = float(token)
        if is_int or not math.isfinite(value):
            text = token if len(token) < 20 else f"{token[:20]}…"
            self._sink.error("E0023", _of(token), text=text, help="it is too large")
        return ast.Number(value, _of(token))

    def string(self, meta, token: Token) -> ast.String:
        return ast.String(_unescape(token[1:-1]), _of(token))

    def boolean(self, meta, token: Token) -> ast.Bool:
        return ast.Bool(token == "true", _of(token))

    def list_(self, meta, *items) -> ast.List:
        return ast.List(tuple(i for i in items if i is not None), _span(meta))

    def dims(self, meta, *names) -> ast.Subscript:
        return ast.Subscript(names, _span(meta))

    def arguments(self, meta, *arguments) -> tuple:
        return tuple(a for a in arguments if a is not None)

    def keyword(self, meta, name: Token, value) -> ast.Keyword:
        self.name(meta, name)
        return ast.Keyword(str(name), value, _of(name))

    def _split(self, arguments: Iterable, positional: bool = True) -> tuple[tuple, tuple[ast.Keyword, ...]]:
        """Positional arguments and keywords; those in the wrong order or given twice are reported."""
        args, keywords = [], {}
        for argument in arguments:
            if isinstance(argument, ast.Keyword):
                self._add_keyword(argument, keywords)
                continue
            if not positional:
                self._sink.error("E0010", argument.span, found="an argument without a name", expected="`name=value`")
            elif keywords:
                first = next(iter(keywords))
                self._sink.error("E0026", argument.span, keyword=first)
            args.append(argument)
        return tuple(args), tuple(keywords.values())

    def _add_keyword(self, keyword: ast.Keyword, known: dict[str, ast.Keyword]) -> None:
        if keyword.name not in known:
            known[keyword.name] = keyword
            return
        labels = [Label(known[keyword.name].name_span, "first given here")]
        self._sink.error("E0027", keyword.name_span, labels=labels, keyword=keyword.name)


def _takes(section: str) -> str:
    """What stands in a section, in words."""
    *words, last = (WORDS[kind] for kind in STATEMENTS[section])
    return f"{', '.join(words)} and {last}" if words else last


def _check_depth(program: ast.Program, sink: Diagnostics) -> None:
    """Reports the first expression deeper than what later stages walk by recursion."""
    stack = [(item, 0) for item in program.items]
    while stack:
        node, depth = stack.pop()
        if isinstance(node, tuple):
            stack += [(child, depth) for child in node]
            continue
        if not dataclasses.is_dataclass(node) or isinstance(node, Span):
            continue
        if depth > MAX_DEPTH or isinstance(node, ast.Compare) and len(node.ops) > MAX_DEPTH:
            sink.error("E0022", getattr(node, "span", None) or node.name_span)
            return
        stack += [(value, depth + 1) for value in vars(node).values()]
