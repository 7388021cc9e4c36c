"""AdamW over the gradients that Megatron's data parallelism has summed, its states cut over the data shards if asked.

Megatron's own optimizer factory gathers objects over the whole world, which excludes models on some of the ranks, and
its weight decay needs its scheduler; what remains of it are the few lines here. Megatron keeps gradients in flat
buffers, cut into buckets. Where the states are cut (ZeRO-1, arXiv 1910.02054), each data shard gets the sum of an equal
part of each bucket, steps on that part, and all gather the parameters in the bucket, whose gradients are used up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from runtime.engines.base import MASTER, MOMENTS, AdamW
from runtime.meshes import LayoutGroups


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of a flattened parameter, which lie from `at` on in the rank's part of a bucket.

    master: what the step is made on, a view of the parameter if that has 32 bits
    """

    name: str
    parameter: torch.nn.Parameter
    start: int
    stop: int
    at: int
    master: Tensor

    @property
    def grad(self) -> Tensor:
        return self.parameter.main_grad.view(-1)[self.start:self.stop]

    def of(self, part: Tensor) -> Tensor:
        return part[self.at:self.at + self.stop - self.start]


@dataclass(frozen=True)
class Part:
    """What this rank keeps of a bucket: f32 [size] for each moment.

    bucket: its gradients, over all data shards; first: where this part begins in it
    ranges: of each parameter of the bucket, its elements there
    """

    bucket: Tensor
    first: int
    ranges: Mapping[str, tuple[int, int]]
    states: Mapping[str, Tensor]
    segments: tuple[Segment, ...] = field(default=())


