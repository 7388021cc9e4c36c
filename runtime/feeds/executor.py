"""The executor, fed: what comes from data, models and Python ops is taken from the feed, all else is the runtime's own."""

from __future__ import annotations

import functools
from typing import Any, Optional, Union

import torch
from torch import Tensor

from compiler.exprs import call_temperature
from compiler.plan import Generate, KeepRows, Load, Plan, PyOpCall, Reply, Reshard, TrainStep, Transfer, UpdateLoop
from compiler.rows import home_range
from rlhf_dsl.builtins import call_text
from rlhf_dsl.typed import Checked, Expr
from runtime.executor import calls, loading, model_calls
from runtime.executor.executor import Executor
from runtime.executor.models import layouts_of
from runtime.executor.scope import Scope
from runtime.feeds.engine import FeedEngine, numbered
from runtime.feeds.feed import FedResponse, Feed
from runtime.sequences import Sequences, ragged_index
from runtime.values import Value, from_lists
from runtime.world import World


class FeedModels:
    """Stands where `executor.models.Models` does: one fed engine a model."""

    def __init__(self, plan: Plan, values) -> None:
        self.layouts = layouts_of(plan)
        self.engines = {name: FeedEngine(functools.partial(values, name)) for name in plan.models}
        self.tokenizers: dict[str, None] = dict.fromkeys(plan.models)
        self.on_step = lambda model: None

    def engine(self, layout: str) -> FeedEngine:
        return self.engines[layout.split(".")[0]]

    def optimizer_step(self, model: str) -> tuple[float, float]:
        self.on_step(model)
        return 0.0, 0.0


