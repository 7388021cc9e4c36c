"""The Megatron engine in many layouts against Hugging Face. Run under mpiexec with an empty folder as argument.

Rank 0 computes what each scenario must give (`megatron_models`); then every layout is compared with it.
Prints one line of JSON per case: its name, the largest differences, and the seconds it took.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from megatron_judging import (
    MODES, PP2, PP2_DP2, TP2, TP2_DP2, TP2_PP2, Mode, comm, compare, folder_difference, layouts, report,
    results_difference, retained_difference, shard_rows, splits, train_step, weights_difference,
)
from megatron_models import LEARNING_RATE, OPTIMIZER, SCENARIOS, STEPS, TEMPERATURE, Expected, Scenario, reference, rows
from torch import Tensor

from compiler.layout import generation_layout
from compiler.offloading import GRADIENTS
from compiler.resharding.redistribute import redistribute
from compiler.weights import WeightLayout
from runtime import meshes
from runtime.engines.base import MASTER, Call, Execution
from runtime.engines.megatron import MegatronEngine
from runtime.engines.sampler import SamplerEngine
from runtime.engines.sampling import SamplingOptions
from runtime.hf_folder import HFFolder
from runtime.sequences import Sequences
from runtime.transfer import WeightMover

SAMPLING = generation_layout(TP2_DP2, 2)


def run_mode(mesh: meshes.Mesh, mode: Mode, scenario: Scenario, expected: Expected, batch: Sequences) -> None:
    begin, found, engine, layout = time.perf_counter(), {}, None, mode.layout
    if comm.rank in layout:
        engine = MegatronEngine(scenario.shape, scenario.role, layout, mesh, OPTIMIZER, mode.execution)
        engine.load(HFFolder(expected.folder))
    found["folder"] = folder_difference(scenario, layout, engine, expected.folder)
    if engine is not None:
        sizes = splits(len(batch), layout.dp)
        found |= compare(engine, scenario, expected, batch, sizes, rows_each=2, recompute=mode.recompute)
    report(mode.name, found, time.perf_counter() - begin)


def run_sampler(mesh: meshes.Mesh, scenario: Scenario, expected: Expected, batch: Sequences) -> None:
    """After a step of training the sampler, which gets its weights by a move, agrees with the training forward."""
    begin = time.perf_counter()
    engine = MegatronEngine(scenario.shape, "policy", TP2_DP2, mesh, OPTIMIZER)
    engine.load(HFFolder(expected.folder))
    d = TP2_DP2.coordinates(comm.rank).dp
    train_step(engine, scenario, *shard_rows(batch, splits(len(batch), 2), d), rows_each=4)
    sampler = SamplerEngine(scenario.shape, SAMPLING, comm.rank, mesh.groups(SAMPLING).tp)
    ends = ((TP2_DP2, "megatron"), (SAMPLING, "torch"))
    move = redistribute(*(WeightLayout(scenario.shape, "policy", *end) for end in ends))
    WeightMover(move, comm.rank).move(engine.export(), sampler.weights)
    prompts = [[1, 5, 6], [1], [9, 8, 7, 6, 5, 4, 3]]
    options = SamplingOptions(max_tokens=8, temperature=TEMPERATURE, stop_ids=(2, 3))
    drawn = sampler.generate(prompts, 2, [0, 1, 2], "y", 1, 0, options)
    again = engine.forward(drawn, ("logprobs",), TEMPERATURE)["logprobs"]
    found = {"results": float((again - drawn.logprobs).abs().max())}
    report(f"sampler, {scenario.name}", found, time.perf_counter() - begin)


def run_empty_shard(mesh: meshes.Mesh, expected: Expected, batch: Sequences) -> None:
    begin = time.perf_counter()
    for layout in (PP2_DP2, TP2_DP2):
        engine = MegatronEngine(SCENARIOS[0].shape, "policy", layout, mesh, OPTIMIZER)
        engine.load(HFFolder(expected.folder))
        found = compare(engine, SCENARIOS[0], expected, batch, (len(batch), 0), rows_each=3)
        report(f"empty shard, pp {layout.pp}", found, time.perf_counter() - begin)


def run_alternating(mesh: meshes.Mesh, expected: list[Expected], batch: Sequences) -> None:
    """Models of different layouts on the same ranks take turns, step by step; one is frozen."""
    begin, results = time.perf_counter(), 0.0
    chosen = [(SCENARIOS[0], TP2_DP2), (SCENARIOS[2], PP2_DP2)]
    frozen = MegatronEngine(SCENARIOS[0].shape, "policy", TP2_PP2, mesh)
    frozen.load(HFFolder(expected[0].folder))
    engines = [MegatronEngine(s.shape, s.role, layout, mesh, OPTIMIZER) for s, layout in chosen]
    for engine, want in zip(engines, expected):
        engine.load(HFFolder(want.folder))
    for _ in range(STEPS):
        for (scenario, layout), engine in zip(chosen, engines):
            mine, first = shard_rows(batch, splits(len(batch), layout.dp), layout.coordinates(comm.rank).dp)
            train_step(engine, scenario, mine, first, rows_each=3)
        results = max(results, results_difference(frozen, SCENARIOS[0], expected[0], batch, 0, rows_each=4))
    worst = max(weights_difference(engine, want.trained) for engine, want in zip(engines, expected))
    report("alternating", {"results": results, "weights": worst}, time.perf_counter() - begin)


def run_two_batches(mesh: meshes.Mesh, expected: Expected, batch: Sequences) -> None:
    """Calls on different batches in one micro-batch, one of them without rows, at two temperatures."""
    begin, found = time.perf_counter(), None
    if comm.rank in PP2:
        engine = MegatronEngine(SCENARIOS[0].shape, "policy", PP2, mesh, OPTIMIZER)
        engine.load(HFFolder(expected.folder))
        a, b = batch.select(torch.tensor([4, 1])), batch.select(torch.tensor([2]))
        none = batch.select(torch.zeros(0, dtype=torch.int64))
        calls = {
            "a": Call("logprobs", a, TEMPERATURE), "b": Call("logprobs", b, TEMPERATURE),
            "h": Call("entropy", b, TEMPERATURE), "none": Call("logprobs", none, TEMPERATURE),
            "warm": Call("logprobs", b, 1.0), "plain": Call("logprobs", b, 0.0),
        }
        empty = {"none": calls["none"]}
        outputs = engine.train([calls, empty], lambda i, outputs: sum(v.sum() for v in outputs.values()))
        found = {"results": _two_batches_difference(outputs, expected)} if outputs else None
    report("two batches", found, time.perf_counter() - begin)


def _two_batches_difference(outputs: list[dict[str, Tensor]], expected: Expected) -> float:
    first, second = outputs
    logprobs = expected.results["logprobs"]
    want = {"a": torch.cat([logprobs[4], logprobs[1]]), "b": logprobs[2], "h": expected.results["entropy"][2]}
    assert first["none"].numel() == second["none"].numel() == 0 and torch.equal(first["warm"], first["plain"])
    assert not torch.allclose(first["warm"], first["b"])
    return max(float((first[name] - values).abs().max()) for name, values in want.items())


def run_readings(mesh: meshes.Mesh, expected: Expected, batch: Sequences) -> None:
    """Calls at several temperatures in one micro-batch, of a tied head, have the gradients of each by itself."""
    begin, found = time.perf_counter(), None
    if comm.rank in TP2:
        engine = MegatronEngine(SCENARIOS[1].shape, "policy", TP2, mesh, OPTIMIZER)
        engine.load(HFFolder(expected.folder))
        calls = {f"{name} {at}": Call(name, batch, at) for name in ("logprobs", "entropy") for at in (TEMPERATURE, 1.0, 2.0)}
        whole, sums = (_gradients(engine, parts) for parts in ([calls], [{name: call} for name, call in calls.items()]))
        found = {"gradients": max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(whole, sums, strict=True))}
    report("readings", found, time.perf_counter() - begin)


def _gradients(engine: MegatronEngine, parts: list[dict[str, Call]]) -> list[Tensor]:
    engine.zero_grad()
    for part in parts:
        engine.train([part], lambda i, outputs: sum(values.square().sum() for values in outputs.values()))
    return [tensor.clone() for tensor in engine.tensors_of(GRADIENTS)]


def run_rounded(mesh: meshes.Mesh, scenario: Scenario, expected: Expected, batch: Sequences) -> None:
    """In bf16 results are as far off as those of Hugging Face in bf16, and a step starts from 32-bit parameters."""
    begin = time.perf_counter()
    mine, first = shard_rows(batch, splits(len(batch), 2), TP2_DP2.coordinates(comm.rank).dp)
    found, masters = {}, []
    for sharded in (False, True):
        engine = MegatronEngine(
            scenario.shape, "policy", TP2_DP2, mesh, OPTIMIZER, Execution(torch.bfloat16, sharded, sharded),
        )
        engine.load(HFFolder(expected.folder))
        before = {name: tensor.clone() for name, tensor in engine.moment(MASTER).items()}
        off = results_difference(engine, scenario, expected, mine, first, 2)
        found[f"retained, {sharded}"] = retained_difference(engine, scenario, mine, first, 2)
        norm = train_step(engine, scenario, mine, first, rows_each=2)
        masters.append(engine.moment(MASTER))
        assert all(torch.equal(p, masters[-1][name].bfloat16()) for name, p in engine.export().items())
        assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in before.values())
        found[f"rounding, {sharded}"] = off / expected.rounding
        found[f"bf16 norm, {sharded}"] = abs(norm / expected.norms[0] - 1)
    apart = max(float((tensor - masters[1][name]).abs().max()) for name, tensor in masters[0].items())
    report(f"bf16, {scenario.name}", found | {"masters": apart / LEARNING_RATE}, time.perf_counter() - begin)


def run_savings(mesh: meshes.Mesh, expected: Expected, batch: Sequences) -> None:
    """What a sharded optimizer, sequence parallelism and recomputation leave of the memory without them."""
    begin, scenario = time.perf_counter(), SCENARIOS[0]
    ways = {"plain": (Execution(), False), "sharded": (Execution(sharded_optimizer=True), False),
            "sequence": (Execution(sequence_parallel=True), False), "recompute": (Execution(), True)}
    states, activations = {}, {}
    for name, (execution, recompute) in ways.items():
        engine = MegatronEngine(scenario.shape, "policy", TP2_DP2, mesh, OPTIMIZER, execution)
        engine.load(HFFolder(expected.folder))
        states[name] = engine.optimizer_bytes
        activations[name] = _saved_bytes(engine, batch, recompute)
    found = {"states, sharded": states["sharded"] / states["plain"]}
    found |= {f"activations, {way}": activations[way] / activations["plain"] for way in ("sequence", "recompute")}
    report("savings", found, time.perf_counter() - begin)


def _saved_bytes(engine: MegatronEngine, batch: Sequences, recompute: bool) -> int:
    """Of the tensors that a forward leaves for its backward."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    parameters = {p.untyped_storage().data_ptr() for p in engine.export().values()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        train_step(engine, SCENARIOS[0], batch, 0, len(batch), recompute)
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in parameters)


