"""A scheduled flow graph becomes a plan: instructions, tables of what they refer to, and of the source only lines."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Iterator, Mapping

from compiler import names
from compiler.exprs import call_temperature, walk
from compiler.ir import FlowGraph, Op
from compiler.lower import first_reader
from compiler.offloading import with_offloading
from compiler.placement import Batching, Placement
from compiler.plan import (
    ColumnSpec, DataSpec, DimSpec, ExprRow, GroupSpec, LayoutSpec, ModelSpec, OpSpec, Plan, ProgramInfo, RunSpec,
)
from compiler.resharding.transitions import strategy_of, weight_transfer
from compiler.separate import unit_samples
from compiler.shapes import ModelShape
from compiler.steps import (
    HOME, Action, CommitStates, Equation, EvalSection, Forward, Generate, KeepRows, Load, Named, NextState,
    OptimizerStep, PyOpCall, Record, Reply, Reshard, Statistics, Step, TrainStep, Transfer, UpdateLoop,
)
from rlhf_dsl.ast import Span
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Checked, Column, Expr, PyOp


@dataclass(frozen=True)
class Target:
    """What a plan is made for: `cluster` is its digest, `folder` that of the program, absolute."""

    cluster: str
    placement: Placement
    folder: str
    shapes: Mapping[str, ModelShape]


def emit(checked: Checked, graph: FlowGraph, target: Target) -> Plan:
    """The plan of a graph that all passes have seen."""
    emitter = _Emitter(checked, graph, target)
    used = graph.models() | emitter.tokenizing()
    plan = Plan(
        program=ProgramInfo(checked.name, checked.path, target.folder, _digest(checked.text)),
        cluster=target.cluster, world=target.placement.world,
        run=RunSpec(checked.run.steps, checked.run.epochs, checked.run.seed, checked.run.lag),
        dims={d.name: DimSpec(d.size, d.ragged, d.root, d.response, d.lead) for d in checked.dims.values()},
        models={m.name: emitter.model(m) for m in checked.models.values() if m.name in used},
        layouts=graph.side["layouts"], data=tuple(emitter.data()), ops=_ops(checked, emitter),
        setup=tuple(emitter.section(names.SETUP)), steps=tuple(emitter.iteration()), evals=tuple(emitter.evaluations()),
        states={s.name: emitter.table.id(s.init) for s in checked.states.values()},
        settings={p.name: p.value for p in checked.params.values()}, assume=_assumed(checked), exprs=(),
        groups=tuple(_used_groups(target.placement, used)), alternatives=target.placement.alternatives,
        search=target.placement.search, constraints=emitter.constraints(graph.side["layouts"]),
    )
    program = dataclasses.replace(plan.program, lines=emitter.lines.texts())
    return with_offloading(dataclasses.replace(plan, program=program, exprs=tuple(emitter.table.rows)))


def _used_groups(placement: Placement, used: set[str]) -> Iterator[GroupSpec]:
    """The groups without models that no step names; a group of none keeps its ranks idle and is left out."""
    for group in placement.groups:
        models = tuple(m for m in group.models if m in used)
        samplers = tuple(s for s in group.samplers if s.rpartition(".")[0] in used)
        if models or samplers:
            yield dataclasses.replace(group, models=models, samplers=samplers)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _assumed(checked: Checked) -> dict[str, int]:
    return {key: value for c in checked.constraints if not c.model for key, value in c.items}


def _ops(checked: Checked, emitter: "_Emitter") -> dict[str, OpSpec]:
    def spec(op: PyOp) -> OpSpec:
        file, line = str(Path(op.file).resolve()), emitter.lines.at(op.span)
        return OpSpec(op.module, file, op.args, op.result, op.batched, op.timeout, op.on_error, line,
                      op.result_dims)

    return {op.name: spec(op) for op in checked.ops.values()}


class _Lines:
    """Line numbers of spans; remembers which lines the plan refers to."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.used: set[int] = set()

    def at(self, span: Span) -> int:
        if span == Span():
            return 0
        line = self.source.position(span.start)[0]
        self.used.add(line)
        return line

    def texts(self) -> dict[str, str]:
        return {str(line): self.source.line(line) for line in sorted(self.used)}


class _Table:
    """The flat table of expressions, arguments first, in the order of first use."""

    def __init__(self, lines: _Lines) -> None:
        self.lines = lines
        self.ids: dict[Expr, int] = {}
        self.rows: list[ExprRow] = []

    def id(self, root: Expr) -> int:
        for expr in walk(root, stop=self.ids.__contains__):
            if expr not in self.ids:
                self.ids[expr] = len(self.rows)
                args = tuple(self.ids[a] for a in expr.args)
                self.rows.append(ExprRow(expr.op, args, dict(expr.attrs), expr.type.elem, expr.type.dims,
                                         tuple(sorted(expr.grad)), self.lines.at(expr.span)))
        return self.ids[root]


