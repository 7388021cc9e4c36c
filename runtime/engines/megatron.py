"""The engine of training and forward passes: megatron-core over tensor, pipeline and data parallelism."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Iterable, Iterator, Mapping, Optional, Sequence

from runtime.engines import megatron_cpu  # noqa: F401  must precede megatron.core

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func, get_schedule_table
from torch import Tensor

from compiler.layout import ModelLayout
from compiler.offloading import GRADIENTS, OPTIMIZER, WEIGHTS
from compiler.shapes import ModelShape
from compiler.weights import WeightLayout
from runtime.engines.base import MASTER, AdamW, Call, Execution, Objective
from runtime.engines.host import Offloads
from runtime.engines.megatron_attention import take
from runtime.engines.megatron_batch import MicroBatch, Reading, Rotary, pack
from runtime.engines.megatron_model import Trunk, using
from runtime.engines.megatron_optim import MegatronAdamW
from runtime.engines.megatron_vocabulary import logprobs_and_entropy
from runtime.engines.positions import rotary_frequencies
from runtime.hf_folder import HFFolder
from runtime.meshes import LayoutGroups, Mesh
from runtime.sequences import Sequences

LAYERS = "decoder.layers."


def _states(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
    return model(batch.tokens, batch.packed)


class MegatronEngine(Offloads):
    """One model on the ranks of `layout`, of which this rank is one. See `runtime.engines.base.Engine`.

    role: "policy", "value" or "scorer"; optimizer: None for a frozen model
    Parameters hold nothing until they are loaded.
    Raises KeyError if this rank is not in `layout`, ValueError unless the layout's ranks ascend.
    """

    def __init__(
        self, shape: ModelShape, role: str, layout: ModelLayout, mesh: Mesh, optimizer: Optional[AdamW] = None,
        execution: Execution = Execution(),
    ) -> None:
        super().__init__()
        if list(layout.ranks) != sorted(layout.ranks):
            raise ValueError("the ranks of a layout must ascend: Megatron takes a rank's place from its group's order")
        self.shape, self.role, self.layout = shape, role, layout
        self._rank, self._device, self._groups = mesh.job.rank, mesh.job.device, mesh.groups(layout)
        with using(self._groups):
            make = partial(Trunk, shape, role, self._groups, execution)
            self._trunks = [make(chunk).to(self._device) for chunk in range(layout.chunks)]
        self._config = self._trunks[-1].config
        self._token_multiple = layout.tp if self._config.sequence_parallel else 1
        self._rotary = Rotary(rotary_frequencies(shape).to(self._device))
        self._schedule = get_forward_backward_func(layout.pp, self._config.virtual_pipeline_model_parallel_size)
        self._models, self._optimizer = self._trunks, None
        self._summed, self._passes = False, 0  # whether gradients hold something, and a name for what they hold
        self._retained: list[tuple[MicroBatch, Tensor]] = []  # with the hidden states, from which backward can go on
        if optimizer is None:
            for trunk in self._trunks:
                trunk.requires_grad_(False)
        else:
            self._make_trainable(optimizer, execution.sharded_optimizer and layout.dp > 1)

    def _make_trainable(self, optimizer: AdamW, sharded: bool) -> None:
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=sharded,
        )
        self._models = [
            DistributedDataParallel(trunk.config, settings, trunk, pg_collection=trunk.pg_collection)
            for trunk in self._trunks
        ]
        self._optimizer = MegatronAdamW(self._parameters(), self._models, self._groups, optimizer)

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """By local name: layers count on from chunk to chunk."""
        found, before = {}, 0
        for trunk in self._trunks:
            for name, parameter in trunk.named_parameters():
                found[_counted_on(name, before)] = parameter
            before += len(trunk.decoder.layers)
        return found

    # ---- computing

    def forward(
        self, batch: Sequences, operations: tuple[str, ...], temperature: float = 1.0,
        runs: Sequence[tuple[int, int]] = (), retain: bool = False,
    ) -> Optional[dict[str, Tensor]]:
        parts = [batch] if len(runs) < 2 else [batch.select(torch.arange(start, stop)) for start, stop in runs]
        calls = [{operation: Call(operation, part, temperature) for operation in operations} for part in parts]
        if retain:
            self._retained.clear()
        for trunk in self._trunks:
            trunk.recompute = False
        with torch.set_grad_enabled(retain), using(self._groups):
            collect = self._retain if retain else self._collect
            outputs = self._run(self._packed(calls), collect, forward_only=True, collect_non_loss_data=True)[:len(calls)]
        if not self._groups.is_last:
            return None
        return {operation: torch.cat([part[operation] for part in outputs]) for operation in operations}

    def train(
        self, micro_batches: Sequence[Mapping[str, Call]], objective: Objective, recompute: bool = False,
        retained: bool = False,
    ) -> Optional[list[dict[str, Tensor]]]:
        outputs: list[dict[str, Tensor]] = []
        self._summed, self._passes = True, self._passes + 1
        for trunk in self._trunks:
            trunk.recompute = recompute
        if micro_batches:
            batches = self._known(micro_batches) if retained else self._packed(micro_batches)
            compute = self._retained_states if retained else _states
            with using(self._groups):
                outputs = self._run(batches, partial(self._loss, objective), compute, forward_only=False)
        outputs = outputs[:len(micro_batches)]
        return outputs if self._groups.is_last else None

    def _packed(self, calls: Sequence[Mapping[str, Call]]) -> list[MicroBatch]:
        """Interleaved stages want a multiple of pp micro-batches: empty ones fill up."""
        interleaved = len(self._models) > 1
        filled = [*calls, *[{}] * (-len(calls) % self.layout.pp if interleaved else 0)]
        return [pack(each, self._rotary, self.shape.window, self._device, self._token_multiple) for each in filled]

    def _known(self, calls: Sequence[Mapping[str, Call]]) -> list[MicroBatch]:
        """The micro-batches of the forward that was retained, under the names of these calls."""
        return [dataclasses.replace(batch, readings={
                    name: dataclasses.replace(batch.readings[call.operation], call=call) for name, call in each.items()})
                for each, (batch, _) in zip(calls, self._retained, strict=True)]

    def _retained_states(self, model: torch.nn.Module, batch: MicroBatch) -> Tensor:
        """The next that are retained. Whoever goes on from them is the last to hold them."""
        return self._retained.pop(0)[1]

    def _run(self, batches: Sequence[MicroBatch], finish, compute=_states, **mode: bool) -> list[dict[str, Tensor]]:
        """Megatron's schedule over all micro-batches, of which compute(model, micro-batch) gives the hidden states; the
        last stage calls finish(i, micro-batch, hidden) for each."""
        multiple, interleaved = self._token_multiple, len(self._models) > 1
        shapes = [(batch.tokens.numel() // multiple, 1, self.shape.hidden) for batch in batches]
        feeds = [iter(enumerate(batches)) for _ in self._models]
        pg_collection = self._trunks[-1].pg_collection

        def forward_step(iterator: Iterator[tuple[int, MicroBatch]], model) -> tuple[Tensor, object]:
            i, batch = next(iterator)
            hidden = compute(model, batch)
            return hidden, partial(finish, i, batch)

        return self._schedule(
            forward_step_func=forward_step, data_iterator=feeds if interleaved else feeds[0],
            model=self._models if interleaved else self._models[0],
            num_microbatches=len(batches), seq_length=1, micro_batch_size=1, pg_collection=pg_collection,
            p2p_communicator=_AgreedShapes(self._groups, self._config, shapes), **mode,
        )

    def _collect(self, i: int, batch: MicroBatch, hidden: Tensor, non_loss_data: bool) -> dict[str, Tensor]:
        return self._read(batch, hidden)

    def _retain(self, i: int, batch: MicroBatch, hidden: Tensor, non_loss_data: bool) -> dict[str, Tensor]:
        self._retained.append((batch, hidden))
        with torch.no_grad():
            return self._read(batch, hidden)

    def _loss(self, objective: Objective, i: int, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, dict]:
        """Scalar to minimize, a token count that Megatron wants and we do not use, and the detached outputs."""
        outputs = self._read(batch, hidden)
        loss = objective(i, outputs).to(hidden.device) if batch.readings else hidden.new_zeros(())
        if not loss.requires_grad:  # nothing to learn here, but a pipeline's other stages wait for a gradient
            loss = loss + 0.0 * hidden.sum()
        unused = torch.zeros((), dtype=torch.int32, device=hidden.device)
        return loss, unused, {name: values.detach() for name, values in outputs.items()}

    # ---- heads

    def _read(self, batch: MicroBatch, hidden: Tensor) -> dict[str, Tensor]:
        """hidden [m, 1, hidden], of the tokens that are read → results of the calls, by name, in the host's memory."""
        alike: dict[tuple, dict[str, Reading]] = {}
        for name, reading in batch.readings.items():
            alike.setdefault((id(reading.at), reading.call.temperature), {})[name] = reading
        hidden = hidden.squeeze(1)
        results: dict[str, Tensor] = {}
        for readings in alike.values():
            results |= self._head(readings, hidden)
        return {name: values.cpu() for name, values in results.items()}

    def _head(self, readings: Mapping[str, Reading], hidden: Tensor) -> dict[str, Tensor]:
        """Readings of the same tokens at the same temperature."""
        reading = next(iter(readings.values()))
        states = take(hidden, reading.at)
        if self.role != "policy":
            return dict.fromkeys(readings, self._trunks[-1].scalars(states))
        wants_entropy = any(r.call.operation == "entropy" for r in readings.values())
        logprobs, entropy = logprobs_and_entropy(
            self._trunks[-1].logits(states), reading.targets, self.shape.vocab, reading.call.temperature, self._groups.tp,
            wants_entropy,
        )
        return {name: entropy if r.call.operation == "entropy" else logprobs for name, r in readings.items()}

    # ---- optimizer

    def zero_grad(self) -> None:
        self._summed = False
        for model in self._models:
            model.zero_grad_buffer()

    def step(self, lr: float) -> float:
        with using(self._groups):
            finalize_model_grads(self._models, None, pg_collection=self._trunks[-1].pg_collection)
        return self._optimizer.step(lr)

    @property
    def moments(self) -> tuple[str, ...]:
        return self._optimizer.moments

    def moment(self, name: str) -> dict[str, Tensor]:
        return self._optimizer.moment(name)

    def load_moment(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self._optimizer.load_moment(name, tensors)

    @property
    def optimizer_steps(self) -> int:
        return self._optimizer.steps

    @optimizer_steps.setter
    def optimizer_steps(self, steps: int) -> None:
        self._optimizer.steps = steps

    # ---- what leaves the device

    def tensors_of(self, part: str) -> Iterable[Tensor]:
        if part == WEIGHTS:
            return self.export().values()
        if part == OPTIMIZER:
            return self._optimizer.states()
        return [buffer.grad_data for model in self._models for buffer in model.buffers]

    def version_of(self, part: str, version: Optional[int]) -> Optional[int]:
        if part == GRADIENTS:
            return self._passes if self._summed else None
        return version

    # ---- weights

    def export(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters().items()}

    def load(self, folder: HFFolder, moment: str = "") -> None:
        weights, parameters = WeightLayout(self.shape, self.role, self.layout, "megatron"), self.export()
        if not moment and self._optimizer is not None and MASTER in self.moments:
            moment = MASTER
        if not moment:
            folder.read_into(parameters, weights, self._rank)
            return
        for name, parameter in parameters.items():  # one by one, as these are wider than what they become, or whole
            wide = {name: torch.empty_like(parameter, dtype=torch.float32)}
            folder.read_into(wide, weights, self._rank)
            self.load_moment(moment, wide)

    @property
    def optimizer_bytes(self) -> int:
        return self._optimizer.bytes if self._optimizer is not None else 0

    @property
    def parameter_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.export().values())


def _counted_on(name: str, before: int) -> str:
    """The name of a parameter in a chunk that so many layers precede."""
    if not name.startswith(LAYERS):
        return name
    layer, rest = name.removeprefix(LAYERS).split(".", 1)
    return f"{LAYERS}{int(layer) + before}.{rest}"


class _AgreedShapes(P2PCommunicator):
    """Pipeline transfers of micro-batches of different sizes. Each stage knows all sizes, so none is sent.

    Interleaved stages form a ring, in which the first and the last chunk of all have no neighbour.
    """

    def __init__(self, groups: LayoutGroups, config, shapes: Sequence[tuple[int, int, int]]) -> None:
        super().__init__(groups.pp, config)
        chunks = groups.layout.chunks
        order = get_schedule_table(len(shapes), chunks, groups.layout.pp)
        every = [shapes[i] for i, _ in order]
        around = [shapes[i] for i, chunk in order if chunk < chunks - 1]
        self._activations = iter(around if groups.is_first else every)
        self._gradients = iter(around if groups.is_last else every)

    def _communicate_shapes(self, tensor_send_next, tensor_send_prev, recv_prev: bool, recv_next: bool):
        return next(self._activations) if recv_prev else None, next(self._gradients) if recv_next else None