class MegatronAdamW:
    """Steps in 32 bits; parameters of fewer bits have a master copy here.

    parameters: trained parameters by local name, each with Megatron's `main_grad`
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], data_parallels: Sequence[DistributedDataParallel],
        groups: LayoutGroups, settings: AdamW,
    ) -> None:
        self._parameters, self._settings, self._groups = dict(parameters), settings, groups
        self._data_parallels = data_parallels
        self._sharded = data_parallels[0].ddp_config.use_distributed_optimizer
        if self._sharded:
            self._lay_apart()
        narrow = any(p.dtype != torch.float32 for p in parameters.values())
        self.moments = (*MOMENTS, MASTER) if narrow else MOMENTS
        self._parts = list(self._cut())
        self._segments = [segment for part in self._parts for segment in part.segments]
        decayed = [s.master for s in self._segments if s.parameter.dim() > 1]
        plain = [s.master for s in self._segments if s.parameter.dim() <= 1]
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=0.0, betas=settings.betas, eps=settings.eps, fused=True,
        )
        for part in self._parts:
            for segment in part.segments:
                self._adamw.state[segment.master] = {"step": torch.zeros((), device=segment.master.device)} | {
                    moment: segment.of(part.states[moment]) for moment in MOMENTS
                }
        self._steps = 0

    def _lay_apart(self) -> None:
        """Gives each parameter memory of its own again, so that each may give it up alone (`runtime.in_place`)."""
        for parameter in self._parameters.values():
            parameter.data = torch.empty_like(parameter.data)
        for model in self._data_parallels:
            for buffer in model.buffers:
                buffer.param_data.untyped_storage().resize_(0)

    def _cut(self) -> Iterator[Part]:
        names = {parameter: name for name, parameter in self._parameters.items()}
        for buffer in (buffer for model in self._data_parallels for buffer in model.buffers):
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel() // (self._groups.dp.size() if self._sharded else 1)
                first = size * self._groups.dp.rank() if self._sharded else 0
                ranges = {
                    names[p]: tuple(place - bucket.offset for place in buffer.param_index_map[p][:2])
                    for p in bucket.params_list
                }
                yield self._part(bucket.grad_data, ranges, first, size)

    def _part(self, bucket: Tensor, ranges: Mapping[str, tuple[int, int]], first: int, size: int) -> Part:
        """The part [first, first + size) of a bucket."""
        states = {moment: torch.zeros(size, device=bucket.device) for moment in self.moments}
        segments = []
        for name, (start, stop) in ranges.items():
            begin, end = max(start, first), min(stop, first + size)
            if begin >= end:
                continue
            parameter = self._parameters[name]
            at, master = begin - first, parameter.detach().view(-1)[begin - start:end - start]
            if MASTER in states:
                master = states[MASTER][at:at + end - begin].copy_(master)
            segments.append(Segment(name, parameter, begin - start, end - start, at, master))
        return Part(bucket, first, ranges, states, tuple(segments))

    # ---- stepping

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Clips, steps, and writes the parameters; gradients are used up. Returns their global norm before clipping."""
        norm, limit = self._norm(), self._settings.max_grad_norm
        if self._segments and 0 < limit < norm:
            torch._foreach_mul_([segment.grad for segment in self._segments], limit / (norm + 1e-6))
        for group in self._adamw.param_groups:
            group["lr"] = lr
        for segment in self._segments:
            segment.master.grad = segment.grad
        self._adamw.step()
        self._steps += 1
        for segment in self._segments:
            segment.master.grad = None
        self._write_parameters()
        return norm

    def _norm(self) -> float:
        """Counts each element of the model once, though tp ranks or the ends of a pipeline may share a parameter."""
        counted = [
            s.grad for s in self._segments if param_is_not_shared(s.parameter)
            and param_is_not_tensor_parallel_duplicate(s.parameter, tp_group=self._groups.tp)
        ]
        square = torch.zeros((), device=self._parts[0].states[MOMENTS[0]].device)
        if counted:
            square = torch.stack(torch._foreach_norm(counted)).square().sum()
        for group in (self._groups.replica, *([self._groups.dp] if self._sharded else [])):
            if group.size() > 1:
                dist.all_reduce(square, group=group)
        return square.sqrt().item()

    def _write_parameters(self) -> None:
        if MASTER in self.moments:
            for segment in self._segments:
                segment.parameter.view(-1)[segment.start:segment.stop].copy_(segment.master)
        for part in self._parts if self._sharded else ():
            self._share(part)

    def _share(self, part: Part) -> None:
        """All data shards get the parameters of a bucket, in the memory of their gradients."""
        dtype, count = next(iter(self._parameters.values())).dtype, part.bucket.numel()
        whole = part.bucket.view(dtype)[:count]
        mine = whole[part.first:part.first + count // self._groups.dp.size()]
        for segment in part.segments:
            segment.of(mine).copy_(segment.parameter.view(-1)[segment.start:segment.stop])
        dist.all_gather_into_tensor(whole, mine, group=self._groups.dp)
        for name, (start, stop) in part.ranges.items():
            self._parameters[name].view(-1).copy_(whole[start:stop])

    # ---- state

    @property
    def steps(self) -> int:
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps
        for state in self._adamw.state.values():
            state["step"].fill_(float(steps))

    def states(self) -> list[Tensor]:
        """All that is kept between steps but their number."""
        return [tensor for part in self._parts for tensor in part.states.values()]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.states())

    def moment(self, name: str) -> dict[str, Tensor]:
        """f32 tensors of the sizes of the parameters, gathered from all data shards, on each of them."""
        found: dict[str, Tensor] = {}
        for part in self._parts:
            whole = self._gathered(part.states[name]) if self._sharded else part.states[name]
            for parameter, (start, stop) in part.ranges.items():
                found[parameter] = whole[start:stop].view(self._parameters[parameter].shape)
        return found

    def _gathered(self, part: Tensor) -> Tensor:
        whole = part.new_empty(part.numel() * self._groups.dp.size())
        dist.all_gather_into_tensor(whole, part, group=self._groups.dp)
        return whole

    @torch.no_grad()
    def load_moment(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """`tensors`: whole, some of the parameters'. With `MASTER` the parameters become these, rounded."""
        for part in self._parts:
            for segment in (s for s in part.segments if s.name in tensors):
                segment.of(part.states[name]).copy_(tensors[segment.name].reshape(-1)[segment.start:segment.stop])
        if name == MASTER:
            for parameter, tensor in tensors.items():
                self._parameters[parameter].copy_(tensor)