def run_checkpoint(mesh: meshes.Mesh, expected: Expected, batch: Sequences) -> None:
    """Weights and optimizer state after one step, put into a fresh engine, go on like the first one; in bf16 too."""
    begin, found = time.perf_counter(), None
    if comm.rank in TP2:
        dtypes = (torch.float32, torch.bfloat16)
        found = {f"weights, {dtype}": _resumed_difference(mesh, expected, batch, dtype) for dtype in dtypes}
    report("checkpoint", found, time.perf_counter() - begin)


def _resumed_difference(mesh: meshes.Mesh, expected: Expected, batch: Sequences, dtype: torch.dtype) -> float:
    def make() -> MegatronEngine:
        engine = MegatronEngine(SCENARIOS[0].shape, "policy", TP2, mesh, OPTIMIZER, Execution(dtype))
        engine.load(HFFolder(expected.folder))
        return engine

    first, second = make(), make()
    train_step(first, SCENARIOS[0], batch, 0, rows_each=4)
    for name, parameter in second.export().items():
        parameter.copy_(first.export()[name])
    for moment in first.moments:
        second.load_moment(moment, first.moment(moment))
    second.optimizer_steps = first.optimizer_steps
    assert second.optimizer_steps == 1
    for engine in (first, second):
        train_step(engine, SCENARIOS[0], batch, 0, rows_each=4)
    return max(float((p - second.export()[name]).abs().max()) for name, p in first.export().items())


