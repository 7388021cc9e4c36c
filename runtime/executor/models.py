"""The models of a plan on one rank: their engines, tokenizers, and the moves of weights between layouts."""

from __future__ import annotations

import contextlib
import math
from functools import cached_property
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence

import torch
from torch import Tensor

from compiler.layout import ModelLayout
from compiler.offloading import OPTIMIZER, PARTS, WEIGHTS, Offloading, changing, is_refilled, shares_memory
from compiler.plan import Plan, TrainStep, UpdateLoop
from compiler.proof.wellformed import shape_of
from compiler.resharding import transitions
from compiler.resharding.gathers import transfer_by
from compiler.resharding.redistribute import redistribute
from compiler.sources import resolve_model
from compiler.weights import WeightLayout
from rlhf_dsl.diagnostics import fault
from rlhf_dsl.typed import Optimizer
from runtime.engines.base import CACHE_BYTES, MASTER, MOMENTS, AdamW, Engine, Execution
from runtime.engines.host import Host
from runtime.hf_folder import HFFolder, in_parts
from runtime.in_place import InPlace
from runtime.meshes import Job, Mesh
from runtime.schedule import learning_rate
from runtime.tokenizer import Tokenizer
from runtime.transfer import WeightMover

GENERATE, TRAIN = ".generate", ".train"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def layouts_of(plan: Plan) -> dict[str, ModelLayout]:
    """The layouts of a plan by name."""
    return {name: transitions.resolve(plan.layouts, name) for name in plan.layouts}


