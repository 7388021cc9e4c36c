"""The Megatron engine in many layouts against Hugging Face. Run under mpiexec with an empty folder as argument.

Rank 0 computes what each scenario must give, in plain torch on all rows at once; then every layout is compared with it.
Prints one line of JSON per case: its name, the largest differences, and the seconds it took.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Optional

import torch
from mpi4py import MPI
from safetensors.torch import load_file
from torch import Tensor

from compiler.layout import ModelLayout, generation_layout
from compiler.redistribute import redistribute
from compiler.shapes import FAMILIES, ModelShape, shape_from_config
from compiler.weights import WeightLayout, pieces
from runtime import meshes
from runtime.engines.base import OPERATIONS, SITES, AdamW, Call, Execution
from runtime.engines.megatron import MegatronEngine
from runtime.engines.sampler import SamplerEngine
from runtime.engines.sampling import SamplingOptions
from runtime.hf_folder import HFFolder, config_for_role, read_config, write_folder
from runtime.sequences import Sequences
from runtime.transfer import WeightMover

comm = MPI.COMM_WORLD
TP2_DP2, PP2_DP2, TP2_PP2 = (ModelLayout((0, 1, 2, 3), *degrees) for degrees in ((2, 1, 2), (1, 2, 2), (2, 2, 1)))
TP2, PP2 = ModelLayout((0, 1), 2, 1, 1), ModelLayout((0, 1), 1, 2, 1)
SAMPLING = generation_layout(TP2_DP2, 2)
TEMPERATURE = 0.7
LEARNING_RATE, STEPS = 1e-3, 2
OPTIMIZER = AdamW(betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, max_grad_norm=0.5)
SIZES = dict(
    hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    vocab_size=67, max_position_embeddings=128, rms_norm_eps=1e-5,
)
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@dataclass(frozen=True)
class Scenario:
    """A model and its role; `config` overrides SIZES."""

    name: str
    family: str
    role: str
    config: Mapping[str, object]

    @property
    def hf(self) -> dict:
        return {**SIZES, **self.config}

    @property
    def shape(self) -> ModelShape:
        tied = {"tie_word_embeddings": self.hf.get("tie_word_embeddings", False)}
        return shape_from_config({**self.hf, **tied, "model_type": self.family})

    @property
    def operations(self) -> tuple[str, ...]:
        return OPERATIONS[self.role]


SCENARIOS = (
    Scenario("llama policy", "llama", "policy", {}),
    Scenario("qwen2 policy, tied", "qwen2", "policy", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    Scenario("llama value", "llama", "value", {}),
    Scenario("llama scorer, llama3 rope", "llama", "scorer", {"rope_theta": 1e4, "rope_scaling": LLAMA3}),
    Scenario("llama policy, 1 kv head", "llama", "policy", {"num_key_value_heads": 1}),
    Scenario("llama policy, 3 layers", "llama", "policy", {"num_hidden_layers": 3}),
    Scenario("llama policy, 5 layers", "llama", "policy", {"num_hidden_layers": 5}),
    Scenario("llama policy, 9 layers", "llama", "policy", {"num_hidden_layers": 9}),
    Scenario("llama policy, tied, linear rope", "llama", "policy", {"tie_word_embeddings": True, "rope_scaling": LINEAR}),
    Scenario("qwen3 policy", "qwen3", "policy", {"head_dim": 16, "rope_theta": 1e6}),
    Scenario("qwen3 value, 1 kv head", "qwen3", "value", {"head_dim": 16, "num_key_value_heads": 1}),
    Scenario("qwen2 scorer", "qwen2", "scorer", {}),
    Scenario("mistral policy, window", "mistral", "policy", {"sliding_window": 5, "head_dim": 12}),
    Scenario("mistral scorer", "mistral", "scorer", {"sliding_window": 4096}),
)


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
        words = {"sequence": execution.sequence_parallel, "sharded": execution.sharded_optimizer, "recompute": self.recompute}
        at = self.layout
        degrees = f"tp{at.tp} pp{at.pp} dp{at.dp}" + (f" chunks{at.chunks}" if at.chunks > 1 else "")
        return " ".join([self.scenario, degrees, *(word for word, on in words.items() if on)])


MODES = (
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


@dataclass(frozen=True)
class Expected:
    """folder with the weights before training, results by operation and row, norms of each step, weights after it"""

    folder: str
    results: dict[str, list[Tensor]]
    norms: list[float]
    trained: dict[str, Tensor]


def rows(n: int = 7) -> Sequences:
    """n rows of different lengths, some of whose response tokens are not the model's own."""
    random = torch.Generator().manual_seed(3)
    prompts = torch.randint(1, 9, (n,), generator=random)
    responses = torch.randint(1, 12, (n,), generator=random)
    tokens = torch.randint(0, SIZES["vocab_size"], (int((prompts + responses).sum()),), generator=random)
    own = torch.rand(int(responses.sum()), generator=random) < 0.8
    own[torch.cumsum(responses, 0) - responses] = True
    return Sequences(tokens, prompts, responses, own)


