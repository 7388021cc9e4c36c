"""How the engine of a stage computes, beside where: what `plan:` asks for becomes fields of its layout."""

from __future__ import annotations

import dataclasses
from typing import Iterable

from compiler.constraints import GENERATE, TRAIN, Stage
from compiler.machine import SINGLE, Storage
from compiler.plan import LayoutSpec
from compiler.resharding.transitions import ITEMSIZE


def executed(spec: LayoutSpec, stage: Stage, stages: Iterable[Stage], usual: Storage = SINGLE) -> LayoutSpec:
    """The layout with what is asked of its stage. What has nothing to act on is off: a program runs on one rank, too.

    Generation has the precision of training unless it is given its own. usual: what is done unless something is asked
    """
    asked = stage.items
    if stage.stage == GENERATE:
        others = (s.items.get("precision", usual.precision) for s in stages if s.model == stage.model and s.stage != GENERATE)
        strategy = asked.get("reshard", spec.strategy)
        return dataclasses.replace(spec, precision=asked.get("precision") or next(others), strategy=strategy)
    sharded = "sharded" if usual.sharded else "replicated"
    return dataclasses.replace(
        spec, precision=asked.get("precision", usual.precision), chunks=asked.get("chunks", 1),
        sequence_parallel=asked.get("sequence_parallel", usual.sequence_parallel) and spec.tp > 1,
        sharded_optimizer=asked.get("optimizer", sharded) == "sharded" and spec.dp > 1 and stage.stage == TRAIN,
    )


def execution_fault(spec: LayoutSpec, stage: str) -> str:
    """What in a plan's layout no engine of the stage does, "" if nothing."""
    if spec.precision not in ITEMSIZE:
        return f"there is no precision `{spec.precision}`"
    if spec.chunks < 1 or spec.chunks > 1 and (spec.pp == 1 or stage == GENERATE):
        return f"{spec.chunks} chunks need a pipeline"
    if spec.sequence_parallel and (spec.tp == 1 or stage == GENERATE):
        return "sequence parallelism needs tensor parallelism"
    if spec.sharded_optimizer and (spec.dp == 1 or stage != TRAIN):
        return "only data parallelism of a trained model cuts optimizer states"
    return ""
