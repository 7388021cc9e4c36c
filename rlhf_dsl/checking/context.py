"""What every rule of the checker has at hand: the shared tables, and where in the program it stands."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Iterable, Optional

from rlhf_dsl import ast
from rlhf_dsl.builtins import BUILTINS, PRIMITIVES
from rlhf_dsl.checking.scopes import Binding, Scope
from rlhf_dsl.diagnostics import Diagnostics, Label, did_you_mean
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Column, Data, Dim, Expr, Interner, Model, Param, PyOp, State, Type

FOUND = {int: "f32", float: "f32", bool: "bool", str: "text"}


@dataclass(frozen=True)
class Response:
    """A response by name. kind: "generate", "reply" or "data". `model` made it ("" if none)."""

    name: str
    kind: str
    model: str
    expr: Expr
    span: ast.Span


@dataclass
class Tables:
    """The one mutable thing: what has been found out so far, for the whole program."""

    source: Source
    sink: Diagnostics
    overrides: dict[str, str]
    interner: Interner = field(default_factory=Interner)
    prelude: Scope = field(default_factory=Scope)
    dims: dict[str, Dim] = field(default_factory=dict)
    params: dict[str, Param] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    state_types: dict[str, Optional[Type]] = field(default_factory=dict)
    data: list[Data] = field(default_factory=list)
    models: dict[str, Model] = field(default_factory=dict)
    ops: dict[str, PyOp] = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)
    responses: dict[str, Response] = field(default_factory=dict)  # by ragged dim
    calls: dict[tuple, str] = field(default_factory=dict)  # the phase of the first equal call
    users: dict[str, list] = field(default_factory=dict)  # response -> (model, operation, place) of its calls
    metrics: dict[str, ast.Span] = field(default_factory=dict)
    expanded: dict[tuple, list] = field(default_factory=dict)  # the values of calls of functions
    next_id: int = 0

    def fresh_id(self) -> int:
        self.next_id += 1
        return self.next_id


@dataclass(frozen=True)
class Frame:
    """A function being expanded, called at `call`; `source` is that of the prelude for its functions, else None."""

    name: str
    call: ast.Span
    source: Optional[Source]


@dataclass(frozen=True)
class Context:
    """Where an expression stands.

    phase: "declaration" (constants only), "rollout", "update0", "eval0" ...
    keep: how many `keep` stand above
    trained: the models that the current update trains; calls of them differentiate
    changed: the models that this or an earlier update of the iteration trains
    dim_vars: in a function, its dims and what they stand for
    last_keep: how many `keep` the rollout has in all
    state: the state whose NEXT this is, "" elsewhere
    """

    tables: Tables
    scope: Scope
    phase: str = "declaration"
    keep: int = 0
    trained: frozenset = frozenset()
    changed: frozenset = frozenset()
    dim_vars: dict[str, str] = field(default_factory=dict)
    frames: tuple[Frame, ...] = ()
    last_keep: int = 0
    state: str = ""

    def at(self, **changes) -> "Context":
        return dataclasses.replace(self, **changes)

    # ---- diagnostics

    def error(self, code: str, span: ast.Span, labels: Iterable[Label] = (), help: Optional[str] = None, **words):
        """Reports in the user's text: a fault inside a function of the prelude at its call, with the place inside."""
        labels = list(labels)
        prelude = next((f for f in self.frames if f.source is not None), None)
        if prelude is not None:
            inner = Label(span, f"in the prelude's `{prelude.name}`", prelude.source)
            labels = [inner, *(dataclasses.replace(la, source=la.source or prelude.source) for la in labels)]
            span = prelude.call
            if any(item.code == code and item.span == span for item in self.tables.sink.items):
                return
        elif self.frames:
            labels.append(Label(self.frames[0].call, f"`{self.frames[0].name}` is called here"))
        self.tables.sink.error(code, span, labels=labels, help=help, **words)

    def span(self, node: Any) -> ast.Span:
        """The place of a node in the user's text."""
        prelude = next((f for f in self.frames if f.source is not None), None)
        return node.span if prelude is None else prelude.call

    # ---- making expressions

    def expr(self, op: str, args: Iterable[Expr], type: Type, node: Any, **attrs) -> Expr:
        """Interns; `grad` is the union of the arguments' unless the primitive cuts it."""
        args = tuple(args)
        grad = frozenset().union(*(a.grad for a in args)) if PRIMITIVES[op].differentiable else frozenset()
        return self.tables.interner.expr(op, args, type, grad, self.span(node), **attrs)

    def const(self, value: Any, node: Any) -> Expr:
        return self.expr("const", (), Type(FOUND[value.__class__]), node, value=value)

    # ---- dims

    def order(self, dims: Iterable[str]) -> tuple[str, ...]:
        """The one order of dims in a type: the root dim, other fixed dims as declared, the ragged dim."""
        declared = self.tables.dims
        place = {name: i for i, name in enumerate(declared)}
        return tuple(sorted(set(dims), key=lambda d: (declared[d].ragged, not declared[d].root, place[d])))

    def ragged(self, dims: Iterable[str]) -> tuple[str, ...]:
        return tuple(d for d in dims if self.tables.dims[d].ragged)

    def roots(self, dims: Iterable[str]) -> tuple[str, ...]:
        return tuple(d for d in dims if self.tables.dims[d].root)

    def dim(self, name: ast.Name) -> Optional[str]:
        """The dim that a name in brackets means."""
        if name.id in self.dim_vars:
            return self.dim_vars[name.id]
        found = self.scope.find(name.id)
        if found is not None and found.kind == "dim":
            found.used = True
            return name.id
        self.error("E0201", name.span, name=name.id, help=did_you_mean(name.id, self.tables.dims) or None)
        return None

    # ---- names

    def define(self, binding: Binding) -> None:
        """Binds a name in the current scope, or says why not."""
        name = binding.name
        before = self.scope.find(name)
        if name in BUILTINS:
            self.error("E0104", binding.span, name=name)
        elif before is not None and before is not self.tables.prelude.names.get(name):
            self.error("E0103", binding.span, [Label(before.span, "first bound here")], name=name)
            binding.used = True
        elif before is not None:
            self.error("W0102", binding.span, name=name)
        self.scope.names[name] = binding
        self.scope.later.pop(name, None)
