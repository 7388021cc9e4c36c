"""AdamW over the gradients that Megatron's data parallelism has summed.

Megatron's own optimizer factory gathers objects over the whole world, which excludes models on some of the ranks, and
its weight decay needs its scheduler; what remains of it without a distributed optimizer are the few lines here.
"""

from __future__ import annotations

from typing import Mapping

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from runtime.engines.base import AdamW
from runtime.meshes import LayoutGroups

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"


class MegatronAdamW:
    """Steps in 32 bits; parameters of fewer bits have a master copy here.

    parameters: trained parameters by local name, each with Megatron's `main_grad`
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], data_parallel: DistributedDataParallel,
        groups: LayoutGroups, settings: AdamW,
    ) -> None:
        self._parameters, self._settings = dict(parameters), settings
        self._data_parallel, self._groups = data_parallel, groups
        self._masters = {name: _master(p) for name, p in parameters.items()}
        decayed = [m for m in self._masters.values() if m.dim() > 1]
        plain = [m for m in self._masters.values() if m.dim() <= 1]
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=0.0, betas=settings.betas, eps=settings.eps, fused=True,
        )
        for master in self._masters.values():
            self._adamw.state[master] = {"step": torch.zeros((), device=master.device)} | {
                moment: torch.zeros_like(master) for moment in MOMENTS
            }
        # a norm counts each parameter of the model once, though tp ranks or pipeline ends may share it
        self._counted = [
            p for p in parameters.values()
            if param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p, tp_group=groups.tp)
        ]

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Clips, steps, and writes the parameters. Returns the global gradient norm before clipping."""
        norm = self._norm()
        limit = self._settings.max_grad_norm
        if 0 < limit < norm:
            for buffer in self._data_parallel.buffers:
                buffer.scale_gradients(limit / (norm + 1e-6))
        for group in self._adamw.param_groups:
            group["lr"] = lr
        for name, master in self._masters.items():
            master.grad = self._parameters[name].main_grad
        self._adamw.step()
        for name, master in self._masters.items():
            master.grad = None
            if master is not self._parameters[name]:
                self._parameters[name].copy_(master)
        return norm

    def _norm(self) -> float:
        square = torch.zeros((), device=next(iter(self._masters.values())).device)
        if self._counted:
            square = torch.stack(torch._foreach_norm([p.main_grad for p in self._counted])).square().sum()
        if self._groups.replica.size() > 1:
            dist.all_reduce(square, group=self._groups.replica)
        return square.sqrt().item()

    def state(self) -> dict[str, Tensor]:
        """Live tensors `exp_avg/NAME`, `exp_avg_sq/NAME`, for fewer bits `master/NAME`; a copy of `step`, int64 []."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            state = self._adamw.state[master]
            tensors |= {f"{moment}/{name}": state[moment] for moment in MOMENTS}
            if master is not self._parameters[name]:
                tensors[f"{MASTER}/{name}"] = master
        return tensors | {"step": next(iter(self._adamw.state.values()))["step"].long().cpu()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            if name != "step":
                tensor.copy_(state[name])
        for moments in self._adamw.state.values():
            moments["step"].fill_(float(state["step"]))

    @torch.no_grad()
    def parameters_were_loaded(self) -> None:
        """Master copies follow parameters that somebody else wrote."""
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                master.copy_(self._parameters[name])


def _master(parameter: torch.nn.Parameter) -> Tensor:
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().float().requires_grad_()