class _Emitter:
    def __init__(self, checked: Checked, graph: FlowGraph, target: Target) -> None:
        self.checked, self.graph, self.target = checked, graph, target
        self.lines = _Lines(Source(checked.path, checked.text))
        self.table = _Table(self.lines)

    # ---- sections

    def iteration(self) -> Iterator[Step]:
        yield from self.section(names.ROLLOUT)
        ahead = tuple(dataclasses.replace(step, ahead=1) for step in self.section(names.AHEAD))
        begun = max((i for i, step in enumerate(ahead, 1) if isinstance(step, Generate)), default=len(ahead))
        yield from ahead[:begun]
        for update in self.checked.updates:
            before = tuple(self.section(names.before(update.index)))
            body = tuple(self.section(names.update(update.index)))
            yield UpdateLoop(names.prefix("update", update.index)[:-1], update.index, update.epochs, update.minibatches,
                             update.roots, before, body, self.lines.at(update.span))
        if self.checked.states:
            yield CommitStates()
        yield from self.section(names.COMMIT)
        yield from ahead[begun:]

    def evaluations(self) -> Iterator[EvalSection]:
        for index, section in enumerate(self.checked.evals):
            name, steps = names.prefix("eval", index)[:-1], tuple(self.section(names.evaluation(index)))
            yield EvalSection(name, section.every, section.roots, steps, self.lines.at(section.span))

    def section(self, phase: str) -> Iterator[Step]:
        for op in self.graph.phase(phase):
            yield _MAKERS[op.kind](self, op)

    # ---- tables

    def constraints(self, layouts: Mapping[str, LayoutSpec]) -> dict[str, tuple[int, ...]]:
        """Where `plan:` speaks of each layout. A model alone means how it trains, or scores if frozen."""
        found: dict[str, tuple[int, ...]] = {}
        for constraint in (c for c in self.checked.constraints if c.model):
            first = next((s for s in ("train", "forward") if names.layout_name(constraint.model, s) in layouts), "")
            stage = first if constraint.stage in ("", "forward") else constraint.stage
            layout = names.layout_name(constraint.model, stage)
            if layout in layouts:
                found[layout] = (*found.get(layout, ()), self.lines.at(constraint.span))
        return found

    def model(self, model) -> ModelSpec:
        shape = dataclasses.asdict(self.target.shapes[model.name])
        offload = model.name in self.target.placement.offload
        has_weights = names.layout_name(model.name, "train") in self.graph.side["layouts"]  # not its tokenizer alone
        optimizer = model.optimizer if has_weights else None
        return ModelSpec(model.role, model.source, shape, optimizer, self.lines.at(model.span), offload)

    def data(self) -> Iterator[DataSpec]:
        used = {(op.attr("root"), c) for op in self.graph.ops if op.kind == "data" for c in op.attr("columns")}
        for source in self.checked.data:
            if any((source.root, c.name) in used for c in source.columns):
                columns = tuple(map(self.column, source.columns))
                yield DataSpec(source.root, source.kind, source.path, columns, self.lines.at(source.span))

    def column(self, c: Column) -> ColumnSpec:
        line, policy = self.lines.at(c.span), self.policy(c) if c.response else c.policy
        return ColumnSpec(c.name, c.field, c.type.elem, c.type.dims, c.response, c.after, policy, line)

    def policy(self, c: Column) -> str:
        """The model in whose tokens a response of data is; one that nobody reads is in those of any policy."""
        return c.policy or first_reader(self.checked, self.checked.models)

    def tokenizing(self) -> frozenset[str]:
        """The models whose tokenizers are needed, be it for nothing else."""
        loaded = {name for op in self.graph.ops if op.kind == "data" for name in op.attr("columns")}
        columns = (c for source in self.checked.data for c in source.columns if c.response and c.name in loaded)
        return frozenset((*map(self.policy, columns), *(op.attr("policy") for op in self.graph.ops if op.kind == "reply")))

    # ---- steps

    def named(self, value: str) -> Named:
        """A value under its own name, wherever the copy at hand lies."""
        found = self.graph.values[value]
        return Named(found.base or value, self.table.id(found.expr))

    def results(self, op: Op) -> tuple[Named, ...]:
        return tuple(self.named(n) for n in op.outputs if self.graph.values[n].expr is not None)

    def batching(self, layout: str) -> Batching:
        return self.graph.side["batching"][layout]

    def load(self, op: Op) -> Load:
        return Load(op.attr("root"), op.attr("columns"), self.lines.at(op.span))

    def reshard(self, op: Op) -> Reshard:
        role = self.checked.models[op.model].role
        src, dst = op.attr("src"), op.attr("dst")
        moved = weight_transfer(self.target.shapes[op.model], role, self.graph.side["layouts"], src, dst)
        strategy = strategy_of(self.graph.side["layouts"], src, dst)
        return Reshard(op.name, op.model, src, dst, moved.total_bytes, strategy, self.lines.at(op.span))

    def transfer(self, op: Op) -> Transfer:
        moved = tuple(self.named(n) for n in op.attr("moved"))
        return Transfer(op.name, moved, op.attr("src"), op.attr("dst"), op.attr("call"), self.lines.at(op.span))

    def generate(self, op: Op) -> Generate:
        expr = op.attr("expr")
        layout = self.graph.values[op.outputs[0]].layout
        ids = self.table.id(expr), self.table.id(expr.args[0])
        return Generate(op.name, *ids, op.model, layout, self.lines.at(op.span))

    def reply(self, op: Op) -> Reply:
        return Reply(op.name, self.table.id(op.attr("expr")), op.attr("policy"), self.lines.at(op.span))

    def forward(self, op: Op) -> Forward:
        layout = self.graph.values[op.outputs[0]].layout
        call, batching = op.attr("calls")[0], self.batching(layout)
        return Forward(op.name, self.results(op), self.table.id(call.args[0]), op.model, layout, call_temperature(call),
                       batching.micro_batch, batching.tokens, names.is_update(op.phase), self.lines.at(op.span))

    def equation(self, op: Op) -> Equation:
        return Equation(op.name, self.results(op), names.is_update(op.phase), self.lines.at(op.span))

    def pyop(self, op: Op) -> PyOpCall:
        return PyOpCall(op.name, self.table.id(op.attr("expr")), names.is_update(op.phase), self.lines.at(op.span))

    def keep(self, op: Op) -> KeepRows:
        expr = self.table.id(op.attr("expr"))
        return KeepRows(op.name, op.attr("index"), expr, op.attr("refill"), self.lines.at(op.span))

    def metric(self, op: Op) -> Record:
        return Record(op.attr("metric"), self.table.id(op.attr("expr")), self.lines.at(op.span))

    def state(self, op: Op) -> NextState:
        return NextState(op.attr("state"), self.table.id(op.attr("expr")), self.lines.at(op.span))

    def statistics(self, op: Op) -> Statistics:
        return Statistics(op.name, self.results(op), self.lines.at(op.span))

    def train(self, op: Op) -> TrainStep:
        layout = names.layout_name(op.model, "train")
        value_of = {v.expr: n for n, v in self.graph.values.items() if v.expr is not None and v.layout == HOME}
        calls = tuple(self.named(value_of[e]) for e in op.attr("calls"))
        constants = tuple(self.named(value_of[e]) for e in op.attr("constants"))
        objective, partial = self.table.id(op.attr("objective")), self.table.id(op.attr("partial"))
        batching, unit = self.batching(layout), op.attr("unit")
        units = self._units(batching.micro_batch, unit, [call.args[0] for call in op.attr("calls")])
        return TrainStep(op.name, op.model, layout, objective, partial, op.attr("maximize"), calls, constants, unit,
                         units, batching.tokens, batching.recompute, line=self.lines.at(op.span))

    def _units(self, samples: int, unit: tuple[str, ...], responses: Iterable[Expr]) -> int:
        """At most so many units in a micro-batch of `samples`, one at least."""
        together = unit_samples(self.checked.dims, unit, dict.fromkeys(responses))
        return max(1, samples // together) if samples else 0

    def optimizer(self, op: Op) -> OptimizerStep:
        return OptimizerStep(op.name, op.model, self.lines.at(op.span))

    def action(self, op: Op) -> Action:
        return Action(op.name, op.attr("every"), op.attr("action"), op.attr("args"), self.lines.at(op.span))


_MAKERS = {
    "data": _Emitter.load, "generate": _Emitter.generate, "reply": _Emitter.reply, "forward": _Emitter.forward,
    "equation": _Emitter.equation, "pyop": _Emitter.pyop, "keep": _Emitter.keep, "metric": _Emitter.metric, "state": _Emitter.state,
    "statistics": _Emitter.statistics, "train": _Emitter.train, "optimizer": _Emitter.optimizer,
    "reshard": _Emitter.reshard, "transfer": _Emitter.transfer, "action": _Emitter.action,
}
