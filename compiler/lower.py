"""A checked program becomes a flow graph: one operation for each named value, model call, metric, state and training.

What an update needs once (calls of models that it does not train, equations of constants) goes into the phase before.
"""

from __future__ import annotations

import itertools
from typing import Iterable, Iterator

from compiler import names
from compiler.exprs import is_root_reduction, walk
from compiler.ir import FlowGraph, Op, Value, make_op
from rlhf_dsl import typed
from rlhf_dsl.ast import Span
from rlhf_dsl.typed import Checked, Expr

READERS = ("policy", "value", "scorer")
UNNAMED = frozenset(("const", "state", "data"))  # their bindings are aliases, not operations


def lower(checked: Checked) -> FlowGraph:
    """The graph of `checked`, before any pass; its order is the order of execution."""
    builder = _Builder(checked)
    builder.rollout()
    for update in checked.updates:
        builder.update(update)
    builder.commit()
    for index, section in enumerate(checked.evals):
        builder.evaluation(index, section)
    order = {phase: i for i, phase in enumerate(names.phase_order(len(checked.updates), len(checked.evals)))}
    return FlowGraph(checked.name, (), builder.values).with_ops(sorted(builder.ops, key=lambda op: order[op.phase]))


def root_dims(checked: Checked) -> frozenset[str]:
    return frozenset(d.name for d in checked.dims.values() if d.root)


