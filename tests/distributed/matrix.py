"""Run under mpiexec with a folder of plans as argument: runs each plan that is for as many ranks, one after the other.

NAME may say which fault of `planted.py` to plant. Of NAME.plan.json rank 0 writes NAME.result.json:
    metrics     by iteration, as the run reports them
    responses   by name, for each time it was generated: [[coordinates, tokens], ..]
    checks      of the weights of the actor after the run, see `Resharding`
and NAME.pt, all weights of all trained models.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from planted import planted
from torch import Tensor

from compiler.layout import generation_layout
from compiler.plan import HOME, Plan
from compiler.proof.verify import load_plan
from compiler.resharding.redistribute import WeightTransfer, redistribute, zero_redundancy_bytes
from compiler.weights import WeightLayout
from runtime import meshes
from runtime.executor.executor import Executor
from runtime.executor.models import Models
from runtime.executor.python_calls import start_ops
from runtime.executor.sources import open_sources
from runtime.run import run
from runtime.run_folder import RunFolder
from runtime.transfer import WeightMover
from runtime.world import DistWorld, SoloWorld

ACTOR = "actor"
CUT_EVENLY = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight",
              "down_proj.weight")  # every tp and pp here divides them


@dataclass
class Resharding:
    """The actor's weights as they arrive at a sampler. All counts are of all ranks together.

    wrong: elements that differ from the whole tensors; moved, planned: bytes received from others, by the mover's count
    and by the plan; evenly_cut, formula: those of tensors that are cut evenly, by the plan and by HybridFlow's formula
    (None where it does not apply)
    """

    wrong: int
    moved: int
    planned: int
    evenly_cut: int = 0
    formula: float | None = None


@dataclass
class Result:
    metrics: list[dict[str, float]] = field(default_factory=list)
    responses: dict[str, list[list]] = field(default_factory=dict)
    checks: dict[str, dict] = field(default_factory=dict)
    seconds: float = 0.0


class Recorder(Executor):
    """Keeps the tokens of every response that is sampled; rows that were dropped above it have none."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.responses: dict[str, list[list]] = {}

    def _transfer(self, step, scope) -> None:
        super()._transfer(step, scope)
        call = self.calls[step.call]
        if call.op == "generate" and step.dst == HOME:
            self._record_response(self.exprs[call.expr], scope)

    def _record_response(self, expr, scope) -> None:
        dims, batch, at, rows = expr.type.dims, scope.env[expr].data, 0, []
        group, sizes = scope.rows.dims.group(dims[:-1]), [scope.rows.dims.sizes[d] for d in dims[1:-1]]
        kept = scope.rows.kept_units(dims[:-1], expr.attr("keep", 0))
        for i, (prompt, own) in enumerate(zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist())):
            row = int(scope.rows_of(dims[0], scope.rank)[i // group])
            place = [row, *(int(n) for n in np.unravel_index(i % group, sizes))] if sizes else [row]
            if kept is None or kept[row * group + i % group]:
                rows.append([place, batch.tokens[at + prompt:at + prompt + own].tolist()])
            at += prompt + own
        everyone = MPI.COMM_WORLD.allgather(rows)
        self.responses.setdefault(expr.attr("name"), []).append([r for part in everyone for r in part])


def run_plan(plan: Plan, job: meshes.Job, folder: RunFolder) -> tuple[Result, dict[str, dict[str, Tensor]]]:
    began = time.perf_counter()
    world = DistWorld(None, job.rank, job.size) if job.size > 1 else SoloWorld()
    models, ops, events = Models(plan, job), start_ops(plan), []
    executor = Recorder(plan, world, models, open_sources(plan), ops)
    models.prepare()
    run(plan, folder, world, models, executor, events.append)
    for runner in ops.values():
        runner.close()
    resharded = _reshardings(plan, models, job)  # before training takes the memory of generation back
    weights = {name: models.whole(name) for name, spec in plan.models.items() if spec.optimizer}
    metrics = [event["metrics"] for event in events if event["event"] == "iteration"]
    result = Result(metrics, executor.responses, resharded, time.perf_counter() - began)
    return result, weights


# ---- resharding ------------------------------------------------------------------------------------


def _reshardings(plan: Plan, models: Models, job: meshes.Job) -> dict[str, dict]:
    if f"{ACTOR}.generate" not in models.layouts:
        return {}
    src, name = models.weight_layout(f"{ACTOR}.train"), f"{ACTOR}.generate"
    arrived = {key: tensor.clone() for key, tensor in _held(models, name).items()}
    canonical = MPI.COMM_WORLD.bcast(models.whole(ACTOR), root=0)
    mover, moves = models.mover(f"{ACTOR}.train", name), plan.run.steps + 1
    held = models.weight_layout(name)
    wrong = _wrong(arrived, held, canonical, job.rank)
    planned = moves * redistribute(src, held).total_bytes
    found = {"in the run": Resharding(wrong, _total(mover.bytes_received), planned)}
    for tp in (1, 2):
        if len(src.layout.ranks) % tp == 0:
            dst = WeightLayout(src.shape, src.role, generation_layout(src.layout, tp), "torch")
            source = _held(models, f"{ACTOR}.train")
            found[f"to tp {tp}"] = _resharding(source, redistribute(src, dst), canonical, job.rank)
    return {key: asdict(value) for key, value in found.items()}


def _held(models: Models, layout: str) -> dict[str, Tensor]:
    """This rank's tensors; nothing outside the layout."""
    engine = models.engine(layout)
    return engine.export() if engine is not None else {}


def _resharding(source: dict[str, Tensor], transfer: WeightTransfer, canonical: dict[str, Tensor],
                rank: int) -> Resharding:
    mover = WeightMover(transfer, rank)
    arrived = {name: torch.full(size, 7.0) for name, size in transfer.dst.local_tensors(rank).items()}
    mover.move(source, arrived)
    as_planned = (mover.bytes_received, mover.bytes_sent) == (transfer.bytes_received(rank), transfer.bytes_sent(rank))
    wrong = _wrong(arrived, transfer.dst, canonical, rank) + _total(not as_planned)
    found = Resharding(wrong, _total(mover.bytes_received), transfer.total_bytes)
    found.evenly_cut, found.formula = _by_formula(transfer)
    return found


def _by_formula(transfer: WeightTransfer) -> tuple[int, float | None]:
    """Bytes of evenly cut tensors that the plan moves, and (d_g - 1) / (t p) M a rank (arXiv 2409.19256, table 2)."""
    train, tp = transfer.src.layout, transfer.dst.layout.tp
    even = {name: size for name, size in transfer.src.tensors.items() if name.endswith(CUT_EVENLY)}
    moved = 4 * sum(m.elements for m in transfer.moves if m.tensor in even and not m.is_local)
    model_bytes = 4 * sum(torch.Size(size).numel() for size in even.values())
    applies = train.tp % tp == 0
    return moved, len(train.ranks) * zero_redundancy_bytes(train, tp, model_bytes) if applies else None


def _wrong(tensors: dict[str, Tensor], weights: WeightLayout, canonical: dict[str, Tensor], rank: int) -> int:
    """Elements, on all ranks, that are not bit for bit those of the whole tensors."""
    found = 0
    for piece in weights.pieces(rank):
        here = tensors[piece.local][tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size))]
        right = canonical[piece.tensor][tuple(map(slice, piece.start, piece.stop))]
        found += int((here.contiguous().view(torch.int32) != right.contiguous().view(torch.int32)).sum())
    return _total(found)


def _total(count: int) -> int:
    return MPI.COMM_WORLD.allreduce(int(count))


def main() -> None:
    torch.set_num_threads(1)
    comm, folder = MPI.COMM_WORLD, Path(sys.argv[1])
    job = meshes.start(comm)
    for path in sorted(folder.glob("*.plan.json")):
        plan, name = load_plan(path), path.name.removesuffix(".plan.json")
        if plan.world != comm.size:
            continue
        scratch = RunFolder(folder / f"{name}.run")
        if comm.rank == 0:
            scratch.create()
        comm.Barrier()
        with planted(name.partition(" planted ")[2]):
            result, weights = run_plan(plan, job, scratch)
        if comm.rank == 0:
            (folder / f"{name}.result.json").write_text(json.dumps(asdict(result)))
            torch.save(weights, folder / f"{name}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