class Models:
    """Engines of this rank by layout name, made and loaded when first asked for.

    All ranks make the same Models and call its collective methods (`reshard`, `act`, `whole`) together.
    scratch: a folder for what leaves a CPU's memory, None for the system's own
    """

    def __init__(self, plan: Plan, job: Job, scratch: Optional[Path] = None) -> None:
        self.plan, self.job = plan, job
        self._host, self._offloaded = Host(job.device, scratch), Offloading(plan).layouts
        self.layouts = layouts_of(plan)
        self.mesh = Mesh(job, self.layouts.values())
        self.folders = {name: resolve_model(spec.source, plan.program.folder) for name, spec in plan.models.items()}
        self.shapes = {name: shape_of(plan, name) for name in plan.models}
        self._engines: dict[str, Any] = {}
        self._movers: dict[tuple[str, str], WeightMover] = {}
        self._version = dict.fromkeys(plan.models, 0)  # rises when weights change
        self._placed: dict[str, int] = {}  # generation layout -> version of its weights
        self._sources: dict[str, str] = {}  # generation layout -> where its weights came from
        self._in_place: dict[str, Optional[InPlace]] = {}  # generation layout -> its memory, shared with training's
        self.optimizer_steps = dict.fromkeys(plan.models, 0)

    @cached_property
    def tokenizers(self) -> dict[str, Tokenizer]:
        """By model; models of one folder share one."""
        made = {folder: Tokenizer(folder) for folder in dict.fromkeys(self.folders.values())}
        return {name: made[folder] for name, folder in self.folders.items()}

    # ---- engines

    def engine(self, layout: str) -> Any:
        """This rank's engine of a layout with its weights in memory, None if it is not in it. Collective.

        A layout that shares memory with another one takes it: that one's weights are gone, and come back likewise. What
        is offloaded is not there before its step says so.
        """
        if layout in self._sources and layout not in self._placed:
            self.reshard(self._sources[layout], layout)
        self._take_back(layout)
        return self._engine(layout)

    def _engine(self, layout: str) -> Any:
        if self.job.rank not in self.layouts[layout]:
            return None
        if layout not in self._engines:
            engine = self._engines[layout] = self._make(layout)
            if layout in self._offloaded:
                engine.offload(PARTS if layout.endswith(TRAIN) else (WEIGHTS,), self._host, 0)
        return self._engines[layout]

    def prepare(self) -> None:
        """Makes every engine now, so that what is wrong with a model shows before the first iteration."""
        for layout in self.layouts:
            self._engine(layout)

    def _make(self, layout: str) -> Any:
        model = layout.split(".")[0]
        if layout.endswith(GENERATE):
            makers = {"torch": self._sampler, "vllm": self._vllm}
            return makers[transitions.engine_of(self.plan.layouts, layout)](model, layout)
        from runtime.engines.megatron import MegatronEngine

        spec = self.plan.models[model]
        engine: Engine = MegatronEngine(
            self.shapes[model], spec.role, self.layouts[layout], self.mesh, _adamw(spec.optimizer), self._execution(layout),
        )
        engine.load(HFFolder(self.folders[model]))
        return engine

    def _sampler(self, model: str, layout: str) -> Any:
        from runtime.engines.sampler import SamplerEngine

        place = self.layouts[layout]
        groups = self.mesh.groups(place)
        return SamplerEngine(
            self.shapes[model], place, self.job.rank, groups.tp if place.tp > 1 else None, dtype=self._dtype(layout),
            device=self.job.device, cache_bytes=self._cache_bytes(layout),
        )

    def _execution(self, layout: str) -> Execution:
        spec = self.plan.layouts[layout]
        return Execution(self._dtype(layout), spec.sequence_parallel, spec.sharded_optimizer)

    def _dtype(self, layout: str) -> torch.dtype:
        return DTYPES[self.plan.layouts[layout].precision]

    def _vllm(self, model: str, layout: str) -> Any:
        from runtime.engines.vllm import VLLMEngine

        if layout in self._offloaded and self.job.device.type == "cpu":
            raise fault("R0169", layout=layout)
        place = self.layouts[layout]
        return VLLMEngine(self.shapes[model], self.folders[model], place, self.job.rank, self.mesh.groups(place).tp,
                          f"{self.job.name}-{layout}", self._dtype(layout), self.job.device,
                          self._cache_bytes(layout), sleeps=layout in self._offloaded)

    def _cache_bytes(self, layout: str) -> int:
        return self.plan.layouts[layout].cache_bytes or CACHE_BYTES

    # ---- weights

    def weight_layout(self, layout: str) -> WeightLayout:
        model = layout.split(".")[0]
        return transitions.weight_layout(self.shapes[model], self.plan.models[model].role, self.plan.layouts, layout)

    def reshard(self, src: str, dst: str) -> None:
        """Brings the weights of layout `dst` up to those of `src`; nothing moves if they are."""
        version = self._version[src.split(".")[0]]
        if self._placed.get(dst) == version:
            return
        held = self._weights(src)
        self._placed[dst], self._sources[dst] = version, src
        there = self._weights_of(dst, self._engine(dst))
        if not shares_memory(self.plan, src, dst):
            self.mover(src, dst).move(held, there)
            return
        if dst not in self._in_place:
            self._in_place[dst] = InPlace(self.mover(src, dst).transfer, self.job.rank, held, there) if held else None
        memory = self._in_place[dst]
        self.mover(src, dst).move(held, there, memory and memory.arrives, memory and memory.left)

    def _take_back(self, layout: str) -> None:
        """The memory of `layout` from a generation layout that has it."""
        for dst, memory in self._in_place.items():
            if self.plan.layouts[dst].within == layout and self._placed.pop(dst, None) is not None and memory:
                memory.give_back()

    # ---- what leaves the device

    def offload(self, layout: str, parts: Sequence[str]) -> None:
        """Parts of a model leave this rank's memory. Weights of a sampler that come anew each time are forgotten."""
        version: Optional[int] = self._version[layout.split(".")[0]]
        if WEIGHTS in parts:
            self._take_back(layout)
        if is_refilled(self.plan, layout):
            self._placed.pop(layout, None)
            version = None
        if layout in self._engines:
            self._engines[layout].offload(parts, self._host, version)

    def reload(self, layout: str, parts: Sequence[str]) -> None:
        """Parts that left are back on this rank."""
        engine = self._engine(layout)
        if engine is not None:
            engine.reload(parts)

    @contextlib.contextmanager
    def _at_hand(self, *layouts: str, parts: Sequence[str] = PARTS) -> Iterator[None]:
        """Parts of these layouts are on their ranks in the meantime, for what no step of the plan brings them for."""
        engines = {layout: self._engine(layout) for layout in layouts}
        came = {layout: [p for p in parts if p in engine.away] for layout, engine in engines.items() if engine is not None}
        for layout, left in came.items():
            engines[layout].reload(left)
        yield
        for layout, left in came.items():
            engines[layout].offload(left, self._host, self._version[layout.split(".")[0]])

    def mover(self, src: str, dst: str) -> WeightMover:
        """The move between two layouts; it counts the bytes that this rank sent and received. Collective."""
        if (src, dst) not in self._movers:
            strategy = transitions.strategy_of(self.plan.layouts, src, dst)
            dtype = DTYPES[transitions.wire_precision(self.plan.layouts, src, dst)]
            transfer = transfer_by(strategy, self.weight_layout(src), self.weight_layout(dst), dtype.itemsize)
            self.mesh.make(transfer.groups)
            self._movers[src, dst] = WeightMover(transfer, self.job.rank, dtype=dtype, groups=self.mesh.group,
                                                 device=self.job.device)
        return self._movers[src, dst]

    def bytes_moved(self) -> dict[str, tuple[int, int]]:
        """By move, `actor.train to actor.generate`: bytes that this rank sent to and received from others so far."""
        return {f"{src} to {dst}": (m.bytes_sent, m.bytes_received) for (src, dst), m in self._movers.items()}

    def _weights(self, layout: str) -> dict[str, Tensor]:
        return self._weights_of(layout, self.engine(layout))

    def _weights_of(self, layout: str, engine: Any) -> dict[str, Tensor]:
        if engine is None:
            return {}
        return engine.weights if layout.endswith(GENERATE) else engine.export()

    def home_layout(self, model: str) -> str:
        """The layout in which a model's weights are kept: that of training, else of forward passes, else of generation."""
        names = [f"{model}.{stage}" for stage in ("train", "forward", "generate")]
        return next(name for name in names if name in self.layouts)

    @property
    def changing(self) -> tuple[str, ...]:
        """The models whose weights the run changes, in the order of the plan."""
        return tuple(name for name in self.plan.models if name in changing(self.plan))

    def whole(self, model: str) -> dict[str, Tensor]:
        """The canonical tensors of a model on rank 0, {} elsewhere. Collective."""
        return {name: tensor for part in self.parts(model) for name, tensor in part.items()}

    def parts(self, model: str, moment: str = "") -> Iterator[dict[str, Tensor]]:
        """The canonical tensors of a model, or of a moment of its optimizer, on rank 0, {} elsewhere. Collective.

        They come a file's worth at a time, so that no rank has to hold a whole model; all ranks take every part.
        """
        layout = self.home_layout(model)
        src, dtype = self.weight_layout(layout), torch.float32 if moment else self._dtype(layout)
        bytes_of = {name: math.prod(size) * dtype.itemsize for name, size in src.tensors.items()}
        with self._at_hand(layout, parts=(OPTIMIZER if moment else WEIGHTS,)):
            engine = self.engine(layout)
            held = engine.moment(moment) if moment and engine is not None else self._weights_of(layout, engine)
            for names in in_parts(bytes_of):
                disk = WeightLayout(src.shape, src.role, ModelLayout((0,)), "disk", names)
                into = {name: torch.empty(size, dtype=dtype) for name, size in disk.local_tensors(self.job.rank).items()}
                WeightMover(redistribute(src, disk, dtype.itemsize), self.job.rank, dtype=dtype).move(held, into)
                yield into

    def moments(self, model: str) -> tuple[str, ...]:
        """What a checkpoint keeps of a model's optimizer, of each parameter."""
        if self.plan.models[model].optimizer is None:
            return ()
        return MOMENTS if self.plan.layouts[f"{model}.train"].precision == "fp32" else (*MOMENTS, MASTER)

    def dtype(self, model: str) -> torch.dtype:
        """Of its weights at home."""
        return self._dtype(self.home_layout(model))

    def load_weights(self, model: str, folder: HFFolder) -> None:
        """The weights of a folder in place of those that the model began with."""
        layout = self.home_layout(model)
        with self._at_hand(layout):
            self._version[model] += 1
            engine = self.engine(layout)
            if engine is not None:
                engine.load(folder)

    def load_moments(self, model: str, folders: Mapping[str, HFFolder], steps: int) -> None:
        """The optimizer's moments, by name, after so many steps."""
        layout = f"{model}.train"
        with self._at_hand(layout):
            self._version[model] += 1
            engine = self.engine(layout)
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
        with self._at_hand(src, dst):
            self._version[target] += 1
            self.mover(src, dst).move(self._weights(src), self._weights(dst))

    def ema(self, source: str, target: str, decay: float) -> None:
        """target = decay * target + (1 - decay) * source."""
        src, dst = self.home_layout(source), self.home_layout(target)
        with self._at_hand(src, dst), torch.no_grad():
            self._version[target] += 1
            held = self._weights(dst)
            arrived = {name: torch.empty_like(tensor) for name, tensor in held.items()}
            self.mover(src, dst).move(self._weights(src), arrived)
            for name, tensor in held.items():
                tensor.lerp_(arrived[name], 1 - decay)


def _adamw(optimizer: Optional[Optimizer]) -> Optional[AdamW]:
    if optimizer is None:
        return None
    return AdamW(tuple(optimizer.betas), optimizer.eps, optimizer.weight_decay, optimizer.max_grad_norm)
