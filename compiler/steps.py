"""The instructions of a plan, a frozen class each: `op` names it in JSON, `name` in messages, `line` is the user's.

Expressions are ids: positions in `Plan.exprs`. The order inside `UpdateLoop.body` is the order of execution for one
mini-batch: forwards that must be known first, `Statistics`, the train steps of all models, records (averaged over the
iteration's mini-batches), optimizer steps.

`ahead`: 1 of a step that an iteration does on the rows of the next one. Before the first iteration these steps are done
for it, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Union

HOME = "home"  # the layout of equations, Python ops and metrics


@dataclass(frozen=True)
class Named:
    """An expression under its printed name: `kl`, `actor.logprobs(y)`, `update/ratio`."""

    name: str
    expr: int


@dataclass(frozen=True)
class Load:
    """The next rows of the source over root dim `name` arrive at home."""

    op: ClassVar[str] = "load"
    name: str
    columns: tuple[str, ...]
    line: int = 0
    ahead: int = 0


@dataclass(frozen=True)
class Reshard:
    """Weights of `model` from layout `src` to layout `dst`, by a strategy of `compiler.resharding.gathers`.

    total_bytes: of all ranks together, received from other ranks
    """

    op: ClassVar[str] = "reshard"
    name: str
    model: str
    src: str
    dst: str
    total_bytes: int = 0
    strategy: str = "zero-redundancy"
    line: int = 0
    ahead: int = 0


@dataclass(frozen=True)
class _HostMove:
    """`parts` of `model`, as `layout` keeps them, on their way from or to the host's memory: see `compiler.offloading`.

    bytes: that the rank with most of them reads or writes, which what has no content and what the host has need not
    """

    name: str
    model: str
    layout: str
    parts: tuple[str, ...]
    bytes: int = 0
    line: int = 0
    ahead: int = 0


@dataclass(frozen=True)
class Reload(_HostMove):
    """Parts come back; those without content have memory again, and count nothing."""

    op: ClassVar[str] = "reload"


@dataclass(frozen=True)
class Offload(_HostMove):
    """Parts give up their memory; those that have changed since they came are written, and count."""

    op: ClassVar[str] = "offload"


@dataclass(frozen=True)
class Transfer:
    """Rows of values from `src` to `dst`; one of the two is "home", the other a layout.

    To a layout: its dp shards, each to all tp ranks of the stages that need it. From a layout: last stage, tp rank 0.
    call: the step that reads or makes the values; how it splits rows over its layout says which rows go where
    """

    op: ClassVar[str] = "transfer"
    name: str
    values: tuple[Named, ...]
    src: str
    dst: str
    call: str = ""
    line: int = 0
    ahead: int = 0


@dataclass(frozen=True)
class Generate:
    """`expr` is the `generate` primitive; its first argument, the prompts, has the id `prompts`."""

    op: ClassVar[str] = "generate"
    name: str
    expr: int
    prompts: int
    model: str
    layout: str
    line: int = 0
    ahead: int = 0


@dataclass(frozen=True)
class Reply:
    """The response `expr`, a `reply` primitive, is made of its texts at home, in tokens of the model `policy`."""

    op: ClassVar[str] = "reply"
    name: str
    expr: int
    policy: str
    line: int = 0
    ahead: int = 0


@dataclass(frozen=True)
class Forward:
    """One forward of `model` over the sequences of `response`, serving several calls.

    temperature: resolved, > 0
    micro_batch, tokens: of a micro-batch, at most so many samples, at most so many tokens (0: no limit)
    minibatch: over the mini-batch's rows with the weights of now, else over the iteration's rows.
    """

    op: ClassVar[str] = "forward"
    name: str
    calls: tuple[Named, ...]
    response: int
    model: str
    layout: str
    temperature: float = 1.0
    micro_batch: int = 0
    tokens: int = 0
    minibatch: bool = False
    line: int = 0


@dataclass(frozen=True)
class Equation:
    """Values to evaluate at home; `minibatch` as in `Forward`."""

    op: ClassVar[str] = "equation"
    name: str
    values: tuple[Named, ...]
    minibatch: bool = False
    line: int = 0
    ahead: int = 0


@dataclass(frozen=True)
class PyOpCall:
    op: ClassVar[str] = "pyop"
    name: str
    expr: int
    minibatch: bool = False
    line: int = 0


@dataclass(frozen=True)
class KeepRows:
    """The `index`-th keep (from 1); below it, rows where `expr` is false take no part."""

    op: ClassVar[str] = "keep"
    name: str
    index: int
    expr: int
    refill: int = 0
    line: int = 0


@dataclass(frozen=True)
class Record:
    """Metric `name`; in an update loop it is taken for each mini-batch and averaged."""

    op: ClassVar[str] = "record"
    name: str
    expr: int
    line: int = 0


@dataclass(frozen=True)
class NextState:
    """The new value of state `name`, committed by `CommitStates`."""

    op: ClassVar[str] = "next_state"
    name: str
    expr: int
    line: int = 0


@dataclass(frozen=True)
class CommitStates:
    op: ClassVar[str] = "commit_states"
    name: str = "states"
    line: int = 0


@dataclass(frozen=True)
class Statistics:
    """Reductions evaluated at home over the mini-batch, known on all ranks before the first micro-batch."""

    op: ClassVar[str] = "statistics"
    name: str
    exprs: tuple[Named, ...]
    line: int = 0


@dataclass(frozen=True)
class TrainStep:
    """Forward and backward of `model` over the mini-batch; gradients accumulate, weights stay.

    objective: as written, to maximize if `maximize`; its value over the mini-batch is a metric.
    partial: what a micro-batch evaluates; its gradients, summed over micro-batches and ranks, are that of `objective`.
    calls: outputs of the model that the mini-batch needs, with gradients. They come home by a Transfer.
    constants: known before: values over rows (sent by a Transfer) and scalars (known on every rank).
    unit: the dims whose joint rows may be split over micro-batches and dp: ("b",) or ("b", "g").
    micro_batch, tokens: of a micro-batch, at most so many units, at most so many tokens (0: no limit)
    recompute: backward computes the layers' activations again instead of keeping them
    retained: the forward of the rollout from whose activations backward starts; "": it computes its own first
    """

    op: ClassVar[str] = "train"
    name: str
    model: str
    layout: str
    objective: int
    partial: int
    maximize: bool
    calls: tuple[Named, ...]
    constants: tuple[Named, ...] = ()
    unit: tuple[str, ...] = ()
    micro_batch: int = 0
    tokens: int = 0
    recompute: bool = False
    retained: str = ""
    line: int = 0


@dataclass(frozen=True)
class OptimizerStep:
    op: ClassVar[str] = "optimizer"
    name: str
    model: str
    line: int = 0


@dataclass(frozen=True)
class Action:
    """`every` N iterations: kind "save", "copy" or "ema"."""

    op: ClassVar[str] = "action"
    name: str
    every: int
    kind: str
    args: tuple[Any, ...] = ()
    line: int = 0


LoopStep = Union[Transfer, Forward, Equation, PyOpCall, Statistics, TrainStep, Record, OptimizerStep, Reload, Offload]


@dataclass(frozen=True)
class UpdateLoop:
    """The `index`-th update, from 0: `before` once over the iteration's rows, then `body` for each mini-batch."""

    op: ClassVar[str] = "update"
    name: str
    index: int
    epochs: int
    minibatches: int
    roots: tuple[str, ...]
    before: tuple[LoopStep, ...] = ()
    body: tuple[LoopStep, ...] = ()
    line: int = 0


Step = Union[Load, Reshard, Reload, Offload, Transfer, Generate, Reply, Forward, Equation, PyOpCall, KeepRows, Record,
             NextState, UpdateLoop, CommitStates, Action]


@dataclass(frozen=True)
class EvalSection:
    """Runs before iteration 1, every `every` iterations and after the last; Load takes the first rows in file order."""

    name: str
    every: int
    roots: tuple[str, ...]
    steps: tuple[Step, ...]
    line: int = 0


def exprs_of(step: Any) -> tuple[int, ...]:
    """The expressions that a step makes or evaluates."""
    named = [v.expr for field in ("values", "calls", "exprs") for v in getattr(step, field, ())]
    single = [getattr(step, field) for field in ("expr", "objective") if hasattr(step, field)]
    return (*named, *single)
