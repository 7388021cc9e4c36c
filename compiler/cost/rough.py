"""Rough estimates of time, bytes and memory, good for shares and orders of magnitude.

Matrix products count 2 FLOP a parameter and token forward and 6 with backward (Kaplan et al., arXiv 2001.08361, section
2.1); decoding is bound by computing or by reading the weights once a token, whichever is slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from compiler.cluster import Cluster
from compiler.layout import ModelLayout
from compiler.plan import Plan
from compiler.shapes import parameters
from compiler.steps import HOME, UpdateLoop
from compiler.transitions import engine_of, resolve, weight_transfer
from compiler.weights import local_tensors
from compiler.wellformed import shape_of

WIDTH = {"f32": 4, "bool": 1, "tokens": 8, "text": 16}  # bytes of an element; a text is counted by 16 bytes a token
PROMPT = 64  # tokens, where nothing is assumed
FLOAT = 4
ACTIVATION = 68  # bytes a token, layer and hidden element in 32 bit, without recompute (arXiv 2205.05198, equation 2)


@dataclass(frozen=True)
class Moved:
    """Bytes of one transfer: the most that a rank receives, what all receive, and what no plan could do without."""

    per_rank: float
    total: float
    lower_bound: float


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank for one model."""

    weights: float
    gradients: float
    optimizer: float
    generation: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.generation + self.activations