def main() -> None:
    torch.set_num_threads(1)
    job, batch = meshes.start(comm), rows()
    further = [mode.layout for mode in MODES]
    further += [SAMPLING, TP2_DP2, TP2_PP2, PP2_DP2, PP2, TP2] if comm.size == 4 else []
    mesh = meshes.Mesh(job, [layout for scenario in SCENARIOS for layout in layouts(scenario)] + further)
    folder = Path(sys.argv[1])
    scenarios = [s for s in SCENARIOS if layouts(s) or s.name in {mode.scenario for mode in MODES}]
    references = [reference(s, batch, str(folder / s.name)) for s in scenarios] if comm.rank == 0 else None
    references = comm.bcast(references, root=0)
    for scenario, expected in zip(scenarios, references):
        for layout in layouts(scenario):
            run_mode(mesh, Mode(scenario.name, layout), scenario, expected, batch)
        for mode in (mode for mode in MODES if mode.scenario == scenario.name):
            run_mode(mesh, mode, scenario, expected, batch)
    if comm.size == 4:
        for scenario, expected in zip(scenarios, references):
            if scenario.role == "policy" and layouts(scenario):
                run_sampler(mesh, scenario, expected, batch)
        for scenario, expected in zip(scenarios, references):
            if scenario.name in ("llama policy", "qwen3 policy"):
                run_rounded(mesh, scenario, expected, batch)
        run_savings(mesh, references[0], batch)
        run_empty_shard(mesh, references[0], batch)
        run_alternating(mesh, [references[0], references[2]], batch)
        run_two_batches(mesh, references[0], batch)
        run_readings(mesh, references[1], batch)
        run_checkpoint(mesh, references[0], batch)


if __name__ == "__main__":
    main()
