"""The course of a checked program in one process: language.md's semantics, row by row, with no plan at all."""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Mapping, Optional, Sequence

import torch
from torch import Tensor

from rlhf_dsl.typed import Bind, Checked, Expr, Keep, Metric, PyOp, Train, Update
from tests.oracle.data import Source
from tests.oracle.draws import permuted, uniform
from tests.oracle.equations import Cells, Scope, constant, number, pick
from tests.oracle.models import Model, Tokens, copied
from tests.oracle.sampling import Options, Response, sample

BUILTIN = Path(__file__).resolve().parents[2] / "programs" / "models"
PER_RESPONSE = ("score", "last_value")
Places = tuple[int, ...]
Told = Mapping[str, Sequence[Mapping[Places, list[int]]]]


@dataclass
class Iteration:
    """metrics: as the runtime names them, None where no row took part."""

    number: int
    metrics: dict[str, Optional[float]] = field(default_factory=dict)
    logs: dict[str, list[float]] = field(default_factory=dict)  # metrics of updates, a number a step


class Oracle:
    """One run of a program.

    told: response name → for each time it was generated, tokens by (row, sample): to follow instead of those drawn here
    generated: all that was sampled, in the same form
    """

    def __init__(self, program: Checked, told: Optional[Told] = None) -> None:
        _refuse(program)
        self.program, self.seed, self.told = program, program.run.seed, told or {}
        self.folder = Path(program.path).resolve().parent
        self.models = {name: Model(spec, self._model_folder(spec.source), self._steps_of(name) * program.run.steps)
                       for name, spec in program.models.items()}
        self.tokens = {name: Tokens(self._model_folder(spec.source)) for name, spec in program.models.items()}
        self.sources = {d.root: Source(d, self.folder, self.seed) for d in program.data}
        self.columns = {c.name: (c, d) for d in program.data for c in d.columns}
        self.ops = {name: _imported(op) for name, op in program.ops.items()}
        nothing = Scope(program.dims, {}, self._leaf)
        self.states = {name: nothing.scalar(s.init).item() for name, s in program.states.items()}
        self.drawn: dict[str, list[tuple[int, dict]]] = {}
        self.generated: dict[str, list[dict[Places, Response]]] = {}
        self.current = Iteration(0)
        self.samplers = self.models  # what the batch is sampled by

    def run(self, steps: Optional[int] = None) -> list[Iteration]:
        """Iteration 0 holds the evaluations before the first step."""
        last = self.program.run.steps if steps is None else steps
        found = [self._evaluations(Iteration(0), self.program.evals)]
        for n in range(1, last + 1):
            due = [e for e in self.program.evals if n == last or e.every and n % e.every == 0]
            found.append(self._evaluations(self._iteration(n), due))
        return found

    def weights(self) -> dict[str, dict[str, Tensor]]:
        return {name: model.weights() for name, model in self.models.items()}

    # ---- iterations

    @torch.no_grad()
    def _evaluations(self, into: Iteration, sections) -> Iteration:
        for section in sections:
            index = self.program.evals.index(section)
            self.drawn = {root: self.sources[root].first(self.program.dims[root].size) for root in section.roots}
            self.current = Iteration(0)
            scope = self._scope(section.roots)
            for statement in section.body:
                if isinstance(statement, Metric):
                    into.metrics[f"{_section('eval', index)}/{statement.name}"] = scope.scalar(statement.expr).item()
                else:
                    scope.evaluate(statement.expr)
        return into

    def _iteration(self, n: int) -> Iteration:
        self.current = Iteration(n)
        in_eval = {root for section in self.program.evals for root in section.roots}
        roots = [d.root for d in self.program.data if d.root not in in_eval]
        sizes = {root: self.program.dims[root].size for root in roots}
        self.drawn = {root: self.sources[root].drawn((n - 1) * size, size) for root, size in sizes.items()}
        scope = self._scope(roots)
        with torch.no_grad():
            self._rollout(scope)
        if self.program.run.lag:  # one update old when the next batch is sampled
            self.samplers = {name: copy.deepcopy(model) for name, model in self.models.items()}
        if not self._is_empty(scope):
            with torch.no_grad():
                states = {name: float(scope.scalar(s.next)) for name, s in self.program.states.items()}
            for update in self.program.updates:
                self._update(update, scope)
            self.states |= states
        for action in self.program.run.actions:
            if n % action.every == 0 and action.kind != "save":
                source, target, *decay = action.args
                copied(self.models[source], self.models[target], *decay)
        return self.current

    def _scope(self, roots) -> Scope:
        rows = {root: list(range(self.program.dims[root].size)) for root in roots}
        scope = Scope(self.program.dims, rows, self._leaf)
        for name, (column, data) in self.columns.items():
            if column.response and data.root in roots:
                scope.lengths[column.type.dims[-1]] = {
                    (i,): len(self._response_row(name, i).tokens) for i in scope.rows[data.root]}
        return scope

    def _rollout(self, scope: Scope) -> None:
        for statement in self.program.rollout:
            if isinstance(statement, Keep):
                scope.keeps[statement.index] = (statement.condition.type.dims, scope.evaluate(statement.condition))
            elif isinstance(statement, Bind):
                scope.evaluate(statement.expr)
        for statement in self.program.rollout:
            if isinstance(statement, Metric):
                keeps = _keeps_read(statement.expr)
                nothing = keeps > 0 and self._is_empty(scope, keeps)
                self.current.metrics[statement.name] = None if nothing else float(scope.scalar(statement.expr))

    def _is_empty(self, scope: Scope, keeps: Optional[int] = None) -> bool:
        """Whether the keeps, or the first few of them, leave some root dim without a row."""
        keeps = len(scope.keeps) if keeps is None else keeps
        roots = {dims[0] for i, (dims, _) in scope.keeps.items() if i <= keeps}
        return any(not any(scope.kept({root: row}, keeps) for row in scope.rows[root]) for root in roots)

    # ---- updates

    def _update(self, update: Update, outer: Scope) -> None:
        logs = self.current.logs
        for epoch in range(update.epochs):
            cuts = {root: self._cuts(outer, root, epoch, update.minibatches) for root in update.roots}
            for k in range(update.minibatches):
                rows = {root: cut[k] for root, cut in cuts.items()}
                if any(rows.values()):
                    self._minibatch(update, Scope(self.program.dims, {**outer.rows, **rows}, self._leaf, outer), logs)
        self.current.metrics |= {name: sum(values) / len(values) for name, values in logs.items()}

    def _order(self, root: str, epoch: int, rows: int) -> list[int]:
        return permuted(rows, self.seed, root, self.current.number, epoch)

    def _cuts(self, scope: Scope, root: str, epoch: int, k: int) -> list[list[int]]:
        order = self._order(root, epoch, len(scope.rows[root]))
        order = [row for row in order if scope.kept({root: row}, len(scope.keeps))]
        runs: list[list[int]] = [[] for _ in range(k)]
        for place, row in enumerate(order):
            runs[place * k // len(order)].append(row)
        return [sorted(run) for run in runs]

    def _minibatch(self, update: Update, scope: Scope, logs: dict[str, list[float]]) -> None:
        def log(name: str, value: float) -> None:
            logs.setdefault(name, []).append(value)

        for statement in update.body:
            if isinstance(statement, Train):
                objective = scope.scalar(statement.objective)
                self.models[statement.model].differentiate(-objective if statement.maximize else objective)
                log(f"{_section('train', update.index)}/{statement.model}", objective.item())
            elif isinstance(statement, Metric):
                log(statement.name, scope.scalar(statement.expr).item())
        for train in update.trains:
            rate, norm = self.models[train.model].step()
            log(f"{train.model}/grad_norm", norm)
            log(f"{train.model}/lr", rate)

    def _steps_of(self, model: str) -> int:
        updates = [u for u in self.program.updates if any(t.model == model for t in u.trains)]
        return sum(u.epochs * u.minibatches for u in updates)

    # ---- what is not an equation

    def _leaf(self, scope: Scope, expr: Expr) -> Cells:
        find = {"data": self._data, "state": self._state, "next_state": self._next_state, "generate": self._generate,
                "reply": self._reply, "call": self._call, "pyop": self._pyop, "field": self._field}
        if expr.op not in find:
            raise ValueError(f"the oracle does not know `{expr.op}`")
        return find[expr.op](scope, expr)

    def _data(self, scope: Scope, expr: Expr) -> Cells:
        column, data = self.columns[expr.attr("column")]
        if column.response:
            return {(i,): self._response_row(column.name, i) for i in scope.rows[data.root]}
        return {(i,): constant(self.drawn[data.root][i][1][column.field]) for i in scope.rows[data.root]}

    def _response_row(self, name: str, row: int) -> Response:
        column, data = self.columns[name]
        fields, tokens = self.drawn[data.root][row][1], self.tokens[column.policy or self._policy()]
        bound = self.program.dims[column.type.dims[-1]].size
        ids = tokens.text(fields[column.field])
        if column.after:
            prompt = tokens.prompt(fields[self.columns[column.after][0].field])
        else:
            prompt = tokens.begin() or ids[:1]
            ids = ids if tokens.begin() else ids[1:]
        return Response(prompt, *tokens.response(ids, bound))

    def _policy(self) -> str:
        """The model whose tokens a response of data or of given texts is made of."""
        policies = [name for name, spec in self.program.models.items() if spec.role == "policy"]
        return next(iter(policies or self.program.models))

    def _state(self, scope: Scope, expr: Expr) -> Cells:
        return {(): constant(self.states[expr.attr("name")])}

    def _next_state(self, scope: Scope, expr: Expr) -> Cells:
        return {(): scope.scalar(self.program.states[expr.attr("name")].next)}

    def _generate(self, scope: Scope, expr: Expr) -> Cells:
        models = self.samplers if self.current.number else self.models  # an evaluation takes the weights of now
        name, model, tokens = expr.attr("name"), models[expr.attr("model")], self.tokens[expr.attr("model")]
        dims, prompts, data = expr.type.dims, expr.args[0], scope.evaluate(expr.args[0])
        options = self._options(expr, tokens)
        times = self.generated.setdefault(name, [])
        told, found = self.told[name][len(times)] if self.told else {}, {}
        for at in scope.coordinates(dims[:-1]):
            stream, place = self.drawn[dims[0]][at[0]][0], self._sample_number(dims, at)
            prompt = tokens.prompt(pick(data, prompts.type.dims, at, dims[:-1]))
            found[at] = sample(model.logits_after, prompt, options, self._draws(name, stream, place), tokens.decode,
                               model.context, told.get(at))
        times.append(found)
        scope.lengths[dims[-1]] = {at: len(r.tokens) for at, r in found.items()}
        return found

    def _options(self, expr: Expr, tokens: Tokens) -> Options:
        bound = self.program.dims[expr.type.dims[-1]].size
        return Options(
            max_tokens=min(expr.attr("max_tokens") or bound, bound), temperature=expr.attr("temperature"),
            top_k=expr.attr("top_k") or 0, top_p=expr.attr("top_p") or 1.0, min_tokens=expr.attr("min_tokens") or 0,
            ends=tokens.ends, stop=tuple(expr.attr("stop") or ()))

    def _draws(self, name: str, row: int, sample_number: int) -> Callable[[int], float]:
        return lambda position: uniform(self.seed, name, self.current.number, row, sample_number, position)

    def _sample_number(self, dims: tuple[str, ...], at: tuple[int, ...]) -> int:
        """The place of a sample in its row's group, row-major over the group dims."""
        place = 0
        for dim, i in zip(dims[1:-1], at[1:]):
            place = place * self.program.dims[dim].size + i
        return place

    def _reply(self, scope: Scope, expr: Expr) -> Cells:
        prompts, texts = expr.args
        dims, tokens = expr.type.dims, self.tokens[expr.attr("model") or self._policy()]
        bound, cells = self.program.dims[dims[-1]].size, [scope.evaluate(a) for a in expr.args]
        found = {}
        for at in scope.coordinates(dims[:-1]):
            prompt, text = (pick(c, a.type.dims, at, dims[:-1]) for c, a in zip(cells, (prompts, texts)))
            found[at] = Response(tokens.prompt(prompt), *tokens.response(tokens.text(text), bound))
        scope.lengths[dims[-1]] = {at: len(r.tokens) for at, r in found.items()}
        return found

    def _call(self, scope: Scope, expr: Expr) -> Cells:
        response, operation = expr.args[0], expr.attr("operation")
        given, sampled = expr.attr("temperature"), response.attr("temperature", 1.0)
        responses, found = scope.evaluate(response), {}
        for at in scope.coordinates(response.type.dims[:-1]):
            values = self.models[expr.attr("model")].call(operation, responses[at], sampled if given is None else given)
            per_token = operation not in PER_RESPONSE
            found |= {(*at, i): v for i, v in enumerate(values)} if per_token else {at: values[0]}
        return found

    def _field(self, scope: Scope, expr: Expr) -> Cells:
        response, name = expr.args[0], expr.attr("field")
        cells, model = scope.evaluate(response), response.attr("model") or self._policy()
        if name == "logprobs":
            return {(*at, i): constant(v) for at, r in cells.items() for i, v in enumerate(r.logprobs)}
        if name == "truncated":
            return {at: r.truncated for at, r in cells.items()}
        return {at: self.tokens[model].decode(r.tokens) for at, r in cells.items()}

    def _pyop(self, scope: Scope, expr: Expr) -> Cells:
        function, dims = self.ops[expr.attr("name")], expr.type.dims
        args = [(a.type.dims, scope.evaluate(a)) for a in expr.args]
        ragged = next((d for d, _ in args if d and self.program.dims[d[-1]].ragged), None)
        per_token = bool(dims) and self.program.dims[dims[-1]].ragged
        lead, found = dims[:-1] if per_token else dims, {}
        for at in scope.coordinates(lead):
            result = function(*(self._argument(scope, cells, d, at, lead, ragged) for d, cells in args))
            found |= {(*at, i): constant(v) for i, v in enumerate(result)} if per_token else {at: constant(result)}
        return found

    def _argument(self, scope: Scope, cells: Cells, dims, at, lead, ragged) -> object:
        """A text or number, or the list of a row's tokens' values."""
        if dims != ragged:
            return _plain(pick(cells, dims, at, lead))
        row = tuple(dict(zip(lead, at))[d] for d in dims[:-1])
        return [_plain(cells[(*row, i)]) for i in scope.extent(dims[-1], dict(zip(dims, row)))]

    def _model_folder(self, source: str) -> Path:
        if source.startswith("builtin:"):
            return BUILTIN / source.removeprefix("builtin:")
        return self.folder / source if (self.folder / source).exists() else Path(source)


def _section(kind: str, index: int) -> str:
    return f"{kind}{index + 1}" if index else kind


def _plain(value: object) -> object:
    return value if isinstance(value, (bool, str)) else float(number(value))


def _imported(op: PyOp) -> Callable:
    spec = importlib.util.spec_from_file_location(op.module, op.file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, op.name)


def _keeps_read(expr: Expr) -> int:
    return max(expr.attr("keep", 0), *map(_keeps_read, expr.args), 0)


def _refuse(program: Checked) -> None:
    """Raises ValueError for a form that is not evaluated here."""
    refill = any(isinstance(s, Keep) and s.refill for s in program.rollout)
    batched = any(op.batched for op in program.ops.values())
    forms = {"`refill`": refill, "`run: epochs`": program.run.epochs, "batched ops": batched}
    found = [name for name, used in forms.items() if used]
    if found:
        raise ValueError(f"the oracle does not evaluate {', '.join(found)}")
