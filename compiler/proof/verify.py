"""Proves of a plan, before anything starts, what would otherwise be found out by a hanging or wrong run.

Every value is made before it is used, and lies where it is used; every weight arrives exactly once; degrees divide what
they cut; all ranks walk one list of steps, so that each meets its peers in every transfer and collective.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable, Iterator, Optional

from compiler import codec
from compiler.groups import group_faults
from compiler.plan import ChangedPlan, Plan
from compiler.proof.arrival import arrival_faults
from compiler.proof.expressions import expression_faults
from compiler.proof.objectives import objective_faults
from compiler.proof.residence import residence_faults
from compiler.proof.retention import retention_faults
from compiler.proof.sections import section_faults
from compiler.proof.wellformed import all_steps, reference_faults, shape_of, table_faults
from compiler.resharding.transitions import strategy_of, weight_transfer
from compiler.steps import HOME, UpdateLoop
from rlhf_dsl.diagnostics import fault

CALLS = frozenset(("generate", "forward", "train"))
MADE = frozenset(("data", "generate", "reply", "call", "pyop", "next_state"))  # a step makes them, equations cannot


def load_plan(path: Path) -> Plan:
    """A plan file, verified.

    Raises DiagnosticError P0201 (no plan), P0203 (one that was changed after it was written), P0202 (one
    that does not hold together)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise fault("P0201", place=str(path), reason=getattr(error, "strerror", None) or "not text") from None
    try:
        plan = Plan.from_json(text)
    except ChangedPlan:
        raise fault("P0203", place=str(path)) from None
    except codec.CodecError as error:
        raise fault("P0201", place=str(path), reason=str(error)) from None
    verify_plan(plan, str(path))
    return plan


def verify_plan(plan: Plan, place: str = "") -> None:
    """Raises DiagnosticError P0202 with the first thing that is wrong."""
    reason = next(faults(plan), None)
    if reason is not None:
        raise fault("P0202", place=place, reason=reason)


def walk(plan: Plan) -> Iterator[Any]:
    """Every step of a plan, those of update loops after their loop, in an order that all ranks share."""
    return (step for _, step in all_steps(plan))


def faults(plan: Plan) -> Iterator[str]:
    """Everything that is wrong, the most basic first; later checks rely on earlier ones."""
    checks = (table_faults, expression_faults, group_faults, reference_faults, section_faults, _call_faults,
              _flow_faults, residence_faults, retention_faults, objective_faults, _weight_faults)
    for check in checks:
        found = False
        try:
            for reason in check(plan):
                found = True
                yield reason
        except codec.CodecError as error:
            found = True
            yield str(error)
        if found:
            return


# ---- calls ---------------------------------------------------------------------------------------

def _call_faults(plan: Plan) -> Iterator[str]:
    """Each transfer serves one call, in whose layout it begins or ends."""
    calls: dict[str, Any] = {}
    for where, step in all_steps(plan):
        if step.op in CALLS and calls.setdefault(step.name, step) is not step:
            yield f"{where} has the name of another call, `{step.name}`"
    for where, step in all_steps(plan):
        if step.op != "transfer":
            continue
        if step.call not in calls:
            yield f"{where} `{step.name}` serves no call"
        elif calls[step.call].layout not in (step.src, step.dst):
            yield f"{where} `{step.name}` does not go to the layout of `{step.call}`, or come from it"


# ---- values --------------------------------------------------------------------------------------

def _flow_faults(plan: Plan) -> Iterator[str]:
    setup = _Flow(plan, "setup", frozenset())
    yield from setup.walk(plan.setup)
    changing = {s.model for _, s in all_steps(plan) if s.op == "train"}
    changing |= {s.args[1] for _, s in all_steps(plan) if s.op == "action" and len(s.args) > 1}
    ready = frozenset(s.dst for s in plan.setup if s.op == "reshard" and s.model not in changing)
    begun = _Flow(plan, "ahead", ready)
    yield from begun.walk(s for s in plan.steps if getattr(s, "ahead", 0))
    flow = _Flow(plan, "steps", ready)
    flow.home, flow.keeps, flow.following = set(begun.home), begun.keeps, _Flow(plan, "ahead", ready)
    yield from flow.walk(plan.steps)
    yield from _ahead_faults(plan)
    for section in plan.evals:
        yield from _Flow(plan, section.name, ready).walk(section.steps)
    yield from _training_faults(plan)


