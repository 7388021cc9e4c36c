"""Checkpoints: everything that a run changes, at the end of an iteration, in a form that no layout shows in.

    checkpoints/step-000040/
        actor/                         a Hugging Face folder, for each model whose weights the run changes
        training/actor/exp_avg/        the moments of its optimizer, under the names of the weights that they belong to
        training/actor/exp_avg_sq/
        training/actor/master/         its weights in 32 bits, if it has fewer
        ahead/                         with `lag = 1`, the next batch: see `runtime.ahead`
        checkpoint.json                iteration, data positions, states, optimizer steps, and a SHA-256 of every file

A checkpoint is written beside its place and renamed, so one that is there is whole. Draws have names, which need no state.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional

from rlhf_dsl.diagnostics import fault
from runtime import ahead
from runtime.engines.base import MASTER, MOMENTS
from runtime.executor.executor import Executor
from runtime.executor.models import Models
from runtime.hf_folder import HFFolder, config_for_role, read_config, write_parts

FORMAT = "rlflow.checkpoint/1"
FILE = "checkpoint.json"
BLOCK = 1 << 20


@dataclass(frozen=True)
class Progress:
    """How far a run is. iteration: the last finished; positions: of each root dim in its data stream."""

    iteration: int
    positions: Mapping[str, int]
    states: Mapping[str, float]
    optimizer_steps: Mapping[str, int]


def name_of(iteration: int) -> str:
    return f"step-{iteration:06d}"


def write(folder: Path, models: Models, executor: Executor, iteration: int) -> Path:
    """Writes `folder/step-N`. Collective: weights are gathered to rank 0, a file's worth at a time. Raises R0163."""
    path = folder / name_of(iteration)
    beside = folder / f".{path.name}"
    first = models.job.rank == 0
    if first:
        shutil.rmtree(beside, ignore_errors=True)
    for model in models.changing:
        _write_model(beside if first else None, models, model)
    ahead.write(beside if first else None, executor)
    if first:
        _finish(beside, path, executor, iteration)
    return path


def _write_model(beside: Optional[Path], models: Models, model: str) -> None:
    folder = models.folders[model]
    config = config_for_role(read_config(folder), models.plan.models[model].role)
    config |= {"dtype": str(models.dtype(model)).removeprefix("torch.")}
    _write_parts(beside and beside / model, config, models.parts(model), folder)
    for moment in models.moments(model):
        _write_parts(beside and beside / "training" / model / moment, {}, models.parts(model, moment), None)


def _write_parts(path: Optional[Path], config: Mapping[str, Any], parts: Iterator, companions: Optional[str]) -> None:
    """On a rank that does not write: takes part."""
    if path is not None:
        write_parts(path, config, parts, companions)
    for _ in parts:
        pass


def _finish(beside: Path, path: Path, executor: Executor, iteration: int) -> None:
    progress = {"iteration": iteration, "positions": dict(executor.positions), "states": dict(executor.states),
                "optimizer_steps": dict(executor.models.optimizer_steps)}
    files = {str(p.relative_to(beside)): _digest(p) for p in sorted(beside.rglob("*")) if p.is_file()}
    try:
        (beside / FILE).write_text(json.dumps({"format": FORMAT, **progress, "files": files}, indent=1) + "\n", encoding="utf-8")
        aside = beside.with_name(f".{path.name}.old")
        if path.exists():
            os.replace(path, aside)
        os.replace(beside, path)
        shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise fault("R0163", place=str(path), reason=error.strerror or str(error)) from error


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def latest(folder: Path) -> Optional[Path]:
    """The newest whole checkpoint."""
    return max((p.parent for p in folder.glob(f"step-*/{FILE}")), default=None)


def read_progress(path: Path) -> Progress:
    """Raises R0165 for a checkpoint that is damaged: not JSON, of another format, or with a file that has changed."""
    try:
        value = json.loads((path / FILE).read_text(encoding="utf-8"))
        progress = Progress(value["iteration"], value["positions"], value["states"], value["optimizer_steps"])
        files = value["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise fault("R0165", place=str(path / FILE), reason=f"it cannot be read ({error})") from error
    if value.get("format") != FORMAT:
        raise fault("R0165", place=str(path / FILE), reason=f"its format is {value.get('format')!r}, not `{FORMAT}`")
    for name, digest in files.items():
        if not (path / name).is_file() or _digest(path / name) != digest:
            raise fault("R0165", place=str(path / name), reason="it has changed since it was written, or is missing")
    return progress


def restore(path: Path, models: Models, executor: Executor) -> int:
    """Brings models and executor to where the checkpoint is. Returns its iteration."""
    progress = read_progress(path)
    for model in models.changing:
        training = path / "training" / model
        wide = (training / MASTER).is_dir()  # what a model of fewer bits became, which a run of either precision takes
        models.load_weights(model, HFFolder(training / MASTER if wide else path / model))
        if models.plan.models[model].optimizer is not None:
            moments = {moment: HFFolder(training / moment) for moment in MOMENTS}
            models.load_moments(model, moments, progress.optimizer_steps[model])
    ahead.restore(path, executor)
    executor.positions = dict(progress.positions)
    executor.states = dict(progress.states)
    models.optimizer_steps = dict(progress.optimizer_steps)
    return progress.iteration
