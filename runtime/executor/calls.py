"""A model call on its way: its rows arrive at the layout, the model computes, its results leave for home.

The three are steps of a plan's own, so that calls of models on different ranks lie beside each other: a rank outside a
layout computes nothing and goes on. All ranks call `arrive` and `leave`, since each has rows at home; rows travel from
pair to pair, so a rank waits for what comes to it alone.
"""

from __future__ import annotations

import functools
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, Optional, Protocol, Union

from compiler.plan import Forward, Generate, TrainStep
from runtime.executor.generation import GenerateCall, ToldCall
from runtime.executor.model_calls import ForwardCall
from runtime.executor.scope import Scope
from runtime.executor.training import TrainCall

if TYPE_CHECKING:
    from runtime.executor.executor import Executor as PlanExecutor

KINDS = ("generate", "forward", "train")
Step = Union[Generate, Forward, TrainStep]


class ModelCall(Protocol):
    def arrive(self) -> None:
        """Rows go from home to the layout."""

    def compute(self, engine: Any) -> None:
        """engine: this rank's, None outside the layout."""

    def leave(self) -> None:
        """Results come home, into the scope."""


class Aside:
    """A call that computes in a thread of its own until its results leave, while this rank goes on with the plan.

    It is for ranks that are in no other layout: what they are needed for meanwhile are their rows at home.
    """

    def __init__(self, call: ModelCall, thread: Executor) -> None:
        self._call, self._thread = call, thread
        self._done: Optional[Future] = None

    def arrive(self) -> None:
        self._call.arrive()

    def compute(self, engine: Any) -> None:
        self._done = self._thread.submit(self._call.compute, engine)

    def leave(self) -> None:
        if self._done is not None:
            self._done.result()
        self._call.leave()


def begin(executor: "PlanExecutor", step: Step, scope: Scope) -> ModelCall:
    """The call of `step`; what it reads at home is evaluated."""
    call = _BEGINNINGS[step.op](executor, step, scope)
    return Aside(call, executor.thread) if executor.goes_aside(step) else call


def _generate(executor: "PlanExecutor", step: Generate, scope: Scope) -> ModelCall:
    expr, tokenizer = executor.exprs[step.expr], executor.models.tokenizers[step.model]
    executor.value(scope, expr.args[0])
    if expr in executor.told:
        return ToldCall(scope, expr, executor.told.pop(expr))
    draws = executor.plan.run.seed, executor.number_of(scope)
    return GenerateCall(executor.world, executor.models.layouts[step.layout], scope, expr, tokenizer, draws)


def _forward(executor: "PlanExecutor", step: Forward, scope: Scope) -> ForwardCall:
    exprs = {call.name: executor.exprs[call.expr] for call in step.calls}
    response = executor.exprs[step.response]
    if all(expr.attr("operation") == "score" for expr in exprs.values()):
        response = executor.readable(scope, response, step.model)
    return ForwardCall(executor.world, executor.models.layouts[step.layout], scope, step, exprs, response,
                       step.name in executor.retained)


def _train(executor: "PlanExecutor", step: TrainStep, scope: Scope) -> TrainCall:
    value = functools.partial(executor.value, scope)
    return TrainCall(executor.world, executor.models.layouts[step.layout], scope, step, executor.exprs, value)


_BEGINNINGS = {"generate": _generate, "forward": _forward, "train": _train}
