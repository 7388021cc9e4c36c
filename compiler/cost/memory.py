"""What models keep on the fullest rank, and how many rows generation can hold beside it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Iterable

from compiler.cost import generation, training, transition
from compiler.cost.setting import Setting
from compiler.resharding.transitions import engine_of


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank for one member of a group: a model, or a sampler on ranks of its own.

    generation: weights that generating needs beside those of training; cache: its keys and values
    activations: of one micro-batch, or those that stay from a forward to its training; there is the cache or
    activations, never both
    """

    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    generation: float = 0.0
    cache: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        """Of all at once."""
        return self.weights + self.gradients + self.optimizer + self.generation + max(self.cache, self.activations)


def memory(setting: Setting, member: str) -> Memory:
    if setting.is_apart(member):
        return Memory(training.weight_bytes(*setting.placed(member)), cache=_caches(setting, member))
    return _memory(setting, member)


def _memory(setting: Setting, model: str) -> Memory:
    cache = 0.0 if setting.is_apart(f"{model}.generate") else _caches(setting, f"{model}.generate")
    activations = max(_training(setting, model), _scoring(setting, model), _retained(setting, model))
    return dataclasses.replace(_held(setting, model), cache=cache, activations=activations)


def _held(setting: Setting, model: str) -> Memory:
    """Without what its calls make."""
    layout = setting.home_layout(model)
    if layout is None:
        return Memory(0.0)
    placed = setting.placed(layout)
    trained = setting.plan.models[model].optimizer is not None
    return Memory(training.weight_bytes(*placed), trained * training.gradient_bytes(*placed),
                  trained * training.state_bytes(*placed), _generation(setting, model))


def idle(setting: Setting, model: str) -> float:
    """Bytes that a member holds while others work: nothing of what is offloaded."""
    kept = _kept(setting, model)
    return kept + memory(setting, model).cache if _reserves(setting, model) else kept


def _reserves(setting: Setting, model: str) -> bool:
    """Whether the cache of a model's generation is there from start to end, beside what takes turns."""
    layout = f"{model}.generate"
    shared = layout in setting.plan.layouts and not setting.is_apart(layout) and layout not in setting.offloaded
    return shared and engine_of(setting.plan.layouts, layout) in generation.RESERVING


def _kept(setting: Setting, model: str) -> float:
    """As `idle`, without a reserved cache."""
    if setting.is_apart(model):
        return training.weight_bytes(*setting.placed(model))
    found, came = _held(setting, model), _brought(setting, model)
    beside = 0.0 if setting.is_in_place(model) else found.generation
    return found.total - found.generation + beside - came.total + _retained(setting, model)


def peak(setting: Setting, members: Iterable[str]) -> float:
    """Bytes on the fullest rank of what shares ranks and takes turns: all but one are idle."""
    members = tuple(members)
    return sum(idle(setting, name) for name in members) + max((_work(setting, name) for name in members), default=0.0)


def _work(setting: Setting, model: str) -> float:
    """Bytes beside those that a member holds while it is idle, in the call that needs most."""
    if setting.is_apart(model):
        return memory(setting, model).cache
    if _reserves(setting, model):
        return _computing(setting, model)
    return max(_computing(setting, model), memory(setting, model).cache + _brought(setting, model).weights
               + _beside(setting, model))


def _computing(setting: Setting, model: str) -> float:
    """As `_work`, of training and scoring."""
    came = _brought(setting, model)
    return came.weights + max(_training(setting, model) + came.gradients + came.optimizer,
                              _scoring(setting, model) + came.generation)


def _brought(setting: Setting, model: str) -> Memory:
    """What comes for a model's calls and leaves after them."""
    found = _held(setting, model)
    sampler = found.generation * (f"{model}.generate" in setting.offloaded)
    if setting.home_layout(model) not in setting.offloaded:
        return Memory(0.0, generation=sampler)
    return dataclasses.replace(found, generation=sampler)


def _beside(setting: Setting, model: str) -> float:
    """Weights that are there while the model generates, and not while others work, beside those of its home."""
    return _generation(setting, model) if setting.is_in_place(model) else _brought(setting, model).generation


def sequences(setting: Setting, step: Any) -> int:
    """Rows of a replica that a Generate step has at once: as many as fit, in waves that are as even as can be."""
    machine, sizes, degrees = setting.placed(step.layout)
    call = setting.call(step)
    rows = math.ceil(call.rows / degrees.dp)
    most = room(setting, step) // generation.cache_bytes(machine, sizes, degrees, call, 1)
    most = min(most, generation.MOST_SEQUENCES.get(engine_of(setting.plan.layouts, step.layout), most))
    return math.ceil(rows / math.ceil(rows / max(1, min(most, rows))))


def room(setting: Setting, step: Any) -> float:
    """Bytes that a Generate step has for keys and values on each rank, beside all that is there."""
    machine, member = setting.placed(step.layout)[0], step.layout if setting.is_apart(step.layout) else step.model
    group = next((g.members for g in setting.plan.groups if member in g.members), tuple(setting.plan.models))
    if _reserves(setting, member):
        return _reserved(setting, machine.usable, group)
    kept = sum(idle(setting, name) for name in group)
    if member == step.model:
        kept += _brought(setting, member).weights + _beside(setting, member)
    return machine.usable - kept


def _reserved(setting: Setting, usable: float, group: Iterable[str]) -> float:
    """The equal share of each cache that is reserved, in what a group's other memory leaves at its fullest."""
    others = [name for name in group if not _reserves(setting, name)]
    most = max(_work(setting, name) if name in others else _computing(setting, name) for name in group)
    return (usable - sum(_kept(setting, name) for name in group) - most) / (len(group) - len(others))


def _generation(setting: Setting, model: str) -> float:
    """Weights beside those of the model's home."""
    home, layout = setting.home_layout(model), f"{model}.generate"
    if layout not in setting.plan.layouts or home == layout or setting.is_apart(layout):
        return 0.0
    machine, sizes, degrees = setting.placed(layout)
    return transition.generation_weight_bytes(machine, sizes, setting.placed(home)[2], degrees, setting.way(layout))


def _caches(setting: Setting, layout: str) -> float:
    """Bytes of keys and values in a layout of generation, of the call that needs most."""
    model = layout.rpartition(".")[0]
    return max((_cache(setting, step) for step, _ in setting.steps(model, "generate")), default=0.0)


def _cache(setting: Setting, step: Any) -> float:
    return generation.cache_bytes(*setting.placed(step.layout), setting.call(step), sequences(setting, step))


def _training(setting: Setting, model: str) -> float:
    """Activations of the largest micro-batch, where none are there already."""
    return _activations(setting, model, retained=False)


def _retained(setting: Setting, model: str) -> float:
    """Activations that stay from a forward of the rollout to the training that goes on from it."""
    return _activations(setting, model, retained=True)


def _activations(setting: Setting, model: str, retained: bool) -> float:
    calls = [(step, setting.call(step, part)) for step, part in setting.steps(model, "train")]
    return max((training.activation_bytes(*setting.placed(step.layout), call, setting.micro(step, call))
                for step, call in calls if bool(step.retained) is retained), default=0.0)


def _scoring(setting: Setting, model: str) -> float:
    calls = [(step, setting.call(step, part)) for step, part in setting.steps(model, "forward")]
    return max((training.forward_bytes(*setting.placed(step.layout), call, setting.samples(step, call))
                for step, call in calls), default=0.0)