class _Flow:
    """What is known where, at a point of one section.

    keeps: how many stand above; home: ids of expressions; weights: layouts with some
    there, made: by call, what was moved to it and what it has made
    following: of the rows of the next iteration
    """

    def __init__(self, plan: Plan, where: str, weights: frozenset[str]) -> None:
        self.plan, self.where = plan, where
        self.home: set[int] = set()
        self.keeps = 0
        self.there: dict[str, set[int]] = {}
        self.made: dict[str, set[int]] = {}
        self.following: Optional[_Flow] = None
        self.weights = set(weights)
        self.checks = {
            "load": self._load, "reshard": self._reshard, "transfer": self._transfer, "generate": self._generate,
            "forward": self._forward, "equation": self._equation, "pyop": self._pyop, "reply": self._pyop,
            "keep": self._keep, "record": self._evaluate, "next_state": self._next_state, "statistics": self._statistics,
            "train": self._train, "update": self._update,
        }

    def walk(self, steps: Iterable[Any]) -> Iterator[str]:
        for i, step in enumerate(steps):
            flow = self.following if getattr(step, "ahead", 0) and self.following else self
            check = flow.checks.get(step.op)
            for reason in check(step) if check else ():
                yield f"{self.where}[{i}] `{step.name}`: {reason}"

    # ---- one kind of step each

    def _load(self, step: Any) -> Iterator[str]:
        exprs = self.plan.exprs
        self.home |= {i for i, e in enumerate(exprs) if e.op == "data" and e.attrs["column"] in step.columns}
        yield from ()

    def _reshard(self, step: Any) -> Iterator[str]:
        self.weights.add(step.dst)
        yield from ()

    def _transfer(self, step: Any) -> Iterator[str]:
        """Rows leave for a call before it computes, all at once, and its results come home after."""
        values = {v.expr for v in step.values}
        if step.src == HOME:
            yield from self._missing(values)
            if step.call in self.there:
                yield f"rows leave for `{step.call}` a second time"
            self.there[step.call] = values
            return
        for value in step.values:
            if value.expr not in self.made.get(step.call, ()):
                yield f"`{value.name}` is not at {step.src}"
        self.made.pop(step.call, None)
        self.home |= values

    def _computed(self, step: Any, results: Iterable[int]) -> Iterator[str]:
        results = set(results)
        yield from (self._too_early(i) for i in results if self._is_too_early(i))
        if step.name in self.made:
            yield "it computes a second time"
        self.made[step.name] = results

    def _generate(self, step: Any) -> Iterator[str]:
        if step.layout not in self.weights:
            yield f"no weights were moved to {step.layout}"
        if step.prompts not in self.there.get(step.name, set()):
            yield f"its prompts are not at {step.layout}"
        yield from self._computed(step, [step.expr])

    def _forward(self, step: Any) -> Iterator[str]:
        if step.response not in self.there.get(step.name, set()):
            yield f"its response is not at {step.layout}"
        yield from self._computed(step, (call.expr for call in step.calls))

    def _equation(self, step: Any) -> Iterator[str]:
        yield from self._evaluated(step.values)

    def _evaluated(self, values: Iterable[Any]) -> Iterator[str]:
        """Once. What was a part of something before is there already, and only gets its name."""
        for value in values:
            if value.expr in self.home:
                yield f"`{value.name}` was known before"
            yield from self._missing([value.expr])
            self.home.add(value.expr)

    def _pyop(self, step: Any) -> Iterator[str]:
        if step.expr in self.home:
            yield "it is called a second time"
        yield from self._missing(self.plan.exprs[step.expr].args)
        self.home.add(step.expr)

    def _evaluate(self, step: Any) -> Iterator[str]:
        yield from self._missing([step.expr])

    def _keep(self, step: Any) -> Iterator[str]:
        yield from self._evaluate(step)
        self.keeps = step.index

    def _next_state(self, step: Any) -> Iterator[str]:
        yield from self._missing([step.expr])
        exprs = self.plan.exprs
        self.home |= {i for i, e in enumerate(exprs) if e.op == "next_state" and e.attrs["name"] == step.name}

    def _statistics(self, step: Any) -> Iterator[str]:
        yield from self._evaluated(step.exprs)

    def _train(self, step: Any) -> Iterator[str]:
        exprs, there = self.plan.exprs, self.there.get(step.name, set())
        for call in step.calls:
            if not exprs[call.expr].args or exprs[call.expr].args[0] not in there:
                yield f"the response of `{call.name}` is not at {step.layout}"
        for value in step.constants:
            yield from self._missing([value.expr])
            if exprs[value.expr].dims and value.expr not in there:
                yield f"`{value.name}` is not at {step.layout}"
        known = {v.expr for v in (*step.calls, *step.constants)}
        yield from self._missing([step.partial], known)
        yield from self._computed(step, (call.expr for call in step.calls))

    def _update(self, loop: UpdateLoop) -> Iterator[str]:
        """Rows of a mini-batch are others than those of the iteration: what was moved out before does not count."""
        yield from self.walk(loop.before)
        body = _Flow(self.plan, f"{self.where}.{loop.name}.body", frozenset(self.weights))
        body.home, body.keeps = set(self.home), self.keeps
        yield from body.walk(loop.body)

    # ---- expressions

    def _missing(self, ids: Iterable[int], known: Iterable[int] = ()) -> Iterator[str]:
        """Leaves below `ids` that no step has made; they are looked for at home, or in `known` where it is given."""
        present = set(known) or self.home
        stack, seen = list(ids), set()
        while stack:
            i = stack.pop()
            row = self.plan.exprs[i]
            if i in seen or i in present:
                continue
            seen.add(i)
            if self._is_too_early(i):
                yield self._too_early(i)
            elif row.op in MADE:
                yield f"it reads exprs[{i}], {_told(row)}, before that is made"
            else:
                stack.extend(row.args)

    def _is_too_early(self, i: int) -> bool:
        """Whether an expression is of rows that a keep leaves which does not stand above."""
        return self.plan.exprs[i].attrs.get("keep", 0) > self.keeps

    def _too_early(self, i: int) -> str:
        row = self.plan.exprs[i]
        return f"it needs exprs[{i}], a `{row.op}`, of the rows that keep {row.attrs['keep']} leaves, before that"


