"""Faults of a runtime that runs through all the same: the tests that compare runs must see each of them."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator
from unittest import mock

from runtime.engines import megatron
from runtime.engines.sampler import SamplerEngine
from runtime.executor import model_calls, update


def _weights_stay(original: Callable) -> Callable:
    """The sampler draws by the weights that it began with."""
    def generate(self: SamplerEngine, *arguments: Any, **more: Any) -> Any:
        now = {name: tensor.clone() for name, tensor in self.weights.items()}
        for name, tensor in self.__dict__.setdefault("began_with", now).items():
            self.weights[name].copy_(tensor)
        drawn = original(self, *arguments, **more)
        for name, tensor in now.items():
            self.weights[name].copy_(tensor)
        return drawn

    return generate


def _rows_shift(original: Callable) -> Callable:
    """Results stand one place beside their rows."""
    return lambda *arguments: original(*arguments).roll(1)


def _norm_of_this_rank(original: Callable) -> Callable:
    """Ranks do not agree on the norm of a gradient."""
    def agree(executor: Any, stepped: dict, sums: dict) -> None:
        for step, (norm, rate) in stepped.items():
            sums.setdefault(f"{step.model}/grad_norm", []).append(norm)
            sums.setdefault(f"{step.model}/lr", []).append(rate)

    return agree


def _gradients_stay(original: Callable) -> Callable:
    """Data shards do not sum their gradients."""
    return lambda *arguments, **more: None


PLANTED = {
    "weights stay": (SamplerEngine, "generate", _weights_stay),
    "rows shift": (model_calls, "_place", _rows_shift),
    "norm of this rank": (update, "_agree", _norm_of_this_rank),
    "gradients stay": (megatron, "finalize_model_grads", _gradients_stay),
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """The fault `name` in this process; none for ""."""
    if not name:
        yield
        return
    place, attribute, make = PLANTED[name]
    with mock.patch.object(place, attribute, make(getattr(place, attribute))):
        yield
