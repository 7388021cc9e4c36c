"""What the checker makes of a program: resolved names, inferred types, functions expanded, in a few primitives.

An `Expr` is interned: equal expressions are one object, so "evaluated once" is a dictionary look-up by identity.
`rlhf_dsl.builtins` lists the primitives with signature and meaning; `compiler` and `runtime` know no other forms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Iterator, Optional, Union

from rlhf_dsl.ast import Span

ELEMENTS = ("f32", "bool", "text", "tokens")


@dataclass(frozen=True)
class Type:
    """`f32[b, g, t]`: an element and the named dims it varies over, in the order of their declaration.

    At most one dim is ragged and it stands last; its lengths vary over the leading dims of the response that
    introduced it.
    """

    elem: str
    dims: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.elem}[{', '.join(self.dims)}]" if self.dims else self.elem


@dataclass(frozen=True, eq=False)
class Expr:
    """One primitive applied to arguments. Make it with `Interner.expr`, compare it with `is`.

    op: a primitive of `rlhf_dsl.builtins.PRIMITIVES`
    attrs: static facts, sorted by key, hashable (see the table in `PRIMITIVES`)
    grad: the trained models into which this value differentiates (without `stop`); empty outside `update`
    span: of the first occurrence, for messages
    """

    op: str
    args: tuple["Expr", ...]
    attrs: tuple[tuple[str, Any], ...]
    type: Type
    grad: frozenset
    span: Span

    def attr(self, key: str, default: Any = None) -> Any:
        return dict(self.attrs).get(key, default)


def walk(expr: Expr) -> Iterator[Expr]:
    """An expression and all it is made from, each once."""
    seen, stack = set(), [expr]
    while stack:
        found = stack.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        stack.extend(reversed(found.args))


class Interner:
    """Makes each distinct expression once."""

    def __init__(self) -> None:
        self._known: dict = {}

    def expr(self, op: str, args=(), type: Type = Type("f32"), grad=frozenset(), span: Span = Span(), **attrs) -> Expr:
        key = (op, tuple(id(a) for a in args), tuple(sorted(attrs.items())), type)
        key = (*key, tuple(map(str, map(_kind, attrs.values()))))  # 1, 1.0 and True are different constants
        if key not in self._known:
            self._known[key] = Expr(op, tuple(args), tuple(sorted(attrs.items())), type, frozenset(grad), span)
        return self._known[key]


def _kind(value: Any) -> str:
    return value.__class__.__name__


@dataclass(frozen=True)
class Dim:
    """A dimension: `size` rows, or at most `size` if `ragged`.

    root: a first dim of a data declaration, whose rows are the data's rows
    response: for a ragged dim, the response that introduced it ("" if none)
    lead: for a ragged dim, the dims its lengths vary over, e.g. ("b", "g")
    """

    name: str
    size: int
    ragged: bool
    root: bool
    response: str
    lead: tuple[str, ...]
    span: Span


@dataclass(frozen=True)
class Param:
    name: str
    value: Union[float, int, bool, str]
    span: Span


@dataclass(frozen=True)
class State:
    """`next` may read rollout values, params and states; both are scalars."""

    name: str
    init: Expr
    next: Expr
    span: Span


@dataclass(frozen=True)
class Column:
    """`field` is the column's name in the file; `response`: tokens[b, t] that follow the text column `after` ("" = plain text after BOS)."""

    name: str
    field: str
    type: Type
    response: bool
    after: str
    policy: str  # the policy whose tokenizer a response column uses, "" for others
    span: Span


@dataclass(frozen=True)
class Data:
    """Columns of one source over the root dim `root`. kind: "jsonl", "parquet", "hf"; `path` as written."""

    root: str
    kind: str
    path: str
    columns: tuple[Column, ...]
    span: Span