@dataclass(frozen=True)
class CostModel:
    """Estimates for the steps of `plan` on `cluster`."""

    plan: Plan
    cluster: Cluster

    # ---- sizes

    def samples(self, dims: tuple[str, ...]) -> float:
        return math.prod(self.plan.dims[d].size for d in dims if not self.plan.dims[d].ragged)

    def response_tokens(self, dims: tuple[str, ...]) -> float:
        bound = next((self.plan.dims[d].size for d in dims if self.plan.dims[d].ragged), 1)
        return min(self.plan.assume.get("response", bound), bound)

    @property
    def prompt_tokens(self) -> float:
        return self.plan.assume.get("prompt", PROMPT)

    def tokens(self, response: int) -> float:
        """Prompt and response tokens of all samples of a response (an id of an expression)."""
        dims = self.plan.exprs[response].dims
        return self.samples(dims) * (self.prompt_tokens + self.response_tokens(dims))

    def value_bytes(self, expr: int) -> float:
        row = self.plan.exprs[expr]
        if row.elem == "tokens":
            return self.tokens(expr) * WIDTH["tokens"]
        each = self.response_tokens(row.dims) if any(self.plan.dims[d].ragged for d in row.dims) else 1
        if row.elem == "text":
            each = self.prompt_tokens
        return self.samples(row.dims) * each * WIDTH[row.elem]

    @cached_property
    def parameters(self) -> dict[str, int]:
        return {name: parameters(shape_of(self.plan, name), m.role) for name, m in self.plan.models.items()}

    # ---- seconds

    def seconds(self, step: Any, part: float = 1.0) -> float:
        """part: the share of the iteration's rows that the step sees, 1 / minibatches inside an update."""
        if isinstance(step, UpdateLoop):
            once = sum(self.seconds(s) for s in step.before)
            each = sum(self.seconds(s, 1 / step.minibatches) for s in step.body)
            return once + step.epochs * step.minibatches * each
        estimate = {"generate": self._generate, "forward": self._forward, "train": self._train,
                    "optimizer": self._optimizer, "transfer": self._transfer, "reshard": self._reshard}.get(step.op)
        return estimate(step, part) if estimate else self._local(step, part)

    def _compute(self, model: str, tokens: float, flop: int, ranks: int) -> float:
        return flop * self.parameters[model] * tokens / (self.cluster.device.flops * ranks)

    def _forward(self, step: Any, part: float) -> float:
        return self._compute(step.model, part * self.tokens(step.response), 2, self.plan.layouts[step.layout].ranks)

    def _train(self, step: Any, part: float) -> float:
        responses = {self.plan.exprs[c.expr].args[0] for c in step.calls}
        spec = self.plan.layouts[step.layout]
        tokens = part * sum(self.tokens(r) for r in responses)
        micro = max(part * self.samples(self.plan.exprs[min(responses)].dims) / spec.dp / (step.micro_batch or 1), 1)
        bubble = (micro + spec.pp - 1) / micro  # of a pipeline that runs one forward and one backward in turn
        return self._compute(step.model, tokens, 6, spec.ranks) * bubble

    def _generate(self, step: Any, part: float) -> float:
        spec, dims = self.plan.layouts[step.layout], self.plan.exprs[step.expr].dims
        rows, length = self.samples(dims), self.response_tokens(dims)
        prefill = self._compute(step.model, rows * self.prompt_tokens, 2, spec.ranks)
        reading = length * self.parameters[step.model] * FLOAT / spec.tp / self.cluster.device.memory_bandwidth
        return prefill + max(self._compute(step.model, rows * length, 2, spec.ranks), reading)

    def _optimizer(self, step: Any, part: float) -> float:
        """Weights, gradients and two moments are read, weights and moments written."""
        spec = self.plan.layouts[f"{step.model}.train"]
        held = self.parameters[step.model] * FLOAT / (spec.tp * spec.pp)
        return 7 * held / self.cluster.device.memory_bandwidth + self._all_reduce(held, spec.dp)

    def _all_reduce(self, held: float, ranks: int) -> float:
        """A ring: 2 (n - 1) / n of the bytes through each rank's link."""
        return 2 * (ranks - 1) / ranks * held / self.bandwidth + 2 * (ranks - 1) * self.cluster.machines[0].inter_latency

    def _transfer(self, step: Any, part: float) -> float:
        return part * self.moved(step).per_rank / self.bandwidth + self.cluster.machines[0].inter_latency

    def _reshard(self, step: Any, part: float) -> float:
        moved = self.moved(step)
        return moved.per_rank / self.bandwidth + (self.cluster.machines[0].inter_latency if moved.total else 0)

    def _local(self, step: Any, part: float) -> float:
        """Equations and the like, which read and write each of their values about once."""
        values = [v.expr for v in getattr(step, "values", ())] + [getattr(step, "expr", 0)] * hasattr(step, "expr")
        read = sum(self.value_bytes(v) for v in values)
        return 2 * part * read / self.plan.world / self.cluster.device.memory_bandwidth

    @property
    def bandwidth(self) -> float:
        """Of the slowest link that a plan of this size crosses."""
        machine = self.cluster.machines[0]
        return machine.intra if self.plan.world <= machine.devices_per_node else machine.node / machine.devices_per_node

    # ---- bytes

    def moved(self, step: Any) -> Moved:
        """Bytes of a transfer of rows (over the iteration) or of weights."""
        if step.op == "reshard":
            transfer = weight_transfer(shape_of(self.plan, step.model), self.plan.models[step.model].role,
                                       self.plan.layouts, step.src, step.dst)
            most = max(transfer.bytes_received(r) for r in transfer.ranks)
            return Moved(most, transfer.total_bytes, transfer.lower_bound_bytes)
        parts = [self._rows_moved(step, v.expr) for v in step.values]
        return Moved(*(sum(getattr(p, f) for p in parts) for f in ("per_rank", "total", "lower_bound")))

    def _rows_moved(self, step: Any, expr: int) -> Moved:
        """Rows go where tokens balance, so that a row stays where it is by chance: one in `world`.

        Out, every rank of a shard gets its rows (numbers: the last stage alone); home, each row leaves one rank.
        """
        world, size = self.plan.world, self.value_bytes(expr)
        stays = 1 - 1 / world
        if step.dst == HOME:
            dp = self.plan.layouts[step.src].dp
            return Moved(size / world * stays, size * stays, size * (1 - dp / world))
        spec = self.plan.layouts[step.dst]
        ranks = spec.ranks if self.plan.exprs[expr].elem == "tokens" else spec.ranks // spec.pp
        share = size / spec.dp
        return Moved(share * stays, ranks * share * stays, max(ranks * (share - size / world), 0))

    # ---- memory

    def memory(self, model: str) -> Memory:
        weights = self._held(model, "train") or self._held(model, "forward")
        trained = self.plan.models[model].optimizer is not None
        gradients, moments = weights * trained, 2 * weights * trained
        return Memory(weights, gradients, moments, self._held(model, "generate"), self._activations(model))

    def _held(self, model: str, stage: str) -> float:
        name = f"{model}.{stage}"
        if name not in self.plan.layouts:
            return 0.0
        layout: ModelLayout = resolve(self.plan.layouts, name)
        shape, role = shape_of(self.plan, model), self.plan.models[model].role
        sizes = (local_tensors(shape, role, layout, r, engine_of(self.plan.layouts, name)) for r in layout.ranks)
        return max(sum(math.prod(s) for s in tensors.values()) for tensors in sizes) * FLOAT

    def _activations(self, model: str) -> float:
        """Of one micro-batch in training; a forward keeps one layer's."""
        steps = [s for loop in self.plan.steps if isinstance(loop, UpdateLoop) for s in loop.body if s.op == "train"]
        step = next((s for s in steps if s.model == model), None)
        if step is None:
            return 0.0
        shape, spec = shape_of(self.plan, model), self.plan.layouts[step.layout]
        response = self.plan.exprs[step.calls[0].expr].args[0]
        length = self.prompt_tokens + self.response_tokens(self.plan.exprs[response].dims)
        tokens = step.tokens or step.micro_batch * length
        layers = tokens * shape.hidden * ACTIVATION * shape.layers / spec.pp
        logits = 2 * tokens * shape.vocab * FLOAT if self.plan.models[model].role == "policy" else 0
        return (layers + logits) / spec.tp