class _Builder:
    """Collects operations; `known` maps each expression that is a value already to the value's name."""

    def __init__(self, checked: Checked) -> None:
        self.checked = checked
        self.roots = root_dims(checked)
        self.ops: list[Op] = []
        self.values: dict[str, Value] = {}
        self.known: dict[Expr, str] = {}
        self.bound: dict[Expr, str] = {}
        self.prefix = ""
        self.phase = names.ROLLOUT
        self.trained: frozenset[str] = frozenset()
        self.open: set[Expr] = set()  # equations over current outputs: a gradient passes through them

    # ---- sections ------------------------------------------------------------------------------

    def rollout(self) -> None:
        self.bound = names.bound_names("", self.checked.rollout)
        updates = [s for update in self.checked.updates for s in update.body]
        states = [s.next for s in self.checked.states.values()]
        self._load(self.checked.data, [*_expressions([*self.checked.rollout, *updates]), *states])
        for statement in self.checked.rollout:
            self._statement(statement)
        for state in self.checked.states.values():
            self._state(state)

    def update(self, update: typed.Update) -> None:
        self.prefix = names.prefix("update", update.index)
        self.trained = frozenset(train.model for train in update.trains)
        self.bound = names.bound_names(self.prefix, update.body)
        for statement in update.body:
            self._in_update(statement, update.index)
        self.phase = names.update(update.index)
        for train in update.trains:
            self._metric(names.training_metric(train.model, update.index), train.objective, train.span)
        for train in update.trains:
            gradient = names.gradient(self.prefix, train.model)
            self._add(make_op(f"{self.prefix}step {train.model}", "optimizer", (gradient,), model=train.model,
                              phase=self.phase, span=train.span))
        self.trained = frozenset()

    def commit(self) -> None:
        for action in self.checked.run.actions:
            name = f"every {action.every}: {action.kind}({', '.join(map(str, action.args))})"
            self._add(make_op(name, "action", phase=names.COMMIT, span=action.span, every=action.every,
                              action=action.kind, args=action.args))

    def evaluation(self, index: int, section: typed.Eval) -> None:
        self.known, self.prefix, self.phase = {}, names.prefix("eval", index), names.evaluation(index)
        self.bound = names.bound_names(self.prefix, section.body)
        self._load(self.checked.data, _expressions(section.body))
        for statement in section.body:
            self._statement(statement)

    # ---- statements ----------------------------------------------------------------------------

    def _statement(self, statement) -> None:
        if isinstance(statement, typed.Bind):
            self._bind(statement)
        elif isinstance(statement, typed.Metric):
            self._metric(statement.name, statement.expr, statement.span)
        elif isinstance(statement, typed.Keep):
            self._keep(statement)

    def _in_update(self, statement, index: int) -> None:
        if isinstance(statement, typed.Train):
            self.phase = names.update(index)
            self._train(statement)
            return
        once = isinstance(statement, typed.Bind) and not self._varies(statement.expr)
        self.phase = names.before(index) if once else names.update(index)
        self._statement(statement)

    def _bind(self, bind: typed.Bind) -> None:
        inputs = self._inputs(bind.expr)
        name = self.prefix + bind.name
        if bind.expr.op in UNNAMED or self.known.get(bind.expr) == name:
            return
        self._add(make_op(name, "equation", inputs, (name,), phase=self.phase, span=bind.span, expr=bind.expr))
        self._define(name, bind.expr)
        if names.is_update(self.phase):
            self.open.add(bind.expr)

    def _metric(self, name: str, expr: Expr, span: Span) -> None:
        metric = self.prefix + name if names.is_eval(self.phase) else name
        self._add(make_op(f"metric {metric}", "metric", self._inputs(expr), phase=self.phase, span=span, expr=expr,
                          metric=metric))

    def _keep(self, keep: typed.Keep) -> None:
        inputs = self._inputs(keep.condition)
        name = keep_name(keep.index)
        self._add(make_op(name, "keep", inputs, (name,), phase=self.phase, span=keep.span, expr=keep.condition,
                          index=keep.index, refill=keep.refill))
        self.values[name] = Value(name, keep.condition.type)

    def _state(self, state: typed.State) -> None:
        name = f"next({state.name})"
        if name in self.values:
            return
        inputs = self._inputs(state.next)
        self._add(make_op(name, "state", inputs, (name,), phase=self.phase, span=state.span, expr=state.next,
                          state=state.name))
        self.values[name] = Value(name, state.next.type)

    def _train(self, train: typed.Train) -> None:
        inputs = self._inputs(train.objective, through_equations=True)
        gradient = names.gradient(self.prefix, train.model)
        self._add(make_op(f"{self.prefix}train {train.model}", "train", inputs, (gradient,), model=train.model,
                          phase=self.phase, span=train.span, objective=train.objective, maximize=train.maximize))
        self.values[gradient] = Value(gradient, train.objective.type)

    # ---- values --------------------------------------------------------------------------------

    def _load(self, sources: Iterable[typed.Data], expressions: Iterable[Expr]) -> None:
        used = {e.attr("column"): e for e in walk(*expressions) if e.op == "data"}
        for source in sources:
            columns = [c for c in source.columns if c.name in used]
            if not columns:
                continue
            outputs = [c.name for c in columns]
            self._add(make_op(f"data {source.root}", "data", (), outputs, phase=self.phase,
                              span=source.span, root=source.root, columns=tuple(c.name for c in columns)))
            for column, name in zip(columns, outputs):
                self._define(name, used[column.name])

    def _inputs(self, *roots: Expr, through_equations: bool = False) -> tuple[str, ...]:
        """Names of the values that `roots` read; model calls and the like that are missing are made here, in order."""
        for expr in walk(*roots, stop=self._is_known):
            if expr not in self.known:
                self._make(expr)
        return tuple(dict.fromkeys(self._frontier(roots, through_equations)))

    def _frontier(self, roots: Iterable[Expr], through_equations: bool) -> Iterator[str]:
        def opaque(expr: Expr) -> bool:
            return self._is_known(expr) and not (through_equations and expr in self.open)

        for expr in walk(*roots, stop=opaque):
            if opaque(expr):
                yield self.known[expr]
            if expr.attr("keep", 0):
                yield keep_name(expr.attr("keep"))
            if expr.op == "next_state":
                yield f"next({expr.attr('name')})"

    def _is_known(self, expr: Expr) -> bool:
        return expr in self.known

    def _make(self, expr: Expr) -> None:
        if expr.op == "generate":
            self._produce(expr, "generate", expr.attr("model"))
        elif expr.op == "call":
            self._produce(expr, "forward", expr.attr("model"))
        elif expr.op in ("pyop", "reply"):
            self._produce(expr, expr.op, "")
        elif expr.op == "next_state":
            self._state(self.checked.states[expr.attr("name")])
            self._define(f"next({expr.attr('name')})", expr)

    def _name(self, expr: Expr) -> str:
        """Under which a line of this section binds `expr`, else its text."""
        return self.bound.get(expr) or self._free(self.prefix + names.default_name(expr, self.known))

    def _produce(self, expr: Expr, kind: str, model: str) -> None:
        phase, self.phase = self.phase, self._phase_of(expr)
        name = self._name(expr)
        facts = {"calls": (expr,)} if kind == "forward" else {"expr": expr}
        if kind == "reply":
            facts["policy"] = reader(self.checked, expr)
        if kind == "generate":
            self._value(expr.args[0])
        inputs = tuple(dict.fromkeys(self._frontier((*expr.args,), False)))
        if expr.attr("keep", 0):
            inputs = (*inputs, keep_name(expr.attr("keep")))
        self._add(make_op(name, kind, inputs, (name,), model=model, phase=self.phase, span=expr.span, **facts))
        self._define(name, expr)
        self.phase = phase

    def _value(self, prompts: Expr) -> None:
        """Prompts are a value of their own, so that they can travel: `y.text`, say."""
        if prompts in self.known:
            return
        name = self._name(prompts)
        self._add(make_op(name, "equation", self._inputs(prompts), (name,), phase=self.phase, span=prompts.span, expr=prompts))
        self._define(name, prompts)

    def _phase_of(self, expr: Expr) -> str:
        """A call or op in an update that no training of it changes runs once, before the first mini-batch."""
        if not names.is_update(self.phase) or self._varies(expr):
            return self.phase
        return names.before(names.phase_index(self.phase))

    def _varies(self, expr: Expr) -> bool:
        """Whether a value of the update depends on the mini-batch: on current outputs or by a root reduction."""
        def exists(e: Expr) -> bool:
            return self._is_known(e) and e not in self.open

        return any(self._is_current(e) or (not exists(e) and is_root_reduction(e, self.roots))
                   for e in walk(expr, stop=exists))

    def _is_current(self, expr: Expr) -> bool:
        return expr.op == "call" and expr.attr("model") in self.trained and expr.attr("phase", "").startswith("update")

    def _free(self, stem: str) -> str:
        """`stem`, or with a number behind it: equal calls on both sides of a `keep` are two values."""
        return next(n for n in itertools.chain([stem], (f"{stem} #{i}" for i in itertools.count(2))) if n not in self.values)

    def _define(self, name: str, expr: Expr) -> None:
        self.known.setdefault(expr, name)
        self.values[name] = Value(name, expr.type, expr)

    def _add(self, op: Op) -> None:
        self.ops.append(op)


def keep_name(index: int) -> str:
    return f"keep {index}"


def reader(checked: Checked, response: Expr) -> str:
    """The model in whose tokens a response of given texts is: a policy that reads it, else another, else any policy."""
    lines = (line for part in (checked.rollout, *(s.body for s in (*checked.updates, *checked.evals))) for line in part)
    calls = [e for e in walk(*_expressions(lines)) if e.op == "call" and e.args[0] is response]
    return first_reader(checked, [call.attr("model") for call in calls] or checked.models)


def first_reader(checked: Checked, models: Iterable[str]) -> str:
    """A policy among `models`, else another."""
    return min(models, key=lambda name: READERS.index(checked.models[name].role))


def _expressions(statements: Iterable) -> list[Expr]:
    def of(statement) -> Expr:
        if isinstance(statement, typed.Keep):
            return statement.condition
        return statement.objective if isinstance(statement, typed.Train) else statement.expr

    return [of(s) for s in statements]
