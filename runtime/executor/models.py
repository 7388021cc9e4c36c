"""The models of a plan on one rank: their engines, tokenizers, and the moves of weights between layouts."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Mapping, Optional

import torch
from torch import Tensor

from compiler import transitions
from compiler.gathers import transfer_by
from compiler.layout import ModelLayout
from compiler.plan import Action, Plan, TrainStep, UpdateLoop
from compiler.redistribute import redistribute
from compiler.sources import resolve_model
from compiler.weights import WeightLayout
from compiler.wellformed import shape_of
from rlhf_dsl.typed import Optimizer
from runtime.engines.base import AdamW, Engine
from runtime.hf_folder import HFFolder
from runtime.meshes import Job, Mesh
from runtime.schedule import learning_rate
from runtime.tokenizer import Tokenizer
from runtime.transfer import WeightMover

GENERATE = ".generate"


def layouts_of(plan: Plan) -> dict[str, ModelLayout]:
    """The layouts of a plan by name."""
    return {name: transitions.resolve(plan.layouts, name) for name in plan.layouts}


class Models:
    """Engines of this rank by layout name, made and loaded when first asked for.

    All ranks make the same Models and call its collective methods (`reshard`, `act`, `whole`) together.
    """

    def __init__(self, plan: Plan, job: Job) -> None:
        self.plan, self.job = plan, job
        self.layouts = layouts_of(plan)
        self.mesh = Mesh(job, self.layouts.values())
        self.folders = {name: resolve_model(spec.source, plan.program.folder) for name, spec in plan.models.items()}
        self.shapes = {name: shape_of(plan, name) for name in plan.models}
        self._engines: dict[str, Any] = {}
        self._movers: dict[tuple[str, str], WeightMover] = {}
        self._version = dict.fromkeys(plan.models, 0)  # rises when weights change
        self._placed: dict[str, int] = {}  # generation layout -> version of its weights
        self.optimizer_steps = dict.fromkeys(plan.models, 0)

    @cached_property
    def tokenizers(self) -> dict[str, Tokenizer]:
        """By model; models of one folder share one."""
        made = {folder: Tokenizer(folder) for folder in dict.fromkeys(self.folders.values())}
        return {name: made[folder] for name, folder in self.folders.items()}

    # ---- engines

    def engine(self, layout: str) -> Any:
        """This rank's engine of a layout, None if it is not in it."""
        if self.job.rank not in self.layouts[layout]:
            return None
        if layout not in self._engines:
            self._engines[layout] = self._make(layout)
        return self._engines[layout]

    def prepare(self) -> None:
        """Makes every engine now, so that what is wrong with a model shows before the first iteration."""
        for layout in self.layouts:
            self.engine(layout)

    def _make(self, layout: str) -> Any:
        model = layout.split(".")[0]
        if layout.endswith(GENERATE):
            makers = {"torch": self._sampler, "vllm": self._vllm}
            return makers[transitions.engine_of(self.plan.layouts, layout)](model, layout)
        from runtime.engines.megatron import MegatronEngine

        spec = self.plan.models[model]
        engine: Engine = MegatronEngine(self.shapes[model], spec.role, self.layouts[layout], self.mesh, _adamw(spec.optimizer))
        engine.load(HFFolder(self.folders[model]))
        return engine

    def _sampler(self, model: str, layout: str) -> Any:
        from runtime.engines.sampler import SamplerEngine

        place = self.layouts[layout]
        groups = self.mesh.groups(place)
        return SamplerEngine(self.shapes[model], place, self.job.rank, groups.tp if place.tp > 1 else None)

    def _vllm(self, model: str, layout: str) -> Any:
        from runtime.engines.vllm import VLLMEngine

        place = self.layouts[layout]
        return VLLMEngine(self.shapes[model], self.folders[model], place, self.job.rank, self.mesh.groups(place).tp,
                          f"{self.job.name}-{layout}")

    # ---- weights

    def weight_layout(self, layout: str) -> WeightLayout:
        model = layout.split(".")[0]
        return transitions.weight_layout(self.shapes[model], self.plan.models[model].role, self.plan.layouts, layout)

    def reshard(self, src: str, dst: str) -> None:
        """Brings the weights of layout `dst` up to those of `src`; nothing moves if they are."""
        version = self._version[src.split(".")[0]]
        if self._placed.get(dst) == version:
            return
        self._placed[dst] = version
        self.mover(src, dst).move(self._weights(src), self._weights(dst))

    def mover(self, src: str, dst: str) -> WeightMover:
        """The move between two layouts; it counts the bytes that this rank sent and received. Collective."""
        if (src, dst) not in self._movers:
            strategy = transitions.strategy_of(self.plan.layouts, src, dst)
            transfer = transfer_by(strategy, self.weight_layout(src), self.weight_layout(dst))
            self.mesh.make(transfer.groups)
            self._movers[src, dst] = WeightMover(transfer, self.job.rank, groups=self.mesh.group)
        return self._movers[src, dst]

    def bytes_moved(self) -> dict[str, tuple[int, int]]:
        """By move, `actor.train to actor.generate`: bytes that this rank sent to and received from others so far."""
        return {f"{src} to {dst}": (m.bytes_sent, m.bytes_received) for (src, dst), m in self._movers.items()}

    def _weights(self, layout: str) -> dict[str, Tensor]:
        engine = self.engine(layout)
        if engine is None:
            return {}
        return engine.weights if layout.endswith(GENERATE) else engine.export()

    def home_layout(self, model: str) -> str:
        """The layout in which a model's weights are kept: that of training, else of forward passes, else of generation."""
        names = [f"{model}.{stage}" for stage in ("train", "forward", "generate")]
        return next(name for name in names if name in self.layouts)

    @property
    def changing(self) -> tuple[str, ...]:
        """The models whose weights the run changes: trained ones, and those that `copy` and `ema` write to."""
        written = {s.args[1] for s in self.plan.steps if isinstance(s, Action) and s.kind in ("copy", "ema")}
        return tuple(name for name, spec in self.plan.models.items() if spec.optimizer or name in written)

    def whole(self, model: str, tensors: Optional[Mapping[str, Tensor]] = None) -> dict[str, Tensor]:
        """The canonical tensors of a model on rank 0, {} elsewhere. Collective.

        tensors: this rank's local tensors to gather in place of the weights, e.g. those of the optimizer
        """
        src = self.weight_layout(self.home_layout(model))
        disk = WeightLayout(src.shape, src.role, ModelLayout((0,)), "disk")
        into = {name: torch.empty(size) for name, size in disk.local_tensors(self.job.rank).items()}
        held = self._weights(self.home_layout(model)) if tensors is None else tensors
        WeightMover(redistribute(src, disk), self.job.rank).move(held, into)
        return into

    def moments(self, model: str, moment: str) -> dict[str, Tensor]:
        """This rank's part of a moment of the optimizer, by the names of the weights; {} where the model is not."""
        engine = self.engine(f"{model}.train")
        return engine.moment(moment) if engine is not None else {}

    def load_weights(self, model: str, folder: HFFolder) -> None:
        """The weights of a folder in place of those that the model began with."""
        engine = self.engine(self.home_layout(model))
        if engine is not None:
            engine.load(folder)
        self._version[model] += 1

    def load_moments(self, model: str, folders: Mapping[str, HFFolder], steps: int) -> None:
        """The optimizer's moments, by name, after so many steps."""
        engine = self.engine(f"{model}.train")
        if engine is None:
            return
        engine.optimizer_steps = steps
        for moment, folder in folders.items():
            engine.load(folder, moment)

    # ---- training

    def optimizer_step(self, model: str) -> tuple[float, float]:
        """(learning rate, gradient norm before clipping); the norm is 0 on ranks that do not train the model."""
        optimizer = self.plan.models[model].optimizer
        rate = learning_rate(optimizer.lr, self.optimizer_steps[model], self._steps_in_run(model))
        self.optimizer_steps[model] += 1
        self._version[model] += 1
        engine = self.engine(f"{model}.train")
        if engine is None:
            return rate, 0.0
        norm = engine.step(rate)
        engine.zero_grad()
        return rate, norm

    def _steps_in_run(self, model: str) -> int:
        loops = [s for s in self.plan.steps if isinstance(s, UpdateLoop)]
        mine = [u for u in loops if any(isinstance(s, TrainStep) and s.model == model for s in u.body)]
        return sum(u.epochs * u.minibatches for u in mine) * self.plan.run.steps

    # ---- actions

    def act(self, kind: str, args: tuple) -> None:
        {"copy": self.copy, "ema": self.ema}[kind](*args)

    def copy(self, source: str, target: str) -> None:
        """The weights of `source` become those of `target`."""
        src, dst = self.home_layout(source), self.home_layout(target)
        self.mover(src, dst).move(self._weights(src), self._weights(dst))
        self._version[target] += 1

    def ema(self, source: str, target: str, decay: float) -> None:
        """target = decay * target + (1 - decay) * source."""
        src, dst = self.home_layout(source), self.home_layout(target)
        held = self._weights(dst)
        arrived = {name: torch.empty_like(tensor) for name, tensor in held.items()}
        self.mover(src, dst).move(self._weights(src), arrived)
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.lerp_(arrived[name], 1 - decay)
        self._version[target] += 1


def _adamw(optimizer: Optional[Optimizer]) -> Optional[AdamW]:
    if optimizer is None:
        return None
    return AdamW(tuple(optimizer.betas), optimizer.eps, optimizer.weight_decay, optimizer.max_grad_norm)
