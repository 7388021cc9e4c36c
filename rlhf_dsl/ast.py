"""The syntax tree of a `.rlflow` program: frozen nodes with spans, one class a form of the language.

A span is a half-open range of character offsets into the source text. Nodes compare by content
*and* span; `strip_spans` gives the tree without them, for comparing two parses of a program.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Optional, Union


@dataclass(frozen=True, order=True)
class Span:
    """Characters `start` (included) to `end` (excluded) of a source."""

    start: int = 0
    end: int = 0

    def to(self, other: "Span") -> "Span":
        return Span(min(self.start, other.start), max(self.end, other.end))


# ---- expressions -------------------------------------------------------------------------------

@dataclass(frozen=True)
class Name:
    id: str
    span: Span


@dataclass(frozen=True)
class Number:
    value: Union[int, float]
    span: Span


@dataclass(frozen=True)
class Bool:
    value: bool
    span: Span


@dataclass(frozen=True)
class String:
    value: str
    span: Span


@dataclass(frozen=True)
class List:
    items: tuple["Expr", ...]
    span: Span


@dataclass(frozen=True)
class Unary:
    """`-x` or `not x`."""

    op: str
    operand: "Expr"
    span: Span


@dataclass(frozen=True)
class Binary:
    """`+ - * / **`, `and`, `or`."""

    op: str
    left: "Expr"
    right: "Expr"
    span: Span


@dataclass(frozen=True)
class Compare:
    """`a < b <= c` keeps its chain: `ops` has one entry fewer than `operands`."""

    operands: tuple["Expr", ...]
    ops: tuple[str, ...]
    span: Span


@dataclass(frozen=True)
class Keyword:
    """`name=value` in a call; `name_span` covers the name alone."""

    name: str
    value: "Expr"
    name_span: Span


@dataclass(frozen=True)
class Subscript:
    """The dims in `sum[t]` or `y[b, t]`."""

    dims: tuple[Name, ...]
    span: Span


@dataclass(frozen=True)
class Call:
    """`func(args, name=value)`, `sum[t](x)`, `actor.logprobs(y)`: `func` is a Name or an Attribute."""

    func: "Expr"
    subscript: Optional[Subscript]
    args: tuple["Expr", ...]
    keywords: tuple[Keyword, ...]
    span: Span


@dataclass(frozen=True)
class Attribute:
    """`y.logprobs`, `actor.generate`."""

    value: "Expr"
    attr: str
    attr_span: Span
    span: Span


Expr = Union[Name, Number, Bool, String, List, Unary, Binary, Compare, Call, Attribute]


# ---- declarations ------------------------------------------------------------------------------

@dataclass(frozen=True)
class Dim:
    """`dim b = 64` (fixed) or `dim t <= 32` (ragged)."""

    name: Name
    ragged: bool
    size: Number
    span: Span


@dataclass(frozen=True)
class Range:
    """`in (0, 1]`: an open end excludes its bound."""

    low: Expr
    high: Expr
    low_open: bool
    high_open: bool
    span: Span


@dataclass(frozen=True)
class Param:
    name: Name
    default: Expr
    range: Optional[Range]
    span: Span


@dataclass(frozen=True)
class State:
    """`state x = INIT then NEXT`."""

    name: Name
    init: Expr
    next: Expr
    span: Span


@dataclass(frozen=True)
class Column:
    """`label[b]: bool`, one column of a data declaration; `elem` is "" where not annotated."""

    name: Name
    dims: tuple[Name, ...]
    elem: str
    span: Span


@dataclass(frozen=True)
class Data:
    """`data q[b], good[b, t] after q = jsonl("f.jsonl", "prompt", "good")`; `after` belongs to the whole line."""

    columns: tuple[Column, ...]
    after: Optional[Name]
    source: Call
    span: Span


@dataclass(frozen=True)
class Model:
    """`model m = ROLE(SOURCE) trained by OPTIMIZER`."""

    name: Name
    role: Name
    source: Expr
    optimizer: Optional[Call]
    span: Span


@dataclass(frozen=True)
class Formal:
    """A formal of `fn`: with `dims` it takes a value with those dims, with None any value."""

    name: Name
    dims: Optional[tuple[Name, ...]]
    span: Span


@dataclass(frozen=True)
class Fn:
    name: Name
    formals: tuple[Formal, ...]
    body: tuple["Bind", ...]
    returns: tuple[Expr, ...]
    doc: str
    span: Span


@dataclass(frozen=True)
class Import:
    """`from pkg.mod import f, g`."""

    module: str
    names: tuple[Name, ...]
    span: Span


# ---- statements --------------------------------------------------------------------------------

@dataclass(frozen=True)
class Target:
    """`y[b, t]` or `kl` on the left of `=`; `dims` is None without brackets."""

    name: Name
    dims: Optional[tuple[Name, ...]]
    span: Span


@dataclass(frozen=True)
class Bind:
    """`a, ret = gae(...)`."""

    targets: tuple[Target, ...]
    value: Expr
    span: Span


@dataclass(frozen=True)
class Metric:
    name: Name
    value: Expr
    span: Span


@dataclass(frozen=True)
class Keep:
    """`keep if C, refill=3`."""

    condition: Expr
    keywords: tuple[Keyword, ...]
    span: Span


@dataclass(frozen=True)
class Train:
    """`train actor to maximize E`."""

    model: Name
    direction: str  # "maximize" or "minimize"
    objective: Expr
    span: Span


@dataclass(frozen=True)
class Constraint:
    """A line of `plan:`: `actor.train: parallel(tp=2), micro_batch(4)`; `target` is ("actor", "train") or ("assume",).

    `assume: prompt=1024, response=600` keeps its settings in `keywords`.
    """

    target: tuple[Name, ...]
    items: tuple[Expr, ...]
    keywords: tuple[Keyword, ...]
    span: Span


@dataclass(frozen=True)
class Setting:
    """`steps = 200` in `run:`."""

    name: Name
    value: Expr
    span: Span


@dataclass(frozen=True)
class Every:
    """`every 50: save(actor), save(critic)`."""

    period: Expr
    actions: tuple[Call, ...]
    span: Span


Statement = Union[Bind, Metric, Keep, Train, Constraint, Setting, Every, Data]


@dataclass(frozen=True)
class Section:
    """`rollout:`, `update(epochs=2):`, `plan:`, `eval(every=20):`, `run:`; `keywords` are those of the head."""

    kind: str
    keywords: tuple[Keyword, ...]
    body: tuple[Statement, ...]
    head_span: Span
    span: Span


Item = Union[Dim, Param, State, Data, Model, Fn, Import, Section]


@dataclass(frozen=True)
class Program:
    """All items in the source's order; `doc` is the leading docstring, "" if there is none."""

    doc: str
    items: tuple[Item, ...]


def strip_spans(node):
    """The same tree with every span at 0, so that programs compare by what they say."""
    if isinstance(node, Span):
        return Span()
    if isinstance(node, tuple):
        return tuple(strip_spans(x) for x in node)
    if not dataclasses.is_dataclass(node):
        return node
    return type(node)(**{f.name: strip_spans(getattr(node, f.name)) for f in dataclasses.fields(node)})
