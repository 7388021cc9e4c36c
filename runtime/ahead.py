"""What a run with `lag = 1` has sampled for the next iteration, in a checkpoint: the weights that drew it are gone.

    checkpoints/step-000040/ahead/y.safetensors     the fields of `Sequences`, of all samples in the order of their rows
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Iterator, Optional

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_dsl.diagnostics import fault
from rlhf_dsl.typed import Expr
from runtime.executor.executor import Executor
from runtime.sequences import Sequences

FOLDER = "ahead"
FIELDS = ("tokens", "prompt_lengths", "response_lengths", "logprobs", "truncated")


def write(beside: Optional[Path], executor: Executor) -> None:
    """Writes what is sampled so far. Collective; beside: the checkpoint's folder on rank 0, None elsewhere."""
    if executor.following is None:
        return
    for expr in _responses(executor):
        found = _gathered(executor, executor.following.env[expr].data)
        if beside is not None:
            (beside / FOLDER).mkdir(parents=True, exist_ok=True)
            save_file(found, beside / FOLDER / f"{expr.attr('name')}.safetensors")


def restore(path: Path, executor: Executor) -> None:
    """The next iteration takes what is there in place of sampling, unless its sizes are others now. Raises R0165."""
    for expr in _responses(executor):
        file = path / FOLDER / f"{expr.attr('name')}.safetensors"
        if not file.is_file():
            continue
        try:
            told = Sequences(**load_file(file))
        except (SafetensorError, OSError, TypeError) as error:
            raise fault("R0165", place=str(file), reason=f"it cannot be read ({error})") from error
        if len(told) == math.prod(executor.plan.dims[d].size for d in expr.type.dims[:-1]):
            executor.told[expr] = told


def _responses(executor: Executor) -> Iterator[Expr]:
    for step in executor.plan.steps:
        if step.op == "generate" and step.ahead:
            yield executor.exprs[step.expr]


def _gathered(executor: Executor, mine: Sequences) -> dict[str, Tensor]:
    """Homes are runs of rows in the order of ranks, so what ranks hold, in their order, is all in order."""
    gather = executor.world.reducer.all_gather_rows
    return {name: torch.cat(gather(getattr(mine, name))) for name in FIELDS}
