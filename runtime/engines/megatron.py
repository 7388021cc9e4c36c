"""The engine of training and forward passes: megatron-core over tensor, pipeline and data parallelism."""

from __future__ import annotations

from functools import partial
from typing import Iterator, Mapping, Optional, Sequence

from runtime.engines import megatron_cpu  # noqa: F401  must precede megatron.core

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from compiler.layout import ModelLayout
from compiler.shapes import ModelShape
from compiler.weights import WeightLayout
from runtime.engines.base import AdamW, Call, Objective
from runtime.engines.megatron_batch import MicroBatch, Reading, Rotary, pack
from runtime.engines.megatron_model import Trunk, using
from runtime.engines.megatron_optim import MegatronAdamW
from runtime.engines.megatron_vocabulary import logprobs_and_entropy
from runtime.engines.positions import rotary_frequencies
from runtime.hf_folder import HFFolder
from runtime.meshes import Mesh
from runtime.sequences import Sequences


class MegatronEngine:
    """One model on the ranks of `layout`, of which this rank is one. See `runtime.engines.base.Engine`.

    role: "policy", "value" or "scorer"; optimizer: None for a frozen model; dtype: of parameters and activations
    Parameters hold nothing until they are loaded.
    Raises KeyError if this rank is not in `layout`, ValueError unless the layout's ranks ascend.
    """

    def __init__(
        self, shape: ModelShape, role: str, layout: ModelLayout, mesh: Mesh, optimizer: Optional[AdamW] = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if list(layout.ranks) != sorted(layout.ranks):
            raise ValueError("the ranks of a layout must ascend: Megatron takes a rank's place from its group's order")
        self.shape, self.role, self.layout = shape, role, layout
        self._rank, self._device, self._groups = mesh.job.rank, mesh.job.device, mesh.groups(layout)
        with using(self._groups):
            self._trunk = Trunk(shape, role, self._groups, dtype).to(self._device)
        self._config = self._trunk.config
        self._rotary = Rotary(rotary_frequencies(shape).to(self._device))
        self._schedule = get_forward_backward_func(pp_size=layout.pp)
        self._model, self._optimizer = self._trunk, None
        if optimizer is None:
            self._trunk.requires_grad_(False)
        else:
            self._make_trainable(optimizer)

    def _make_trainable(self, optimizer: AdamW) -> None:
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        groups = self._trunk.pg_collection
        self._model = DistributedDataParallel(self._config, settings, self._trunk, pg_collection=groups)
        self._optimizer = MegatronAdamW(dict(self._trunk.named_parameters()), self._model, self._groups, optimizer)

    # ---- computing

    def forward(
        self, batch: Sequences, operations: tuple[str, ...], temperature: float = 1.0, runs: Sequence[tuple[int, int]] = ()
    ) -> Optional[dict[str, Tensor]]:
        parts = [batch] if len(runs) < 2 else [batch.select(torch.arange(start, stop)) for start, stop in runs]
        calls = [{operation: Call(operation, part, temperature) for operation in operations} for part in parts]
        with torch.no_grad(), using(self._groups):
            outputs = self._run(calls, self._collect, forward_only=True, collect_non_loss_data=True)
        if not self._groups.is_last:
            return None
        return {operation: torch.cat([part[operation] for part in outputs]) for operation in operations}

    def train(
        self, micro_batches: Sequence[Mapping[str, Call]], objective: Objective
    ) -> Optional[list[dict[str, Tensor]]]:
        outputs: list[dict[str, Tensor]] = []
        if micro_batches:
            with using(self._groups):
                outputs = self._run(micro_batches, partial(self._loss, objective), forward_only=False)
        return outputs if self._groups.is_last else None

    def _run(self, calls: Sequence[Mapping[str, Call]], finish, **mode: bool) -> list[dict[str, Tensor]]:
        """Megatron's schedule over all micro-batches; the last stage calls finish(i, micro-batch, hidden) for each."""
        batches = [pack(each, self._rotary, self.shape.window, self._device) for each in calls]
        shapes = [(batch.tokens.numel(), 1, self.shape.hidden) for batch in batches]

        def forward_step(iterator: Iterator[tuple[int, MicroBatch]], model) -> tuple[Tensor, object]:
            i, batch = next(iterator)
            hidden = model(batch.tokens, None, None, packed_seq_params=batch.packed)
            return hidden, partial(finish, i, batch)

        return self._schedule(
            forward_step_func=forward_step, data_iterator=iter(enumerate(batches)), model=self._model,
            num_microbatches=len(batches), seq_length=1, micro_batch_size=1,
            pg_collection=self._trunk.pg_collection,
            p2p_communicator=_AgreedShapes(self._groups.pp, self._config, shapes), **mode,
        )

    def _collect(self, i: int, batch: MicroBatch, hidden: Tensor, non_loss_data: bool) -> dict[str, Tensor]:
        return self._read(batch, hidden)

    def _loss(self, objective: Objective, i: int, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, dict]:
        """Scalar to minimize, a token count that Megatron wants and we do not use, and the detached outputs."""
        outputs = self._read(batch, hidden)
        loss = objective(i, outputs)
        if not loss.requires_grad:  # nothing to learn here, but a pipeline's other stages wait for a gradient
            loss = loss + 0.0 * hidden.sum()
        unused = torch.zeros((), dtype=torch.int32, device=hidden.device)
        return loss, unused, {name: values.detach() for name, values in outputs.items()}

    # ---- heads

    def _read(self, batch: MicroBatch, hidden: Tensor) -> dict[str, Tensor]:
        """hidden [tokens, 1, hidden] → results of the calls, by name."""
        alike: dict[tuple, dict[str, Reading]] = {}
        for name, reading in batch.readings.items():
            alike.setdefault((id(reading.at), reading.call.temperature), {})[name] = reading
        hidden = hidden.squeeze(1)
        results: dict[str, Tensor] = {}
        for readings in alike.values():
            results |= self._head(readings, hidden)
        return results

    def _head(self, readings: Mapping[str, Reading], hidden: Tensor) -> dict[str, Tensor]:
        """Readings of the same tokens at the same temperature."""
        reading = next(iter(readings.values()))
        states = hidden.index_select(0, reading.at)
        if self.role != "policy":
            return dict.fromkeys(readings, self._trunk.scalars(states))
        wants_entropy = any(r.call.operation == "entropy" for r in readings.values())
        logprobs, entropy = logprobs_and_entropy(
            self._trunk.logits(states), reading.targets, self.shape.vocab, reading.call.temperature, self._groups.tp,
            wants_entropy,
        )
        return {name: entropy if r.call.operation == "entropy" else logprobs for name, r in readings.items()}

    # ---- optimizer

    def zero_grad(self) -> None:
        self._model.zero_grad_buffer()

    def step(self, lr: float) -> float:
        with using(self._groups):
            finalize_model_grads([self._model], None, pg_collection=self._trunk.pg_collection)
        return self._optimizer.step(lr)

    def optimizer_state(self) -> dict[str, Tensor]:
        return self._optimizer.state()

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        self._optimizer.load_state(state)

    # ---- weights

    def export(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._trunk.named_parameters()}

    def load(self, folder: HFFolder) -> None:
        folder.read_into(self.export(), WeightLayout(self.shape, self.role, self.layout, "megatron"), self._rank)
        if self._optimizer is not None:
            self._optimizer.parameters_were_loaded()

    @property
    def parameter_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self._trunk.parameters())


class _AgreedShapes(P2PCommunicator):
    """Pipeline transfers of micro-batches of different sizes. Each stage knows all sizes, so none is sent."""

    def __init__(self, group, config, shapes: Sequence[tuple[int, int, int]]) -> None:
        super().__init__(group, config)
        self._activations, self._gradients = iter(shapes), iter(shapes)

    def _communicate_shapes(self, tensor_send_next, tensor_send_prev, recv_prev: bool, recv_next: bool):
        return next(self._activations) if recv_prev else None, next(self._gradients) if recv_next else None