def row_loss(outputs: Mapping[str, Tensor], first: int, lengths: Tensor) -> Tensor:
    """A sum over rows of something nonlinear in every output; row i of a batch has `lengths[i]` own tokens."""
    loss = torch.zeros(())
    for name, values in outputs.items():
        per_row = values.split(1 if SITES[name] == "last" else lengths.tolist())
        for i, row in enumerate(per_row):
            target = torch.linspace(-1, 1, row.numel()) + 0.1 * (first + i)
            loss = loss + ((row - target) ** 2).sum() + (row * target).sin().sum()
    return loss / 10


# ---- what must come out, on rank 0


def reference(scenario: Scenario, batch: Sequences, folder: str) -> Expected:
    model = hf_model(scenario)
    model.save_pretrained(folder, max_shard_size="1GB" if scenario is SCENARIOS[0] else "20KB")
    with torch.no_grad():
        results = hf_outputs(model, scenario, batch)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": OPTIMIZER.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=LEARNING_RATE, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps,
    )
    norms = []
    for _ in range(STEPS):
        adamw.zero_grad()
        outputs = {name: torch.cat(values) for name, values in hf_outputs(model, scenario, batch).items()}
        row_loss(outputs, 0, batch.own_lengths).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)))
        adamw.step()
    return Expected(folder, results, norms, {name: p.detach() for name, p in model.named_parameters()})


def hf_model(scenario: Scenario) -> torch.nn.Module:
    import transformers

    family = FAMILIES[scenario.family].architecture
    head = "ForCausalLM" if scenario.role == "policy" else "ForSequenceClassification"
    labels = {} if scenario.role == "policy" else {"num_labels": 1}
    torch.manual_seed(7)
    config = getattr(transformers, family + "Config")(**scenario.hf, **labels)
    model = getattr(transformers, family + head)(config).float().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p)) if p.dim() == 1 else p.mul_(4.0)
    return model


def hf_outputs(model: torch.nn.Module, scenario: Scenario, batch: Sequences) -> dict[str, list[Tensor]]:
    """Per operation a tensor for each row, computed row by row."""
    found: dict[str, list[Tensor]] = {operation: [] for operation in scenario.operations}
    owns = batch.own.split(batch.response_lengths.tolist())
    for tokens, prompt, own in zip(batch.tokens.split(batch.lengths.tolist()), batch.prompt_lengths.tolist(), owns):
        hidden = model.model(tokens[None]).last_hidden_state[0]
        at = prompt + torch.nonzero(own).flatten()
        if scenario.role != "policy":
            scalars = model.score(hidden)[:, 0]
            sites = {"values": at - 1, "scores": at, "last_value": [-1], "score": [-1]}
            for operation in found:
                found[operation].append(scalars[sites[operation]])
            continue
        log_p = (model.lm_head(hidden[at - 1]) / TEMPERATURE).log_softmax(-1)
        found["logprobs"].append(log_p.gather(1, tokens[at, None])[:, 0])
        found["entropy"].append(-(log_p.exp() * log_p).sum(-1))
    return found


# ---- what comes out


def box(start, stop) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(start, stop))


def shard_rows(batch: Sequences, sizes: tuple[int, ...], d: int) -> tuple[Sequences, int]:
    first = sum(sizes[:d])
    return batch.select(torch.arange(first, first + sizes[d])), first


def train_step(
    engine: MegatronEngine, scenario: Scenario, mine: Sequences, first: int, rows_each: int, recompute: bool = False
) -> float:
    parts = [mine.select(part) for part in torch.arange(len(mine)).split(rows_each)] if len(mine) else []
    starts = [first + i * rows_each for i in range(len(parts))]
    calls = [{op: Call(op, part, TEMPERATURE) for op in scenario.operations} for part in parts]
    engine.zero_grad()
    for runs in (slice(0, 1), slice(1, None)):  # gradients accumulate over calls of train as they do within one
        here = [*zip(starts, parts)][runs]
        engine.train(calls[runs], lambda i, outputs: row_loss(outputs, here[i][0], here[i][1].own_lengths), recompute)
    return engine.step(LEARNING_RATE)


def compare(
    engine: MegatronEngine, scenario: Scenario, expected: Expected, batch: Sequences, sizes: tuple[int, ...],
    rows_each: int, recompute: bool = False,
) -> dict[str, float]:
    """Largest differences on this rank of results, of norms (relative) and of weights after training."""
    mine, first = shard_rows(batch, sizes, engine.layout.coordinates(comm.rank).dp)
    results = results_difference(engine, scenario, expected, mine, first, rows_each)
    norms = [train_step(engine, scenario, mine, first, rows_each, recompute) for _ in range(STEPS)]
    want, norms = torch.tensor(expected.norms), torch.tensor(norms)
    norm = float(((norms - want) / want).abs().max())
    return {"results": results, "norm": norm, "weights": weights_difference(engine, expected.trained)}


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
        degrees = [(2, 2, 2), (1, 4, 2)]
    if scenario is not SCENARIOS[0]:
        degrees = [d for d in degrees if d in ((2, 1, 2), (2, 2, 1), (1, 2, 2), (2, 2, 2))]
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