@dataclass(frozen=True)
class Schedule:
    """kind "constant", "linear" or "cosine"; counts optimizer steps; `warmup` steps rise linearly from 0; `steps` is the total, 0 = the run's own number; `low` is where the decay ends."""

    kind: str
    lr: float
    warmup: int = 0
    steps: int = 0
    low: float = 0.0


@dataclass(frozen=True)
class Optimizer:
    """AdamW, decoupled weight decay (arXiv 1711.05101) on matrices only, clipping of the global gradient norm."""

    lr: Schedule
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class Model:
    name: str
    role: str  # "policy", "value", "scorer"
    source: str
    optimizer: Optional[Optimizer]
    span: Span


@dataclass(frozen=True)
class PyOp:
    """A Python function marked `@op`, as its source says; nothing is imported.

    args: one (name, annotation) each, such as `str`, `list[float]`, `Text["b g"]`
    defaults: of the last arguments, as their source says; a call may leave these out
    result: "f32", "bool", "text" or "list" (one f32 per own token)
    """

    name: str
    module: str
    file: str
    line: int
    args: tuple[tuple[str, str], ...]
    result: str
    batched: bool
    timeout: float
    on_error: Union[None, float, str]  # None: fail
    span: Span
    result_dims: tuple[str, ...] = ()  # of a batched op's result, in the names of its signature
    defaults: tuple[str, ...] = ()


# ---- statements after checking -------------------------------------------------------------------

@dataclass(frozen=True)
class Bind:
    """A named value. Its name is unique within its section; `call` is set when the value is one model call or Python op, as `fmt` prints it."""

    name: str
    expr: Expr
    span: Span


@dataclass(frozen=True)
class Metric:
    name: str
    expr: Expr
    span: Span


@dataclass(frozen=True)
class Keep:
    """The `index`-th keep (from 1). Reductions and calls below it carry attribute keep=index."""

    index: int
    condition: Expr
    refill: int
    span: Span


@dataclass(frozen=True)
class Train:
    model: str
    maximize: bool
    objective: Expr
    span: Span


@dataclass(frozen=True)
class Update:
    """The `index`-th update section (from 0); `roots` are the root dims that it reads."""

    index: int
    epochs: int
    minibatches: int
    roots: tuple[str, ...]
    body: tuple[Union[Bind, Metric, Train], ...]
    span: Span

    @property
    def trains(self) -> tuple[Train, ...]:
        return tuple(s for s in self.body if isinstance(s, Train))


@dataclass(frozen=True)
class Eval:
    every: int
    body: tuple[Union[Bind, Metric], ...]
    roots: tuple[str, ...]
    span: Span


@dataclass(frozen=True)
class Constraint:
    """`model` "" for `assume`; stage "", "train", "forward" or "generate".

    items: name -> value, e.g. {"tp": 2, "pp": 1, "micro_batch": 4, "tokens": 8192, "engine": "vllm", "devices": 8,
    "colocate": ("ref",), "prompt": 1024}
    """

    model: str
    stage: str
    items: tuple[tuple[str, Any], ...]
    span: Span


@dataclass(frozen=True)
class Action:
    """`every N: save(actor)`; kind "save", "copy" or "ema"; args as strings and numbers."""

    every: int
    kind: str
    args: tuple[Any, ...]
    span: Span


@dataclass(frozen=True)
class Run:
    steps: int = 0  # 0: not given
    epochs: int = 0
    seed: int = 0
    lag: int = 0
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True)
class Checked:
    """A program that has a meaning. Mappings keep the source's order."""

    name: str  # file stem
    path: str
    text: str
    doc: str
    dims: dict[str, Dim]
    params: dict[str, Param]
    states: dict[str, State]
    data: tuple[Data, ...]
    models: dict[str, Model]
    ops: dict[str, PyOp]
    rollout: tuple[Union[Bind, Metric, Keep], ...]
    updates: tuple[Update, ...]
    evals: tuple[Eval, ...]
    constraints: tuple[Constraint, ...]
    run: Run
    warnings: tuple = field(default=())
