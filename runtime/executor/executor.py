"""Walks the steps of a plan on one rank, iteration after iteration."""

from __future__ import annotations

import contextlib
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Callable, Iterator, Optional

import torch

from compiler import plan as steps_of
from compiler.plan import EvalSection, Plan, Step, UpdateLoop
from compiler.proof.wellformed import all_steps
from compiler.reading.tables import title_of
from rlhf_dsl.diagnostics import DiagnosticError, fault
from rlhf_dsl.typed import Expr, Interner
from runtime.data import Stream
from runtime.evaluator import Evaluator
from runtime.executor import calls, loading, python_calls, reencoding, refill, update
from runtime.executor.models import Models
from runtime.executor.scope import Dims, Rows, Scope
from runtime.kernels import KERNELS
from runtime.places import place_of
from runtime.sequences import Sequences
from runtime.values import Value
from runtime.world import World


@dataclass
class Iteration:
    """What an iteration leaves behind.

    metrics: null where no row took part; save: a checkpoint is due; series: the metrics of updates, before they are averaged over mini-batches
    seconds: of each step by its title; evals: likewise, of each evaluation after it
    lengths: tokens of its samples, as `Rows.mean_lengths`
    emptied: the first keep that left no row, 0 for none
    """

    number: int
    metrics: dict[str, Optional[float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    evals: dict[str, dict[str, float]] = field(default_factory=dict)
    lengths: dict[str, float] = field(default_factory=dict)
    emptied: int = 0
    save: bool = False
    series: dict[str, list[float]] = field(default_factory=dict)

    @property
    def skipped(self) -> bool:
        """Whether the iteration changes nothing, as no row is left."""
        return self.emptied > 0


class Executor:
    """One rank's walk through `plan`.

    models: this rank's engines and the moves of weights between them; sources: root dim → its stream
    on_step(iteration, step): called before each step, with the step's index in `step_list(plan)`
    """

    def __init__(self, plan: Plan, world: World, models: Models, sources: dict[str, Stream], ops: dict[str, Any],
                 on_step: Callable[[int, Step], None] = lambda iteration, step: None) -> None:
        self.plan, self.world, self.models, self.sources, self.ops = plan, world, models, sources, ops
        self.on_step = on_step
        self.shuffle = True
        self.interner = Interner()
        self.exprs = plan.expr_table(self.interner)
        self.dims = dims_of(plan)
        self.calls = {step.name: step for _, step in all_steps(plan) if step.op in calls.KINDS}
        self.retained = {step.retained for _, step in all_steps(plan) if step.op == "train"}
        self.data_exprs = {e.attr("column"): e for e in self.exprs if e.op == "data"}
        self.policies: dict[Expr, str] = {}  # response → the model whose tokens it is in
        self.fields: dict[Expr, list[Expr]] = {}
        for expr in self.exprs:
            if expr.op == "field":
                self.fields.setdefault(expr.args[0], []).append(expr)
        self.states = {name: float(self._constant(self.exprs[i])) for name, i in plan.states.items()}
        self.next_states: dict[str, float] = {}
        self.positions: dict[str, int] = {}
        self.iteration = Iteration(0)
        self.current = self._scope()
        self.following: Optional[Scope] = None  # with `lag = 1`, of the next iteration
        self.told: dict[Expr, Sequences] = {}
        self._handlers = {
            "load": self._load, "reshard": self._reshard, "reload": self._reload, "offload": self._offload,
            "generate": self._compute, "reply": self._reply, "forward": self._compute,
            "train": self._compute, "statistics": self._statistics,
            "equation": self._equation, "pyop": self._pyop, "keep": self._keep, "record": self._record,
            "next_state": self._next_state, "commit_states": self._commit_states, "update": self._update,
            "transfer": self._transfer, "action": self._action,
        }

    dtype = torch.float32  # of the equations

    def on_minibatch(self, loop: UpdateLoop, scope: Scope) -> None:
        """Called with each mini-batch before its models step."""

    # ---- iterations

    def run_iteration(self, number: int) -> Iteration:
        """Iteration `number`, from 1: the rollout, the updates, the states. The data position advances."""
        self.iteration = Iteration(number)
        scope = self.current = self.following or self._begun()
        self._seed_states(scope)
        self.following = self._scope() if self.plan.run.lag and self.follows(number) else None
        for step in self.plan.steps:
            self._walk(step)
        self.world.settle()
        self.iteration.lengths = scope.rows.mean_lengths()
        for root in scope.rows.size:
            self.positions[root] = self.positions.get(root, 0) + scope.rows.size[root]
        return self.iteration

    def follows(self, number: int) -> bool:
        """Whether there is an iteration after this one."""
        return number < self.plan.run.steps

    def _scope(self) -> Scope:
        return Scope(Rows(self.dims), self.world.rank, self.world.size)

    def _begun(self) -> Scope:
        """What the iteration before would have done for this one, if there had been one."""
        self.following, scope = None, self._scope()
        for step in self.plan.steps:
            if getattr(step, "ahead", 0):
                self._do(step, scope)
        return scope

    def _walk(self, step: Step) -> None:
        """A step on the rows that it is for."""
        scope = self.following if getattr(step, "ahead", 0) else self.current
        if scope is not None:
            self._do(step, scope)

    def number_of(self, scope: Scope) -> int:
        """The iteration whose rows a scope of the rollout holds."""
        return self.iteration.number + (scope is self.following)

    def evaluate(self, section: EvalSection) -> dict[str, Optional[float]]:
        """The metrics of an eval section; nothing else changes."""
        outer, self.iteration = self.iteration, Iteration(0)
        scope = self._scope()
        self._seed_states(scope)
        for step in section.steps:
            self._do(step, scope)
        self.world.settle()
        inner, self.iteration = self.iteration, outer
        outer.evals[section.name] = inner.seconds
        return inner.metrics

    def setup(self) -> None:
        """What the plan does once before the first iteration."""
        scope = self._scope()
        for step in self.plan.setup:
            self._do(step, scope)
        self.world.settle()
        self.iteration = Iteration(0)

    def _do(self, step: Step, scope: Scope) -> None:
        with self.timed(step):
            self._handlers[step.op](step, scope)

    @contextlib.contextmanager
    def timed(self, step: Step) -> Iterator[None]:
        """Around the work of a step: tells that it begins, and adds its time to the iteration's."""
        self.on_step(self.iteration.number, step)
        began = time.perf_counter()
        yield
        title, spent = title_of(step), self.iteration.seconds
        spent[title] = spent.get(title, 0.0) + time.perf_counter() - began

    def _seed_states(self, scope: Scope) -> None:
        self.next_states = {}
        for expr in self.exprs:
            if expr.op == "state":
                scope.env[expr] = Value((), torch.tensor([self.states[expr.attr("name")]], dtype=self.dtype))

    def _constant(self, expr: Expr) -> float:
        scope = Scope(Rows(self.dims), 0, 1)
        return float(self.evaluator(scope).evaluate(expr, scope.env).data)

    def evaluator(self, scope: Scope) -> Evaluator:
        return Evaluator(scope.frame, self.world.reducer, self.dtype, scope.keeps)

    def value(self, scope: Scope, expr: Expr) -> Value:
        """The value of an expression at home, evaluated once a scope."""
        if expr not in scope.env:
            scope.env[expr] = self.evaluator(scope).evaluate(expr, scope.env)
        return scope.env[expr]

    def scalar(self, scope: Scope, expr: Expr, step: Step) -> float:
        """A scalar on all ranks. Raises R0150 if it is not finite."""
        number = float(self.value(scope, expr).data)
        if not math.isfinite(number):
            raise self.fault_at(step, "R0150", name=step.name, value=number)
        return number

    def fault_at(self, step: Step, code: str, **words: Any) -> DiagnosticError:
        """A fault at the line of the program that a step comes from."""
        span, where = place_of(self.plan, step.line)
        return fault(code, span, **where, **words)

    # ---- steps

    def _load(self, step: steps_of.Load, scope: Scope) -> None:
        source = next(d for d in self.plan.data if d.root == step.name)
        stream, size = self.sources[step.name], self.plan.dims[step.name].size
        in_eval = any(step.name in section.roots for section in self.plan.evals)
        at = self.positions.get(step.name, 0) + scope.rows.drawn.get(step.name, 0)
        if scope is self.following:
            at += self.current.rows.size[step.name]
        drawn = stream.first(size) if in_eval else stream.rows(at, size)
        exprs = {c: self.data_exprs[c] for c in step.columns if c in self.data_exprs}
        loading.load(self.world, scope, step.name, stream.table, drawn, source.columns, exprs, self.models.tokenizers)
        for column in source.columns:
            if column.response and column.name in exprs:
                self._fill_fields(scope, exprs[column.name], column.policy)

    def _reshard(self, step: steps_of.Reshard, scope: Scope) -> None:
        self.models.reshard(step.src, step.dst)

    def _reload(self, step: steps_of.Reload, scope: Scope) -> None:
        self.models.reload(step.layout, step.parts)

    def _offload(self, step: steps_of.Offload, scope: Scope) -> None:
        self.models.offload(step.layout, step.parts)

    def _transfer(self, step: steps_of.Transfer, scope: Scope) -> None:
        """Rows go to a model call, or its results come home: all of a call travel together, as it splits them."""
        call = self.calls[step.call]
        if step.src == steps_of.HOME:
            scope.calls[step.call] = calls.begin(self, call, scope)
            scope.calls[step.call].arrive()
            return
        scope.calls.pop(step.call).leave()
        if isinstance(call, steps_of.Generate):
            self._fill_fields(scope, self.exprs[call.expr], call.model)

    def _compute(self, step: calls.Step, scope: Scope) -> None:
        """Ranks outside the layout have no engine and go on to what stands next."""
        scope.calls[step.name].compute(self.models.engine(step.layout))

    def goes_aside(self, step: calls.Step) -> bool:
        """Whether this rank is here for sampling alone, of the next iteration's batch beside this one's updates."""
        others = (layout for name, layout in self.models.layouts.items() if name != getattr(step, "layout", ""))
        return bool(getattr(step, "ahead", 0)) and not any(self.world.rank in layout for layout in others)

    @cached_property
    def thread(self) -> ThreadPoolExecutor:
        """One: calls follow one another, in the order of the plan."""
        return ThreadPoolExecutor(1)

    def _reply(self, step: steps_of.Reply, scope: Scope) -> None:
        expr = self.exprs[step.expr]
        for arg in expr.args:
            self.value(scope, arg)
        loading.reply(self.world, scope, expr, self.models.tokenizers[step.policy])
        self._fill_fields(scope, expr, step.policy)

    def _fill_fields(self, scope: Scope, response: Expr, policy: str) -> None:
        self.policies[response] = policy
        python_calls.fill_fields(scope, response, self.fields.get(response, []), self.models.tokenizers[policy])

    def readable(self, scope: Scope, response: Expr, model: str) -> Expr:
        """The response in tokens that `model` reads: itself where they are the same. Collective."""
        tokenizers = self.models.tokenizers
        written, read = tokenizers[self.policies[response]], tokenizers[model]
        return reencoding.readable(self.world, scope, response, model, written, read, self.interner)

    def _equation(self, step: steps_of.Equation, scope: Scope) -> None:
        for named in step.values:
            self.value(scope, self.exprs[named.expr])

    def _statistics(self, step: steps_of.Statistics, scope: Scope) -> None:
        found = [self.exprs[named.expr] for named in step.exprs]
        for expr in found:
            self.value(scope, expr)
        scope.statistics += found

    def _pyop(self, step: steps_of.PyOpCall, scope: Scope) -> None:
        expr = self.exprs[step.expr]
        args = {i: self.value(scope, arg) for i, arg in enumerate(expr.args)}
        scope.env[expr] = python_calls.call(scope, self.world.reducer, expr, self.ops[expr.attr("name")], args)

    def _keep(self, step: steps_of.KeepRows, scope: Scope) -> None:
        refill.keep(self, step, scope)
        if step.refill and not scope.rows.drawn:
            self._refill(step, scope)
        if not scope.rows.drawn:
            self.iteration.emptied = self.iteration.emptied or step.index * (not refill.kept_rows(scope, step.index))

    def _refill(self, step: steps_of.KeepRows, scope: Scope) -> None:
        refill.refill(self, step, scope)

    def _record(self, step: steps_of.Record, scope: Scope) -> None:
        expr = self.exprs[step.expr]
        nothing = self.iteration.emptied and update.keeps_read(expr) >= self.iteration.emptied
        self.iteration.metrics[step.name] = None if nothing else self.scalar(scope, expr, step)

    def _next_state(self, step: steps_of.NextState, scope: Scope) -> None:
        if self.iteration.skipped:
            return
        number = self._next_value(scope, step)
        self.next_states[step.name] = number
        for expr in self.exprs:
            if expr.op == "next_state" and expr.attr("name") == step.name:
                scope.env[expr] = Value((), torch.tensor([number], dtype=self.dtype))

    def _next_value(self, scope: Scope, step: steps_of.NextState) -> float:
        """In 64 bit, apart from the iteration's other values: a state may count further than 32 bit can."""
        env = {e: v for e, v in scope.env.items() if e.op not in KERNELS and e.op != "const"}
        exact = {"state": self.states, "next_state": self.next_states}
        for expr in self.exprs:
            if expr.attr("name") in exact.get(expr.op, ()):
                env[expr] = Value((), torch.tensor([exact[expr.op][expr.attr("name")]], dtype=torch.float64))
        evaluator = Evaluator(scope.frame, self.world.reducer, torch.float64, scope.keeps)
        number = float(evaluator.evaluate(self.exprs[step.expr], env).data)
        if not math.isfinite(number):
            raise self.fault_at(step, "R0150", name=step.name, value=number)
        return number

    def _commit_states(self, step: steps_of.CommitStates, scope: Scope) -> None:
        self.states |= self.next_states

    def _update(self, step: UpdateLoop, scope: Scope) -> None:
        if self.iteration.skipped:
            return
        update.run(self, step, scope)

    def _action(self, step: steps_of.Action, scope: Scope) -> None:
        if self.iteration.number % step.every:
            return
        if step.kind == "save":
            self.iteration.save = True
        else:
            self.models.act(step.kind, step.args)


def dims_of(plan: Plan) -> Dims:
    """The plan's dims in the form that scopes use."""
    fixed = {n: d for n, d in plan.dims.items() if not d.ragged}
    ragged = {n: d for n, d in plan.dims.items() if d.ragged}
    return Dims(
        roots=tuple(n for n, d in fixed.items() if d.root), sizes={n: d.size for n, d in fixed.items() if not d.root},
        lead={n: d.lead for n, d in ragged.items() if d.lead}, bounds={n: d.size for n, d in ragged.items()})