def _told(row: Any) -> str:
    words = [str(row.attrs[k]) for k in ("model", "operation", "name", "column") if k in row.attrs]
    return f"a `{row.op}` ({'.'.join(words)})"


def _ahead_faults(plan: Plan) -> Iterator[str]:
    """The next batch is sampled by the weights that this iteration's updates start with."""
    trained = False
    for i, step in enumerate(plan.steps):
        trained |= step.op in ("update", "action")
        if trained and step.op in ("reshard", "generate") and step.ahead:
            yield f"steps[{i}] `{step.name}` is of the next iteration, but stands below what changes the weights"
        if getattr(step, "ahead", 0) not in (0, plan.run.lag):
            yield f"steps[{i}] `{step.name}` is {step.ahead} iterations ahead, the run {plan.run.lag}"


def _training_faults(plan: Plan) -> Iterator[str]:
    """In a mini-batch: one optimizer step for each model that was trained, and all of its outputs before it."""
    for loop in (s for s in plan.steps if isinstance(s, UpdateLoop)):
        trained = [s.model for s in loop.body if s.op == "train"]
        stepped = [s.model for s in loop.body if s.op == "optimizer"]
        if sorted(trained) != sorted(stepped) or len(set(trained)) != len(trained):
            yield f"`{loop.name}` trains {', '.join(trained) or 'nothing'} and steps {', '.join(stepped) or 'nothing'}"
        at = {s.model: i for i, s in enumerate(loop.body) if s.op == "optimizer"}
        for i, step in enumerate(loop.body):
            if step.op in ("forward", "train") and i > at.get(step.model, i):
                yield f"`{loop.name}` computes `{step.name}` of {step.model} after its optimizer step"
        if any(plan.models[m].optimizer is None for m in stepped):
            yield f"`{loop.name}` steps a model without an optimizer"


# ---- weights -------------------------------------------------------------------------------------

def _weight_faults(plan: Plan) -> Iterator[str]:
    for where, step in all_steps(plan):
        if step.op != "reshard":
            continue
        shape, role = shape_of(plan, step.model), plan.models[step.model].role
        strategy = strategy_of(plan.layouts, step.src, step.dst)
        if step.strategy != strategy:
            yield f"{where} says `{step.strategy}`, its layouts say `{strategy}`"
            continue
        transfer = weight_transfer(shape, role, plan.layouts, step.src, step.dst)
        if transfer.total_bytes != step.total_bytes:
            yield f"{where} says {step.total_bytes} bytes, its layouts say {transfer.total_bytes}"
        yield from (f"{where}: {reason}" for reason in arrival_faults(transfer))