class FeedExecutor(Executor):
    """One shard of an evaluation.

    trains: by update and model; gradients: likewise, for each mini-batch the gradient of the objective as written with
    respect to each call, over all samples of the iteration, as far as this shard's rows contribute
    """

    def __init__(self, plan: Plan, checked: Checked, world: World, feed: Feed, dtype: torch.dtype, shuffle: bool) -> None:
        self.dtype = dtype
        super().__init__(plan, world, FeedModels(plan, self._call_value), {}, {})
        self.feed, self.checked, self.shuffle = feed, checked, shuffle
        self.responses: list[Expr] = []
        self.fed: dict[Expr, FedResponse] = {}
        self.scope: Optional[Scope] = None
        self.update_scopes: list[tuple[int, Scope]] = []
        self.gradients: dict[tuple[int, str], list[dict[str, Tensor]]] = {}
        self.models.on_step = self._collect
        updates = [u for u in plan.steps if isinstance(u, UpdateLoop)]
        self.trains = {(u.index, s.model): s for u in updates for s in u.body if isinstance(s, TrainStep)}
        self._fed_calls: dict[tuple, tuple[Tensor, Tensor]] = {}

    # ---- what the feed stands for

    def _seed_states(self, scope: Scope) -> None:
        self.scope = scope
        for name, value in self.feed.state.items():
            if name not in self.states:
                self.feed.refuse(f"`state.{name}`: there is no such state")
            if not isinstance(value, (int, float)):
                self.feed.refuse(f"`state.{name}`: a number is expected, found {value!r}")
            self.states[name] = float(value)
        super()._seed_states(scope)

    def _load(self, step: Load, scope: Scope) -> None:
        root = step.name
        size = self.plan.dims[root].size
        scope.rows.size[root], scope.rows.position[root] = size, torch.arange(size)
        columns = next(d for d in self.plan.data if d.root == root).columns
        scope.refresh()
        for column in columns:
            expr = self.data_exprs.get(column.name)
            if expr is not None and column.response:
                self._respond(scope, expr, column.name)
        scope.refresh()
        for column in columns:
            expr = self.data_exprs.get(column.name)
            if expr is not None and not column.response:
                scope.env[expr] = self.column(scope, column.name, expr)

    def column(self, scope: Scope, name: str, expr: Expr) -> Value:
        """This shard's rows of a column; a text column may be missing in the feed."""
        given = self.feed.data.get(name)
        if given is None and expr.type.elem != "text":
            self.feed.refuse(f"the column `{name}` is missing under `data`")
        start, stop = home_range(self.plan.dims[expr.type.dims[0]].size, self.world.size, self.world.rank)
        if given is None:
            return Value(expr.type.dims, [""] * (stop - start))
        rows = self.feed.flatten(given, [self.plan.dims[expr.type.dims[0]].size], f"data.{name}")
        return self._from_lists(scope, rows[start:stop], expr, f"data.{name}")

    def _from_lists(self, scope: Scope, nested: list, expr: Expr, path: str) -> Value:
        try:
            return from_lists(nested, expr.type.dims, scope.frame, expr.type.elem, self.dtype)
        except ValueError as error:
            self.feed.refuse(f"`{path}`: {error}")

    def _reply(self, step: Union[Reply, Generate], scope: Scope) -> None:
        expr = self.exprs[step.expr]
        self._respond(scope, expr, expr.attr("name"))
        scope.refresh()

    def _respond(self, scope: Scope, expr: Expr, name: str) -> None:
        """A response of which only lengths, masks and perhaps texts are known."""
        lead, bound = self.dims.sample_dims(expr.type.dims) or expr.type.dims[:-1], self.plan.dims[expr.type.dims[-1]].size
        given = self.feed.response(name, [self.plan.dims[d].size for d in lead], bound, self.dtype)
        self.fed[expr] = given
        self.responses.append(expr)
        full = given.lengths if given.own is None else torch.tensor([len(row) for row in given.own], dtype=torch.int64)
        loading.set_lengths(scope, name, expr.type.dims, torch.stack([torch.ones_like(full), full, given.lengths], 1))
        scope.rows.own[name] = given.own is not None
        here = self.samples_here(scope, lead)
        own = None if given.own is None else torch.tensor([x for i in here.tolist() for x in given.own[i]], dtype=torch.bool)
        scope.env[expr] = Value(expr.type.dims, Sequences(
            numbered(len(self.responses) - 1, here, full[here]), torch.ones_like(here), full[here], own,
            None if given.logprobs is None else given.logprobs[ragged_index(given.lengths, here)], given.truncated[here]))
        for field in self.fields.get(expr, []):
            self.fill_field(scope, field)

    def samples_here(self, scope: Scope, lead: tuple[str, ...]) -> Tensor:
        """The samples of this shard's rows, by their numbers in the iteration."""
        return scope.rows.units(lead, scope.rows_of(lead[0], self.world.rank))

    def fill_field(self, scope: Scope, field: Expr) -> None:
        """`y.truncated`, `y.logprobs` or `y.text` for this shard's rows."""
        response = field.args[0]
        scope.env[field] = Value(field.type.dims, self._field(scope, field.attr("field"), response))

    def _field(self, scope: Scope, kind: str, response: Expr) -> Any:
        batch, given = scope.env[response].data, self.fed[response]
        if kind == "truncated":
            return batch.truncated
        if kind == "text":
            here = self.samples_here(scope, self.dims.sample_dims(response.type.dims))
            return [given.text[i] if given.text else "" for i in here.tolist()]
        if batch.logprobs is None:
            self.feed.refuse(f"`responses.{model_calls.response_name(response)}` has no `logprobs`, which the program reads")
        return batch.logprobs

    def _pyop(self, step: PyOpCall, scope: Scope) -> None:
        self.fill_call(scope, self.exprs[step.expr])

    def fill_call(self, scope: Scope, expr: Expr) -> None:
        """A call or Python op straight from the feed, for this shard's rows."""
        if expr.op == "call":
            values, counts = self.call_value(expr, _is_update(expr))
            lead = self.dims.sample_dims(expr.args[0].type.dims)
            scope.env[expr] = Value(expr.type.dims, values[ragged_index(counts, self.samples_here(scope, lead))])
            return
        text = call_text(expr)
        nested = self._given(text, _is_update(expr))
        if not expr.type.dims:
            scope.env[expr] = self._from_lists(scope, nested, expr, f"calls: {text}")
            return
        rows = self.feed.flatten(nested, [self.plan.dims[expr.type.dims[0]].size], f"calls: {text}")
        start, stop = home_range(len(rows), self.world.size, self.world.rank)
        scope.env[expr] = self._from_lists(scope, rows[start:stop], expr, f"calls: {text}")

    def _given(self, text: str, update: bool) -> Any:
        found = self.feed.call(text, update)
        if found is None:
            self.feed.refuse(f"the call `{text}` is missing under `calls.{'update' if update else 'rollout'}`")
        return found

    def _call_key(self, call: Expr) -> tuple[str, str, int, float]:
        return call.attr("model"), call.attr("operation"), self.responses.index(call.args[0]), call_temperature(call)

    def call_value(self, call: Expr, update: bool) -> tuple[Tensor, Tensor]:
        """(packed values, elements of each sample) of a call over all samples."""
        return self._call_value(*self._call_key(call), update, call_text(call))

    def _call_value(self, model: str, operation: str, index: int, temperature: float, update: bool,
                    text: str = "") -> tuple[Tensor, Tensor]:
        """text: of a call that the plan does not make, since nothing needs it but the answer."""
        call = (model, operation, index, temperature)
        if (*call, update) not in self._fed_calls:
            self._fed_calls[*call, update] = self._read_call(call, update, text)
        return self._fed_calls[*call, update]

    def _read_call(self, call: tuple[str, str, int, float], update: bool, text: str) -> tuple[Tensor, Tensor]:
        """From the feed, under any of the texts in which the program writes this call."""
        _, operation, index, _ = call
        response = self.responses[index]
        known = [e for e in self.exprs if e.op == "call" and e.args[0] in self.responses and self._call_key(e) == call]
        texts = list(dict.fromkeys([*map(call_text, known), *filter(None, [text])]))
        text = next((t for t in texts if self.feed.call(t, update) is not None), texts[0])
        lead = self.dims.sample_dims(response.type.dims)
        rows = self.feed.flatten(self._given(text, update), [self.plan.dims[d].size for d in lead], f"calls: {text}")
        if operation in model_calls.PER_RESPONSE:
            return self.feed.numbers(rows, f"calls: {text}", self.dtype), torch.ones(len(rows), dtype=torch.int64)
        lengths = self.fed[response].lengths
        return self.feed.per_token(rows, lengths.tolist(), f"calls: {text}", self.dtype), lengths

    # ---- what happens beside the runtime's own

    def _transfer(self, step: Transfer, scope: Scope) -> None:
        if not isinstance(self.calls[step.call], Generate):
            super()._transfer(step, scope)

    def _compute(self, step: calls.Step, scope: Scope) -> None:
        if isinstance(step, Generate):
            self._reply(step, scope)
            return
        self.models.engines[step.model].update = _is_update(self.exprs[step.calls[0].expr])
        super()._compute(step, scope)

    def _refill(self, step: KeepRows, scope: Scope) -> None:
        """The feed has no further rows."""

    def readable(self, scope: Scope, response: Expr, model: str) -> Expr:
        return response

    def _reshard(self, step: Reshard, scope: Scope) -> None:
        """There are no weights."""

    _reload = _offload = _reshard

    def _action(self, step: Any, scope: Scope) -> None:
        """There is nothing to save."""

    def on_minibatch(self, loop: UpdateLoop, scope: Scope) -> None:
        self.update_scopes.append((loop.index, scope))

    def _collect(self, model: str) -> None:
        key = self.update_scopes[-1][0], model
        engine, step = self.models.engines[model], self.trains[key]
        sign = -1.0 if step.maximize else 1.0
        found = {}
        for named in step.calls:
            expr = self.exprs[named.expr]
            leaf = engine.leaf(*self._call_key(expr)[1:])
            found[call_text(expr)] = torch.zeros_like(leaf) if leaf.grad is None else sign * leaf.grad
        self.gradients.setdefault(key, []).append(found)
        engine.zero_grad()


def _is_update(expr: Expr) -> bool:
    return expr.attr("phase", "").startswith("update")
