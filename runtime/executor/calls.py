"""A model call on its way: its rows arrive at the layout, the model computes, its results leave for home.

The three are steps of a plan's own, so that calls of models on different ranks lie beside each other: a rank outside a
layout computes nothing and goes on. All ranks of the job take part in `arrive` and in `leave`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol, Union

from compiler.plan import Forward, Generate, TrainStep
from runtime.executor.generation import GenerateCall
from runtime.executor.model_calls import ForwardCall
from runtime.executor.scope import Scope
from runtime.executor.training import TrainCall

if TYPE_CHECKING:
    from runtime.executor.executor import Executor

KINDS = ("generate", "forward", "train")
Step = Union[Generate, Forward, TrainStep]


class ModelCall(Protocol):
    def arrive(self) -> None:
        """Rows go from home to the layout."""

    def compute(self, engine: Any) -> None:
        """engine: this rank's, None outside the layout."""

    def leave(self) -> None:
        """Results come home, into the scope."""


def begin(executor: "Executor", step: Step, scope: Scope) -> ModelCall:
    """The call of `step`; what it reads at home is evaluated."""
    return _BEGINNINGS[step.op](executor, step, scope)


def _generate(executor: "Executor", step: Generate, scope: Scope) -> GenerateCall:
    expr, tokenizer = executor.exprs[step.expr], executor.models.tokenizers[step.model]
    executor.value(scope, expr.args[0])
    draws = executor.plan.run.seed, executor.iteration.number
    return GenerateCall(executor.world, executor.models.layouts[step.layout], scope, expr, tokenizer, draws)


def _forward(executor: "Executor", step: Forward, scope: Scope) -> ForwardCall:
    exprs = {call.name: executor.exprs[call.expr] for call in step.calls}
    response = executor.exprs[step.response]
    if all(expr.attr("operation") == "score" for expr in exprs.values()):
        response = executor.readable(scope, response, step.model)
    return ForwardCall(executor.world, executor.models.layouts[step.layout], scope, step, exprs, response)


def _train(executor: "Executor", step: TrainStep, scope: Scope) -> TrainCall:
    value = functools.partial(executor.value, scope)
    return TrainCall(executor.world, executor.models.layouts[step.layout], scope, step, executor.exprs, value)


_BEGINNINGS = {"generate": _generate, "forward": _forward, "train": _train}
