"""How an engine is compared with what Hugging Face gives, on this rank of an mpiexec."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Optional

import torch
from megatron_models import LEARNING_RATE, SCENARIOS, STEPS, TEMPERATURE, Expected, Scenario, row_loss
from mpi4py import MPI
from safetensors.torch import load_file
from torch import Tensor

from compiler.layout import ModelLayout
from compiler.offloading import GRADIENTS
from compiler.resharding.redistribute import redistribute
from compiler.shapes import shape_from_config
from compiler.weights import WeightLayout, pieces
from runtime.engines.base import Call, Execution, Objective
from runtime.engines.megatron import MegatronEngine
from runtime.hf_folder import config_for_role, read_config, write_parts
from runtime.sequences import Sequences
from runtime.transfer import WeightMover

comm = MPI.COMM_WORLD
TP2_DP2, PP2_DP2, TP2_PP2 = (ModelLayout((0, 1, 2, 3), *degrees) for degrees in ((2, 1, 2), (1, 2, 2), (2, 2, 1)))
TP2, PP2 = ModelLayout((0, 1), 2, 1, 1), ModelLayout((0, 1), 1, 2, 1)
EIGHT = tuple(range(8))
TP2_PP2_DP2, TP4_DP2 = ModelLayout(EIGHT, 2, 2, 2), ModelLayout(EIGHT, 4, 1, 2)
TP2_PP2_DP2_CHUNKS, PP4_DP2_CHUNKS = ModelLayout(EIGHT, 2, 2, 2, chunks=2), ModelLayout(EIGHT, 1, 4, 2, chunks=2)
PP2_DP2_CHUNKS = ModelLayout((0, 1, 2, 3), 1, 2, 2, chunks=2)
PP4_CHUNKS = ModelLayout((0, 1, 2, 3), 1, 4, 1, chunks=2)
SEQUENCE, SHARDED = Execution(sequence_parallel=True), Execution(sharded_optimizer=True)
BOTH = Execution(sequence_parallel=True, sharded_optimizer=True)


@dataclass(frozen=True)
class Mode:
    """A way to compute that must not change what comes out."""

    scenario: str
    layout: ModelLayout
    execution: Execution = Execution()
    recompute: bool = False

    @property
    def name(self) -> str:
        execution = self.execution
        at, words = self.layout, {"sequence": execution.sequence_parallel, "sharded": execution.sharded_optimizer}
        words["recompute"] = self.recompute
        degrees = f"tp{at.tp} pp{at.pp} dp{at.dp}" + (f" chunks{at.chunks}" if at.chunks > 1 else "")
        return " ".join([self.scenario, degrees, *(word for word, on in words.items() if on)])


FOUR_RANKS = (
    Mode("qwen2 policy, tied", TP2_DP2, BOTH, recompute=True),
    Mode("qwen2 policy, tied", PP2_DP2, SHARDED),
    Mode("qwen2 policy, tied", TP2_PP2, SEQUENCE, recompute=True),
    Mode("qwen2 policy, tied", PP2_DP2_CHUNKS),
    Mode("qwen3 policy", TP2_DP2, BOTH),
    Mode("qwen3 value, 1 kv head", TP2_PP2, SEQUENCE),
    Mode("llama scorer, llama3 rope", TP2_DP2, SEQUENCE, recompute=True),
    Mode("llama policy, 5 layers", PP2_DP2_CHUNKS, SHARDED, recompute=True),
    Mode("llama policy, 9 layers", PP4_CHUNKS),
    Mode("mistral policy, window", PP2_DP2, SHARDED, recompute=True),
)
EIGHT_RANKS = (
    Mode("llama policy", TP2_PP2_DP2, BOTH, recompute=True),
    Mode("llama policy", TP4_DP2, BOTH),
    Mode("qwen2 policy, tied", TP2_PP2_DP2_CHUNKS, BOTH),
    Mode("llama policy, 1 kv head", TP2_PP2_DP2, SEQUENCE),
    Mode("llama policy, 5 layers", TP2_PP2_DP2_CHUNKS, SHARDED, recompute=True),
    Mode("llama policy, 9 layers", PP4_DP2_CHUNKS, SHARDED),
)
MODES = {4: FOUR_RANKS, 8: EIGHT_RANKS}[comm.size]


def box(start, stop) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(start, stop))


def shard_rows(batch: Sequences, sizes: tuple[int, ...], d: int) -> tuple[Sequences, int]:
    first = sum(sizes[:d])
    return batch.select(torch.arange(first, first + sizes[d])), first


def train_step(
    engine: MegatronEngine, scenario: Scenario, mine: Sequences, first: int, rows_each: int, recompute: bool = False
) -> float:
    engine.zero_grad()
    for runs in (slice(0, 1), slice(1, None)):  # gradients accumulate over calls of train as they do within one
        engine.train(*_training(scenario, mine, first, rows_each, runs), recompute)
    return engine.step(LEARNING_RATE)


def _training(
    scenario: Scenario, mine: Sequences, first: int, rows_each: int, runs: slice = slice(None)
) -> tuple[list[dict[str, Call]], Objective]:
    """Some of the micro-batches of a shard, and their objective."""
    cut = cuts(len(mine), rows_each)[runs]
    parts = [mine.select(torch.arange(start, stop)) for start, stop in cut]
    calls = [{op: Call(op, part, TEMPERATURE) for op in scenario.operations} for part in parts]
    return calls, lambda i, outputs: row_loss(outputs, first + cut[i][0], parts[i].own_lengths)


def retained_difference(
    engine: MegatronEngine, scenario: Scenario, mine: Sequences, first: int, rows_each: int
) -> float:
    """Of outputs and gradients of a training, from those of one that goes on from a forward with one more in between."""
    def trained(retained: bool) -> list[Tensor]:
        engine.zero_grad()
        if retained:
            engine.forward(mine, scenario.operations, TEMPERATURE, cuts(len(mine), rows_each), retain=True)
            engine.forward(mine, scenario.operations[:1], 1.0)
        outputs = engine.train(*_training(scenario, mine, first, rows_each), retained=retained)
        found = [values for part in outputs for values in part.values()]
        return [*found, *(tensor.clone() for tensor in engine.tensors_of(GRADIENTS))]

    pairs = [*zip(trained(False), trained(True), strict=True)]
    assert any(one.any() for one, _ in pairs) or not len(mine)
    return float(torch.stack([(one - other).abs().max() for one, other in pairs if one.numel()]).max())


def compare(
    engine: MegatronEngine, scenario: Scenario, expected: Expected, batch: Sequences, sizes: tuple[int, ...],
    rows_each: int, recompute: bool = False,
) -> dict[str, float]:
    """Largest differences on this rank of results, of what goes on from a forward, of norms (relative) and of weights
    after training."""
    mine, first = shard_rows(batch, sizes, engine.layout.coordinates(comm.rank).dp)
    found = {"results": results_difference(engine, scenario, expected, mine, first, rows_each)}
    if engine.layout.pp == 1:
        found["retained"] = retained_difference(engine, scenario, mine, first, rows_each)
    norms = [train_step(engine, scenario, mine, first, rows_each, recompute) for _ in range(STEPS)]
    want, norms = torch.tensor(expected.norms), torch.tensor(norms)
    norm = float(((norms - want) / want).abs().max())
    return found | {"norm": norm, "weights": weights_difference(engine, expected.trained)}


def cuts(count: int, rows_each: int) -> list[tuple[int, int]]:
    """Runs of `rows_each` sequences."""
    return [(start, min(start + rows_each, count)) for start in range(0, count, rows_each)]


def results_difference(
    engine: MegatronEngine, scenario: Scenario, expected: Expected, mine: Sequences, first: int, rows_each: int
) -> float:
    got = engine.forward(mine, scenario.operations, TEMPERATURE, cuts(len(mine), rows_each))
    assert (got is not None) == (engine.layout.coordinates(comm.rank).pp == engine.layout.pp - 1)
    differences = [torch.zeros(1)]
    for name, values in (got or {}).items():
        want = torch.cat([torch.zeros(0), *expected.results[name][first:first + len(mine)]])
        assert values.shape == want.shape and not values.requires_grad
        differences.append((values - want).abs())
    return float(torch.cat(differences).max())


def weights_difference(engine: MegatronEngine, weights: Mapping[str, Tensor]) -> float:
    local = engine.export()
    differences = []
    for piece in pieces(engine.shape, engine.role, engine.layout, comm.rank, "megatron"):
        stop = tuple(a + b for a, b in zip(piece.offset, piece.size))
        got = local[piece.local][box(piece.offset, stop)]
        differences.append((got - weights[piece.tensor][box(piece.start, piece.stop)]).abs().max())
    return float(torch.stack(differences).max())  # unlike max() it does not lose a NaN


def layouts(scenario: Scenario) -> list[ModelLayout]:
    ranks = tuple(range(comm.size))
    degrees = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1), (4, 1, 1)]
    if comm.size == 8:
        degrees = {0: [(2, 2, 2), (1, 4, 2)], 1: [(2, 2, 2)]}.get(SCENARIOS.index(scenario), [])
    elif scenario is not SCENARIOS[0]:
        degrees = [d for d in degrees if d in ((2, 1, 2), (2, 2, 1), (1, 2, 2))]
    if "kv head" in scenario.name:
        degrees = [d for d in degrees if d[0] == 2]
    if "3 layers" in scenario.name:
        degrees = [d for d in degrees if d[1] == 2]
    if "5 layers" in scenario.name or "9 layers" in scenario.name:
        return []  # see MODES
    # the last ranks where there is room: a layout need not start at rank 0
    return [ModelLayout(ranks[-tp * pp * dp:], tp, pp, dp) for tp, pp, dp in degrees if tp * pp * dp <= len(ranks)]


def splits(n: int, dp: int) -> tuple[int, ...]:
    """Uneven: the last shard has what is left over."""
    each = -(-n // dp)
    return tuple(max(min(each, n - each * d), 0) for d in range(dp))


def report(name: str, differences: Optional[dict[str, float]], seconds: float) -> None:
    every, seconds = comm.allgather(differences or {}), comm.allreduce(seconds, op=MPI.MAX)
    keys = sorted({key for d in every for key in d})
    worst = {key: float(torch.tensor([d[key] for d in every if key in d]).max()) for key in keys}
    if comm.rank == 0:
        print(json.dumps({"case": name, **worst, "seconds": round(seconds, 2)}), flush=True)


def folder_difference(scenario: Scenario, layout: ModelLayout, engine: Optional[MegatronEngine], folder: str) -> float:
    """How many elements are not bitwise the same after folder → ranks → folder. Collective over all ranks."""
    src = WeightLayout(scenario.shape, scenario.role, layout, "megatron")
    disk = WeightLayout(scenario.shape, scenario.role, ModelLayout((0,)), "disk")
    whole = {name: torch.full(size, torch.nan) for name, size in disk.local_tensors(comm.rank).items()}
    WeightMover(redistribute(src, disk), comm.rank).move(engine.export() if engine else {}, whole)
    if comm.rank:
        return 0.0
    back = folder + " back"
    write_parts(back, config_for_role(read_config(folder), scenario.role), ({n: whole[n]} for n in whole))
    files = (sorted(Path(path).glob("*.safetensors")) for path in (folder, back))
    before, after = ({k: v for file in each for k, v in load_file(file).items()} for each in files)
    assert before.keys() == after.keys() and shape_from_config(back) == shape_from_config(folder)
    return float(sum((before[k].view(torch.int32) != after[k].view(torch.int32)).sum() for k in before))
