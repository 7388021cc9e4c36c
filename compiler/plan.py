"""The plan of a program on a number of ranks: what every rank executes. It holds no code and needs no source.

A plan is parametric in ranks: all ranks walk the same list of steps, and what a rank does in a step follows from the
step's layout and the rank's place in it. Expressions are ids: positions in `Plan.exprs`. Steps: see `compiler.steps`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Optional, Union

from compiler import codec
from compiler.steps import (  # the plan's vocabulary, of which this module is the door
    HOME, Action, CommitStates, Equation, EvalSection, Forward, Generate, KeepRows, Load, LoopStep, Named, NextState,
    Offload, OptimizerStep, PyOpCall, Record, Reload, Reply, Reshard, Statistics, Step, TrainStep, Transfer, UpdateLoop,
)
from rlhf_dsl import typed

FORMAT = "rlflow.plan/1"

__all__ = [
    "FORMAT", "HOME", "Action", "Alternative", "ColumnSpec", "CommitStates", "DataSpec", "DimSpec", "Equation", "EvalSection",
    "ExprRow", "Forward", "Generate", "GroupBounds", "GroupSpec", "KeepRows", "LayoutSpec", "Load", "LoopStep", "ModelSpec",
    "Named", "NextState", "Offload", "OpSpec", "OptimizerStep", "OtherSize", "Plan", "ProgramInfo", "PyOpCall", "Record",
    "Reload", "Reply", "Reshard", "RunSpec", "SearchSpec", "Statistics", "Step", "TrainStep", "Transfer", "UpdateLoop",
]


# ---- tables ------------------------------------------------------------------------------------

@dataclass(frozen=True)
class ExprRow:
    """One primitive; `args` are smaller ids. grad: the models it differentiates into; line: of its first occurrence."""

    op: str
    args: tuple[int, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    elem: str = "f32"
    dims: tuple[str, ...] = ()
    grad: tuple[str, ...] = ()
    line: int = 0


@dataclass(frozen=True)
class ProgramInfo:
    """`folder`: of the program, absolute: relative paths are looked up there, then in the working directory.

    lines: line number (as text) -> source line, for the lines that a message may show.
    """

    name: str
    path: str
    folder: str
    digest: str
    lines: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DimSpec:
    """As `typed.Dim`. response: what introduced a ragged dim; lead: the dims that its lengths vary over."""

    size: int
    ragged: bool = False
    root: bool = False
    response: str = ""
    lead: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayoutSpec:
    """Ranks `first` to `first + ranks - 1` by tp x pp x dp.

    within: the layout whose ranks they are, in an order of their own
    engine: "" for the usual one of the stage
    strategy: how weights come from there (`compiler.resharding.gathers`); the order follows from it
    chunks: runs of layers in each stage of a pipeline
    sequence_parallel: between layers the ranks of a tp group hold a part of the tokens each
    sharded_optimizer: the data shards hold a part of the optimizer's states each
    precision: of weights and activations, "fp32" or "bf16"
    cache_bytes: for keys and values of generation on each rank, 0: as the engine has it
    """

    ranks: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    first: int = 0
    within: str = ""
    engine: str = ""
    strategy: str = "zero-redundancy"
    chunks: int = 1
    sequence_parallel: bool = False
    sharded_optimizer: bool = False
    precision: str = "fp32"
    cache_bytes: int = 0


@dataclass(frozen=True)
class GroupSpec:
    """What shares the ranks `first` to `first + ranks - 1`.

    models: with all their layouts, but for one that is a sampler elsewhere
    pool: the part of a described cluster that they lie in
    samplers: layouts of generation that have ranks of their own, `actor.generate`; their models are of other groups
    """

    models: tuple[str, ...]
    first: int
    ranks: int
    pool: str = ""
    samplers: tuple[str, ...] = ()

    @property
    def members(self) -> tuple[str, ...]:
        """Names of what is there, for people and for `CostModel.memory`."""
        return (*self.models, *self.samplers)

    @property
    def last(self) -> int:
        return self.first + self.ranks - 1


@dataclass(frozen=True)
class Alternative:
    """A runner-up of the search: the best of another division of the models, with its estimate.

    stages: seconds by stage, each that of its slowest group; transition: those of the weights' way into generation,
    where they are a part of its stage; memory: bytes on the fullest device
    """

    groups: tuple[GroupSpec, ...]
    iteration_s: float
    stages: dict[str, float] = field(default_factory=dict)
    transition: float = 0.0
    memory: float = 0.0


@dataclass(frozen=True)
class OtherSize:
    """The plan's groups with another number of ranks for one. stages: as of an alternative, {} where it does not fit.

    giver: models of the group that has fewer for it, () if none has
    """

    ranks: int
    stages: dict[str, float] = field(default_factory=dict)
    giver: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupBounds:
    """Why a group has its number of ranks: the least that it fits on, and the next smaller and greater number."""

    models: tuple[str, ...]
    least: int
    others: tuple[OtherSize, ...] = ()


@dataclass(frozen=True)
class SearchSpec:
    """What the search of a plan looked at, and how it sees the plan's own groups, to compare with the runners-up.

    considered: sets of models on some of the devices; divisions: ways to divide the models into sets
    feasible: divisions for which there are devices enough; stages, transition, memory: as of an alternative
    """

    objective: str
    considered: int
    divisions: int
    feasible: int
    stages: dict[str, float] = field(default_factory=dict)
    transition: float = 0.0
    memory: float = 0.0
    bounds: tuple[GroupBounds, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """`shape`: the fields of `compiler.shapes.ModelShape`; `source` as written.

    offload: the model is on its ranks while it works, else in the host's memory (`compiler.offloading`)
    """

    role: str
    source: str
    shape: dict[str, Any]
    optimizer: Optional[typed.Optimizer] = None
    line: int = 0
    offload: bool = False


@dataclass(frozen=True)
class ColumnSpec:
    """As `typed.Column`."""

    name: str
    field: str
    elem: str
    dims: tuple[str, ...]
    response: bool = False
    after: str = ""
    policy: str = ""
    line: int = 0


@dataclass(frozen=True)
class DataSpec:
    """Columns of one source over the root dim `root`; `path` as written."""

    root: str
    kind: str
    path: str
    columns: tuple[ColumnSpec, ...]
    line: int = 0


@dataclass(frozen=True)
class OpSpec:
    """A Python op, as `typed.PyOp`; it is imported by the worker processes alone."""

    module: str
    file: str
    args: tuple[tuple[str, str], ...]
    result: str
    batched: bool = False
    timeout: float = 60.0
    on_error: Union[None, float, str] = None
    line: int = 0
    result_dims: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunSpec:
    """`steps` or `epochs` is 0 if not given."""

    steps: int = 0
    epochs: int = 0
    seed: int = 0
    lag: int = 0


# ---- the plan ----------------------------------------------------------------------------------

@dataclass(frozen=True)
class Plan:
    """`setup` runs once, `steps` each iteration. `settings`: params as they are in force.

    assume: lengths to estimate with, in tokens: "prompt", "response" on average, "longest" of the responses
    constraints: by layout, the lines of `plan:` that speak of it
    groups: sets of models that share ranks, disjoint; () in older plans, where all models share all ranks
    search: None where the layouts are those of `plan:`
    """

    program: ProgramInfo
    cluster: str  # digest
    world: int
    run: RunSpec
    dims: dict[str, DimSpec]
    models: dict[str, ModelSpec]
    layouts: dict[str, LayoutSpec]
    data: tuple[DataSpec, ...]
    ops: dict[str, OpSpec]
    states: dict[str, int]
    settings: dict[str, Any]
    exprs: tuple[ExprRow, ...]
    setup: tuple[Step, ...] = ()
    steps: tuple[Step, ...] = ()
    evals: tuple[EvalSection, ...] = ()
    assume: dict[str, int] = field(default_factory=dict)
    groups: tuple[GroupSpec, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    search: Optional[SearchSpec] = None
    constraints: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def expr_table(self, interner: Optional[typed.Interner] = None) -> tuple[typed.Expr, ...]:
        """The interned expressions: entry i is the one with id i."""
        interner, table = interner or typed.Interner(), []
        for row in self.exprs:
            kind = typed.Type(row.elem, row.dims)
            args = tuple(table[i] for i in row.args)
            table.append(interner.expr(row.op, args, kind, frozenset(row.grad), **row.attrs))
        return tuple(table)

    def line_text(self, line: int) -> str:
        return self.program.lines.get(str(line), "")

    def to_json(self) -> str:
        """Deterministic: the same program, cluster and number of ranks give the same bytes."""
        value = sealed({"format": FORMAT, **codec.encode(self)})
        return "{\n" + ",\n".join(f" {json.dumps(k)}: {_pretty(v)}" for k, v in value.items()) + "\n}\n"

    @property
    def digest(self) -> str:
        return content_digest({"format": FORMAT, **codec.encode(self)})

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Raises `ChangedPlan` and `codec.CodecError`; `compiler.proof.verify.load_plan` makes diagnostics of them."""
        try:
            value = json.loads(text, parse_constant=_refuse)
            _line(value).encode()
        except (ValueError, RecursionError) as error:  # also of half a surrogate pair, which no file can hold
            raise codec.CodecError("plan", f"not JSON: {error}") from None
        name = value.get("format") if isinstance(value, dict) else None
        if not isinstance(name, str) or name.split(".")[:2] != FORMAT.split("."):
            raise codec.CodecError("plan.format", f"`{FORMAT}` is expected")
        if value.get("digest") != content_digest(value):
            raise ChangedPlan("plan.digest", "the content is not the one that was written")
        return codec.decode(Plan, value)


class ChangedPlan(codec.CodecError):
    """A plan file whose content does not have the digest that stands in it."""


def content_digest(value: dict[str, Any]) -> str:
    """SHA-256 of a plan's JSON value without its digest; the spacing of a file does not enter it."""
    content = {key: inner for key, inner in value.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """A plan's JSON value with its digest behind the format."""
    content = {key: inner for key, inner in value.items() if key not in ("format", "digest")}
    return {"format": value["format"], "digest": content_digest({"format": value["format"], **content}), **content}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _pretty(value: Any) -> str:
    """One line an item: a plan is read and compared by people."""
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f"  {_line(k)}: {_line(v)}" for k, v in value.items()) + "\n }"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {_line(v)}" for v in value) + "\n ]"
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
