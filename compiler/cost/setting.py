"""A plan on a cluster in the terms of the cost functions: machines, sizes, degrees, calls."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Iterable, Iterator, Optional

from compiler.cluster import Cluster
from compiler.cost.layouts import Degrees
from compiler.cost.moved import Lengths
from compiler.cost.sizes import Sizes, sizes_of
from compiler.cost.training import Micro
from compiler.cost.transition import Way, way_of
from compiler.cost.workload import FORWARD, GENERATE, TRAIN, Call
from compiler.machine import Machine, Storage
from compiler.offloading import Offloading, shares_memory
from compiler.plan import Plan
from compiler.proof.wellformed import shape_of
from compiler.resharding.transitions import engine_of
from compiler.shapes import parameters
from compiler.steps import UpdateLoop


@dataclass(frozen=True)
class Setting:
    plan: Plan
    cluster: Cluster

    def machine(self, member: str = "") -> Machine:
        """Where a model or a sampler runs; without a name, the weakest part of the cluster.

        Ranks that share devices share their rates and memory.
        """
        pool = next((g.pool for g in self.plan.groups if member in g.members), "")
        named = (m for m in self.cluster.machines if m.name == pool)
        found = next(named, min(self.cluster.machines, key=lambda m: m.flops))
        crowd = self.plan.world / self.cluster.devices
        if crowd <= 1:
            return found
        return dataclasses.replace(found, flops=found.flops / crowd, memory_bandwidth=found.memory_bandwidth / crowd,
                                   memory=found.memory / crowd)

    def sizes(self, model: str) -> Sizes:
        return sizes_of(shape_of(self.plan, model), self.plan.models[model].role)

    def placed(self, layout: str) -> tuple[Machine, Sizes, Degrees]:
        """What is kept of the model, and in how many bits, is as the plan says."""
        model, spec = layout.rpartition(".")[0], self.plan.layouts[layout]
        optimizer = "sharded" if spec.sharded_optimizer else "replicated"
        storage = Storage(in_place=self.is_in_place(model)).asked(spec.precision, optimizer, spec.sequence_parallel)
        machine = dataclasses.replace(self.machine(layout if self.is_apart(layout) else model), storage=storage)
        return machine, self.sizes(model), Degrees(spec.tp, spec.pp, spec.dp)

    def is_in_place(self, model: str) -> bool:
        """Whether the weights of training and generation take turns in one memory."""
        home, generate = self.home_layout(model), f"{model}.generate"
        return home is not None and generate in self.plan.layouts and shares_memory(self.plan, home, generate)

    @cached_property
    def offloaded(self) -> frozenset[str]:
        """The layouts that leave their ranks while others work."""
        return frozenset(Offloading(self.plan).layouts)

    def is_apart(self, layout: str) -> bool:
        """Whether a layout samples on ranks of its own."""
        return any(layout in group.samplers for group in self.plan.groups)

    def way(self, layout: str) -> Way:
        """How weights come to a layout of generation that lies within that of training."""
        return way_of(self.plan.layouts[layout].strategy, engine_of(self.plan.layouts, layout))

    def home_layout(self, model: str) -> Optional[str]:
        """The layout in which a model keeps its weights."""
        names = (f"{model}.{stage}" for stage in (TRAIN, FORWARD, GENERATE))
        return next((name for name in names if name in self.plan.layouts), None)

    # ---- sizes

    @cached_property
    def parameters(self) -> dict[str, int]:
        return {name: parameters(shape_of(self.plan, name), m.role) for name, m in self.plan.models.items()}

    @cached_property
    def lengths(self) -> Lengths:
        return Lengths(self.plan)

    @property
    def prompt_tokens(self) -> float:
        return self.lengths.prompt

    def tokens(self, response: int) -> float:
        """Prompt and response tokens of all samples of a response (an id of an expression)."""
        return self.lengths.tokens(response)

    def value_bytes(self, expr: int) -> float:
        return self.lengths.bytes(expr)

    # ---- steps

    @cached_property
    def _times(self) -> dict[int, int]:
        loops = [s for s in self.plan.steps if isinstance(s, UpdateLoop)]
        return {id(step): loop.epochs * loop.minibatches for loop in loops for step in loop.body}

    def times(self, step: Any) -> int:
        """How often an iteration runs a step."""
        return self._times.get(id(step), 1)

    def steps(self, model: str, op: str) -> Iterator[tuple[Any, float]]:
        """(step, share of the rows that it sees) of all of a kind that work for a model."""
        for steps in (self.plan.steps, *(section.steps for section in self.plan.evals)):
            for step in steps:
                inner = [(step, 1.0)]
                if isinstance(step, UpdateLoop):
                    inner = [*((s, 1.0) for s in step.before), *((s, 1 / step.minibatches) for s in step.body)]
                yield from (found for found in inner if found[0].op == op and found[0].model == model)

    def call(self, step: Any, part: float = 1.0) -> Call:
        """What a Generate, Forward or TrainStep asks of its model. part: the share of the rows that it sees"""
        responses = {"generate": lambda: [step.expr], "forward": lambda: [step.response],
                     "train": lambda: sorted({self.plan.exprs[c.expr].args[0] for c in step.calls})}[step.op]()
        found = self._call(step.model, step.op, responses, part)
        if step.op == TRAIN:
            return dataclasses.replace(found, together=self._together(step, responses))
        if step.op != GENERATE:
            return found
        prompts = self.lengths.samples(self.plan.exprs[step.prompts].dims)
        whole = self.lengths.samples(self.plan.exprs[step.expr].dims)
        return dataclasses.replace(found, samples=max(1, whole // prompts))

    def _together(self, step: Any, responses: Iterable[int]) -> int:
        """Samples of a TrainStep's unit, of all responses of its rows."""
        dims = [self.plan.exprs[r].dims for r in responses]
        units = self.lengths.samples(step.unit)
        return max(1, sum(self.lengths.samples(d) for d in dims if step.unit[0] in d) // units)

    def _call(self, model: str, kind: str, responses: Iterable[int], part: float) -> Call:
        """Over some rows of several responses, whose mean length counts."""
        dims = [self.plan.exprs[r].dims for r in responses]
        samples = [self.lengths.samples(d) for d in dims]
        tokens = sum(n * self.lengths.response(d) for n, d in zip(samples, dims))
        longest = max(map(self.lengths.longest, dims))
        rows = max(1, math.ceil(part * sum(samples)))
        return Call(model, kind, rows, self.prompt_tokens, tokens / sum(samples), longest)

    def micro(self, step: Any, call: Call) -> Micro:
        """Of a TrainStep, whose micro_batch counts units."""
        most = self.samples(step, call, call.together)
        return Micro(max(call.together, int(min(most, call.rows))), step.recompute, bool(step.retained))

    def samples(self, step: Any, call: Call, unit: int = 1) -> float:
        """The most that a micro-batch of a Forward or TrainStep may hold; unit: samples that stay together"""
        by_tokens = max(1.0, step.tokens / call.length) if step.tokens else math.inf
        return min(step.micro_batch * unit or math.inf, by_tokens)
