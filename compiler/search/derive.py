"""What a checked program asks of its models in an iteration."""

from __future__ import annotations

import dataclasses
import math
from typing import Iterable, Iterator, Mapping

from compiler.cost.workload import FORWARD, GENERATE, TRAIN, Call, PlacedModel, Stage, Workload
from compiler.names import update as update_phase
from compiler.search.asked import asked_of_models, pairs_together, sets_alone
from compiler.separate import Separator, unit_samples
from compiler.shapes import ModelShape
from rlhf_dsl.typed import Checked, Expr, Interner, Update

PROMPT = 64  # tokens, where nothing is assumed


def workload_of(checked: Checked, shapes: Mapping[str, ModelShape]) -> Workload:
    """Generation, scoring and each update as stages; calls of evaluations are there for their memory alone.

    A model scores a response once, however many of its results are used, and a train statement sees all responses that
    its objective reads. Lengths are those of `assume:`, else the bound of the response.
    """
    asked = asked_of_models(checked)
    models = tuple(PlacedModel(m.name, m.role, shapes[m.name], m.optimizer is not None, asked[m.name])
                   for m in checked.models.values())
    reader = _Reader(checked)
    rollout = [s.expr for s in checked.rollout if hasattr(s, "expr")]
    evals = [s.expr for section in checked.evals for s in section.body if hasattr(s, "expr")]
    generates = (*reader.generates(rollout), *_uncounted(reader.generates(evals)))
    forwards = (*reader.forwards(rollout, set()), *_uncounted(reader.forwards(evals, set())))
    stages = [Stage("generation", generates), Stage("scoring", forwards)]
    stages += [Stage(_name(update, len(checked.updates)), reader.update(update)) for update in checked.updates]
    stages = [stage for stage in stages if stage.calls]
    return Workload(models, tuple(stages), pairs_together(checked), sets_alone(checked))


def _uncounted(calls: Iterable[Call]) -> Iterator[Call]:
    return (dataclasses.replace(call, counted=False) for call in calls)


def _name(update: Update, count: int) -> str:
    return "training" if count == 1 else f"training {update.index + 1}"


class _Reader:
    """Finds calls in expressions."""

    def __init__(self, checked: Checked) -> None:
        self.checked = checked
        items = {key: value for c in checked.constraints if not c.model for key, value in c.items}
        self.prompt = float(items.get("prompt", PROMPT))
        self.assumed, self.longest = items.get("response"), items.get("longest", 0)
        self.scored: set[tuple[str, Expr]] = set()  # (model, response) that an earlier stage has scored

    def generates(self, roots: Iterable[Expr]) -> tuple[Call, ...]:
        return tuple(dataclasses.replace(self._call(e.attr("model"), GENERATE, [e]), samples=self._samples(e))
                     for e in _walk(roots) if e.op == "generate")

    def _samples(self, response: Expr) -> int:
        """Of each prompt."""
        return max(1, self._rows(response) // self._rows(response.args[0]))

    def forwards(self, roots: Iterable[Expr], trained: set[str]) -> tuple[Call, ...]:
        """trained: models that the section trains, whose calls belong to training."""
        asked = {(e.attr("model"), e.args[0]): None for e in _walk(roots) if e.op == "call"}
        fresh = [pair for pair in asked if pair not in self.scored and pair[0] not in trained]
        self.scored.update(fresh)
        return tuple(self._call(model, FORWARD, [response]) for model, response in fresh)

    def update(self, update: Update) -> tuple[Call, ...]:
        objectives = {train.model: train.objective for train in update.trains}
        calls = list(self.forwards(objectives.values(), set(objectives)))
        for model, objective in objectives.items():
            called = [e for e in _walk([objective]) if e.op == "call" and e.attr("model") == model]
            responses = list(dict.fromkeys(e.args[0] for e in called if e.grad))
            call = self._call(model, TRAIN, responses, update.epochs, update.minibatches)
            calls.append(dataclasses.replace(call, together=self._together(update, model, objective)))
        return tuple(calls)

    def _together(self, update: Update, model: str, objective: Expr) -> int:
        """Samples of a unit: see `compiler.separate`."""
        parts = Separator(model, update_phase(update.index), self.checked.dims, {}, Interner()).separate(objective)
        return unit_samples(self.checked.dims, parts.unit, dict.fromkeys(call.args[0] for call in parts.calls))

    def _call(self, model: str, kind: str, responses: list[Expr], epochs: int = 1, minibatches: int = 1) -> Call:
        rows = [self._rows(r) for r in responses]
        tokens = sum(n * self._length(r) for n, r in zip(rows, responses))
        longest = max(max(min(self.longest, self._bound(r)), self._length(r)) for r in responses)
        return Call(model, kind, sum(rows), self.prompt, tokens / sum(rows), longest, epochs, minibatches)

    def _rows(self, response: Expr) -> int:
        dims = (self.checked.dims[name] for name in response.type.dims)
        return math.prod(dim.size for dim in dims if not dim.ragged)

    def _length(self, response: Expr) -> float:
        bound = self._bound(response)
        return float(min(self.assumed or bound, bound))

    def _bound(self, response: Expr) -> int:
        return next((d.size for d in map(self.checked.dims.get, response.type.dims) if d.ragged), 1)


def _walk(roots: Iterable[Expr]) -> Iterator[Expr]:
    """Every expression that the roots are made of, once, arguments first."""
    seen: set[int] = set()
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        expr, done = stack.pop()
        if done:
            yield expr
        elif id(expr) not in seen:
            seen.add(id(expr))
            stack.append((expr, True))
            stack.extend((arg, False) for arg in reversed(expr.args))
