"""Ways to run one model on a number of devices, without those that another way beats in every respect."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from typing import Iterable, Iterator, NamedTuple, Optional, Sequence

from compiler.cost import generation, training, transition
from compiler.cost.calls import call_time, host_time
from compiler.cost.layouts import Degrees, tensor_degrees, train_degrees
from compiler.cost.sizes import Sizes, sizes_of
from compiler.cost.training import Micro
from compiler.cost.workload import FORWARD, GENERATE, TRAIN, Call, PlacedModel, Workload
from compiler.machine import Machine
from compiler.search.thinning import EXACT, Near, thinned_with_memory


class Choice(NamedTuple):
    """The layouts of a model. offload: it lies in the host's memory while others work. sequences: of a generation
    replica at once."""

    layout: Degrees
    micro: Optional[Micro] = None
    generate: Optional[Degrees] = None
    sequences: int = 0
    offload: bool = False


class Option(NamedTuple):
    """times: seconds by stage; resident: bytes that a device always holds; work: bytes beside them during a call."""

    times: tuple[float, ...]
    resident: float
    work: float
    choice: Choice


def options(machine: Machine, workload: Workload, model: PlacedModel, devices: int,
            near: Near = EXACT, layout: Optional[Degrees] = None) -> tuple[Option, ...]:
    """The options of `model` on exactly `devices` devices that fit alone, without dominated and near ones.

    layout: the only one to consider
    """
    sizes, asked = sizes_of(model.shape, model.role), model.asked
    if asked.devices not in (0, devices):
        return ()
    machine = as_stored(machine, model)
    found: list[Option] = []
    sampled = samplings(machine, workload, model, devices)
    for degrees in [layout] if layout else train_degrees(machine, sizes, devices):
        if not _as_asked(degrees, (asked.tp, asked.pp, asked.dp)):
            continue
        found.extend(_Ways(machine, workload, model, sizes, degrees, near, sampled).options())
    return tuple(thinned_with_memory(found, machine.usable, near))


def as_stored(machine: Machine, model: PlacedModel) -> Machine:
    """The machine with what `plan:` says of how a model is kept in memory."""
    storage = machine.storage.asked(model.asked.precision, model.asked.optimizer, model.asked.sequence_parallel)
    if model.asked.generate_engine in generation.RESERVING:
        storage = dataclasses.replace(storage, in_place=False)
    return machine if storage == machine.storage else dataclasses.replace(machine, storage=storage)


def _as_asked(degrees: Degrees, asked: tuple[int, int, int]) -> bool:
    return all(wanted in (0, degree) for wanted, degree in zip(asked, degrees))


def symmetric_options(machine: Machine, workload: Workload, model: PlacedModel, degrees: Degrees) -> tuple[Option, ...]:
    """The options of `model` with one layout for all of its calls, generation among them, and nothing offloaded."""
    machine = as_stored(machine, model)
    sampled = samplings(machine, workload, model, degrees.devices, (degrees,))
    ways = _Ways(machine, workload, model, sizes_of(model.shape, model.role), degrees, EXACT, sampled)
    return tuple(ways.options((False,)))


class Sampling(NamedTuple):
    """A way to generate, wherever the weights come from. times: seconds by stage; cache: bytes on a device"""

    degrees: Degrees
    sequences: int
    times: tuple[float, ...]
    cache: float


def samplings(machine: Machine, workload: Workload, model: PlacedModel, devices: int,
              layouts: Sequence[Degrees] = ()) -> tuple[Sampling, ...]:
    """The ways of a model to generate on `devices` devices; () if it does not. layouts: the only ones to consider"""
    calls = [(i, c) for i, c in workload.calls(model.name) if c.kind == GENERATE]
    if not calls:
        return ()
    sizes, asked = sizes_of(model.shape, model.role), model.asked
    every = layouts or [Degrees(tp, 1, devices // tp) for tp in tensor_degrees(machine, sizes, devices)]
    found = []
    for degrees in (d for d in every if layouts or _as_asked(d, (asked.generate_tp, 0, asked.generate_dp))):
        counted = [(i, c) for i, c in calls if c.counted]
        rows = max((math.ceil(c.rows / degrees.dp) for _, c in counted), default=1)
        most = generation.MOST_SEQUENCES.get(asked.generate_engine, rows)
        for sequences in dict.fromkeys(min(n, most) for n in _waves(rows)):
            times = [0.0] * len(workload.stages)
            for i, call in counted:
                times[i] += generation.generate_time(machine, sizes, degrees, call, sequences).total
                times[i] += call_time(machine, call, devices)
            cache = max(generation.cache_bytes(machine, sizes, degrees, call, sequences if call.counted else 1)
                        for _, call in calls)
            found.append(Sampling(degrees, sequences, tuple(times), cache))
    return tuple(found)


class _Ways(NamedTuple):
    """The options of one model in one layout. sampled: how it can generate"""

    machine: Machine
    workload: Workload
    model: PlacedModel
    sizes: Sizes
    degrees: Degrees
    near: Near
    sampled: tuple[Sampling, ...] = ()

    def options(self, offloads: Sequence[bool] = (False, True)) -> Iterator[Option]:
        """offloads: as in `Choice.offload`, those to consider"""
        calls = self.workload.calls(self.model.name)
        if calls and all(self.degrees.dp > call.rows for _, call in calls):
            return
        trains = [(i, c) for i, c in calls if c.kind == TRAIN]
        generates = [(i, c) for i, c in calls if c.kind == GENERATE]
        forwards = [(i, c) for i, c in calls if c.kind == FORWARD]
        base = self._base(forwards)
        sampled = self._generates(generates)
        trained = self._trains(trains)
        for offload in offloads:
            if offload and trains:
                trained = tuple(map(self._offloaded, trained))
            for train, generate in _pairs(trained, sampled):
                yield from self._joined(base, train, generate, offload)

    def _joined(self, base: Option, train: Option, generate: Option, offload: bool) -> Iterator[Option]:
        """What generation reserves is there all the time; of an offloaded model, for its calls alone."""
        weights, kept = base.resident, base.resident + train.resident + generate.resident * (not offload)
        times = tuple(map(sum, zip(base.times, train.times, generate.times)))
        work = max(base.work, train.work, generate.work + generate.resident * offload)
        if offload:
            loaded = host_time(self.machine, weights)
            extra = [0.0] * len(times)
            for i, call in self.workload.calls(self.model.name):
                extra[i] += loaded * (call.counted and call.kind != TRAIN)
            times, kept, work = tuple(map(sum, zip(times, extra))), kept - weights, work + weights
        if kept + work > self.machine.usable:
            return
        choice = Choice(self.degrees, train.choice.micro, generate.choice.generate, generate.choice.sequences, offload)
        yield Option(times, kept, work, choice)

    def _worth(self, found: Iterable[Option]) -> tuple[Option, ...]:
        return tuple(thinned_with_memory(found, self.machine.usable, self.near))

    @property
    def _weights(self) -> float:
        return training.weight_bytes(self.machine, self.sizes, self.degrees)

    @property
    def _none(self) -> tuple[float, ...]:
        return (0.0,) * len(self.workload.stages)

    def _base(self, forwards: Sequence[tuple[int, Call]]) -> Option:
        times, work = list(self._none), 0.0
        for i, call in forwards:
            if call.counted:
                times[i] += training.forward_time(self.machine, self.sizes, self.degrees, call).total
                times[i] += call_time(self.machine, call, self.degrees.devices)
            work = max(work, training.forward_bytes(self.machine, self.sizes, self.degrees, call))
        return Option(tuple(times), self._weights, work, Choice(self.degrees))

    def _trains(self, calls: Sequence[tuple[int, Call]]) -> tuple[Option, ...]:
        """With gradients and states on the device."""
        if not calls:
            return (Option(self._none, 0.0, 0.0, Choice(self.degrees)),)
        resident, kept = self._gradients + self._states, self._weights + self._gradients
        rows = max(training.minibatch_rows(self.degrees, call) for _, call in calls)
        found = []
        for micro in self._micros(rows, calls):
            work = max(training.activation_bytes(self.machine, self.sizes, self.degrees, call, micro)
                       for _, call in calls)
            if kept + work > self.machine.usable:
                continue
            times = list(self._none)
            for i, call in calls:
                times[i] += training.train_time(self.machine, self.sizes, self.degrees, call, micro)
                times[i] += call_time(self.machine, call, self.degrees.devices)
            found.append(Option(tuple(times), resident, work, Choice(self.degrees, micro)))
        return self._worth(found)

    def _micros(self, rows: int, calls: Sequence[tuple[int, Call]]) -> Iterator[Micro]:
        """Micro-batches of a power of two of units, and of all, as `plan:` allows; one unit at least."""
        unit = max(call.together for _, call in calls)
        most = max(1, min(rows, self._most_samples(calls)) // unit)
        recompute = {"": (False, True), "none": (False,), "full": (True,)}[self.model.asked.recompute]
        sizes = sorted({min(1 << i, most) * unit for i in range(most.bit_length() + 1)})
        return itertools.starmap(Micro, itertools.product(sizes, recompute))

    def _most_samples(self, calls: Sequence[tuple[int, Call]]) -> float:
        """The samples that `plan:` allows in a micro-batch, at least one."""
        asked = self.model.asked
        by_tokens = max(1, int(asked.tokens // max(call.length for _, call in calls))) if asked.tokens else math.inf
        return min(asked.micro_batch or math.inf, by_tokens)

    def _offloaded(self, train: Option) -> Option:
        """With all that comes and goes for an update, and weights that leave with the rest."""
        times = list(train.times)
        for i, call in self.workload.calls(self.model.name):
            times[i] += host_time(self.machine, self._swapped(i, call)) * (call.kind == TRAIN)
        return train._replace(times=tuple(times), resident=0.0, work=train.work + train.resident)

    def _swapped(self, stage: int, call: Call) -> float:
        """Bytes from and to the host in an update: if it trains several models, these take turns in each mini-batch
        (`compiler.offloading`)."""
        alone = sum(other.kind == TRAIN for other in self.workload.stages[stage].calls) == 1
        times = 1 if alone else call.epochs * call.minibatches
        return times * 2 * (self._weights + self._states)

    @property
    def _gradients(self) -> float:
        return training.gradient_bytes(self.machine, self.sizes, self.degrees)

    @property
    def _states(self) -> float:
        return training.state_bytes(self.machine, self.sizes, self.degrees)

    def _generates(self, calls: Sequence[tuple[int, Call]]) -> tuple[Option, ...]:
        if not calls:
            return (Option(self._none, 0.0, 0.0, Choice(self.degrees)),)
        moved = {degrees: self._transition(degrees) for degrees in dict.fromkeys(s.degrees for s in self.sampled)}
        room = self.machine.usable - self._weights
        reserved = self.model.asked.generate_engine in generation.RESERVING
        found = []
        for one in self.sampled:
            seconds, weights = moved[one.degrees]
            work = one.cache + weights
            if work <= room:
                times = list(one.times)
                for i, call in calls:
                    times[i] += seconds * call.counted
                choice = Choice(self.degrees, None, one.degrees, one.sequences)
                found.append(Option(tuple(times), work * reserved, work * (not reserved), choice))
        return self._worth(found)

    def _transition(self, generate: Degrees) -> tuple[float, float]:
        """(seconds of the weights' way, bytes that they need beside those of training)."""
        how = (self.machine, self.sizes, self.degrees, generate, self.model.asked.way)
        return transition.transition_time(*how), transition.generation_weight_bytes(*how)


def _pairs(trains: Sequence[Option], generates: Sequence[Option]) -> Iterator[tuple[Option, Option]]:
    """Pairs that some limit of memory makes the fastest of both under it."""
    ends = _outdone(generates)
    for train, end in zip(trains, _outdone(trains)):
        for generate, other in zip(generates, ends):
            if max(train.work, generate.work) < min(end, other):
                yield train, generate


def _outdone(found: Sequence[Option]) -> list[float]:
    """By option, the least work beyond its own with which another is as good in all else."""
    def as_good(one: Option, other: Option) -> bool:
        return other.resident <= one.resident and all(map(operator.le, other.times, one.times))

    return [min((o.work for o in found if o.work > one.work and as_good(one, o)), default=math.inf) for one in found]


def _waves(rows: int) -> tuple[int, ...]:
    """Sequences at once for 1, 2, 3, 4, 6, 8, 12, 16, .. waves."""
    counts = sorted({c << i for i in range(rows.bit_length()) for c in (1, 3)})
    return tuple(sorted({math.ceil(rows / waves) for waves in counts if waves <= rows}))