def folder_difference(scenario: Scenario, layout: ModelLayout, engine: Optional[MegatronEngine], folder: str) -> float:
    """How many elements are not bitwise the same after folder → ranks → folder. Collective over all ranks."""
    src = WeightLayout(scenario.shape, scenario.role, layout, "megatron")
    disk = WeightLayout(scenario.shape, scenario.role, ModelLayout((0,)), "disk")
    whole = {name: torch.full(size, torch.nan) for name, size in disk.local_tensors(comm.rank).items()}
    WeightMover(redistribute(src, disk), comm.rank).move(engine.export() if engine else {}, whole)
    if comm.rank:
        return 0.0
    back = folder + " back"
    write_folder(back, config_for_role(read_config(folder), scenario.role), whole, shard_bytes=9000)
    before, after = ({k: v for f in Path(x).glob("*.safetensors") for k, v in load_file(f).items()} for x in (folder, back))
    assert before.keys() == after.keys() and shape_from_config(back) == shape_from_config(folder)
    return float(sum((before[k].view(torch.int32) != after[k].view(torch.int32)).sum() for k in before))


def run_sampler(mesh: meshes.Mesh, scenario: Scenario, expected: Expected, batch: Sequences) -> None:
    """After a step of training the sampler, which gets its weights by the hybrid move, agrees with the training forward."""
    begin = time.perf_counter()
    engine = MegatronEngine(scenario.shape, "policy", TP2_DP2, mesh, OPTIMIZER)
    engine.load(HFFolder(expected.folder))
    d = TP2_DP2.coordinates(comm.rank).dp
    train_step(engine, scenario, *shard_rows(batch, splits(len(batch), 2), d), rows_each=4)
    sampler = SamplerEngine(scenario.shape, SAMPLING, comm.rank, mesh.groups(SAMPLING).tp)
    move = redistribute(*(WeightLayout(scenario.shape, "policy", *x) for x in ((TP2_DP2, "megatron"), (SAMPLING, "torch"))))
    WeightMover(move, comm.rank).move(engine.export(), sampler.weights)
    prompts = [[1, 5, 6], [1], [9, 8, 7, 6, 5, 4, 3]]
    options = SamplingOptions(max_tokens=8, temperature=TEMPERATURE, stop_ids=(2, 3))
    drawn = sampler.generate(prompts, 2, [0, 1, 2], "y", 1, 0, options)
    again = engine.forward(drawn, ("logprobs",), TEMPERATURE)["logprobs"]
    report(f"sampler, {scenario.name}", {"results": float((again - drawn.logprobs).abs().max())}, time.perf_counter() - begin)


def run_empty_shard(mesh: meshes.Mesh, expected: Expected, batch: Sequences) -> None:
    begin = time.perf_counter()
    engine = MegatronEngine(SCENARIOS[0].shape, "policy", PP2_DP2, mesh, OPTIMIZER)
    engine.load(HFFolder(expected.folder))
    found = compare(engine, SCENARIOS[0], expected, batch, (len(batch), 0), rows_each=3)
    report("empty shard", found, time.perf_counter() - begin)


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
    further = [SAMPLING, *(mode.layout for mode in MODES), TP2_DP2, TP2_PP2, PP2_DP2, PP2, TP2] if comm.size == 4 else []
    mesh = meshes.Mesh(job, [layout for scenario in SCENARIOS for layout in layouts(scenario)] + further)
    folder = Path(sys.argv[1])
    scenarios = SCENARIOS if comm.size == 4 else SCENARIOS[:2]
    references = [reference(s, batch, str(folder / s.name)) for s in scenarios] if comm.rank == 0 else None
    references = comm.bcast(references, root=0)
    for scenario, expected in zip(scenarios, references):
        for layout in layouts(scenario):
            run_mode(mesh, Mode(scenario.name, layout), scenario, expected, batch)
    if comm.size == 4:
        for scenario, expected in zip(scenarios, references):
            for mode in (mode for mode in MODES if mode.scenario == scenario.name):
                run_mode(mesh, mode, scenario, expected, batch)
            if scenario.role == "policy" and layouts(scenario):
                run_sampler(mesh, scenario, expected, batch)
        run_empty_shard(mesh, references[0], batch)
        run_alternating(mesh, [references[0], references[2]], batch)
        run_two_batches(mesh, references[0], batch)
        run_checkpoint(mesh, references[0], batch)


if __name__ == "__main__":
    main()
