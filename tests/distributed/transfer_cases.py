"""Run under mpiexec with a folder of model folders as argument: moves weights between layouts and checks every element.

Prints one line of JSON per case from rank 0: bytes moved, wrong elements, ranks whose bytes were not as planned.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Iterator

import torch
from memory import Peak
from mpi4py import MPI
from safetensors.torch import load_file
from torch import Tensor

from compiler.layout import ModelLayout, generation_layout
from compiler.resharding import transitions
from compiler.resharding.gathers import MINIMAL, STRATEGIES, ZERO_REDUNDANCY, transfer_by
from compiler.resharding.redistribute import WeightTransfer, redistribute
from compiler.resharding.residency import transition_bytes
from compiler.shapes import shape_from_config
from compiler.weights import WeightLayout
from runtime import meshes
from runtime.engines.base import AdamW, Execution
from runtime.engines.megatron import MegatronEngine
from runtime.engines.sampler import SamplerEngine
from runtime.hf_folder import HFFolder
from runtime.in_place import InPlace
from runtime.transfer import WeightMover
from tests.filling import fill

comm = MPI.COMM_WORLD
TRAINING = {  # (tp, pp, dp) by the number of ranks
    4: [(1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 1), (4, 1, 1), (1, 4, 1)],
    8: [(2, 2, 2), (4, 1, 2), (1, 4, 2), (4, 2, 1)],
}[comm.size]
TRAINED = {4: [(2, 1, 2), (1, 2, 2)], 8: [(2, 2, 2)]}[comm.size]  # of these, in engines
SMALL_BUCKET = 4000  # bytes: cuts the embedding, and needs many exchanges


def expected(weights: WeightLayout, canonical: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    made = {name: torch.zeros(size, dtype=dtype) for name, size in weights.local_tensors(comm.rank).items()}
    fill(made, weights.pieces(comm.rank), canonical)
    return made


def garbage(weights: WeightLayout, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors that are wrong wherever nothing arrives."""
    return {name: torch.full(size, 7.0, dtype=dtype) for name, size in weights.local_tensors(comm.rank).items()}


def wrong_elements(found: dict[str, Tensor], right: dict[str, Tensor]) -> int:
    assert found.keys() == right.keys()
    return sum(int((found[name] != right[name]).sum()) for name in right)


def report(case: str, wrong: int, bytes_differ: bool, **facts) -> None:
    totals = comm.reduce((wrong, int(bytes_differ)), op=lambda a, b: (a[0] + b[0], a[1] + b[1]))
    if comm.rank == 0:
        print(json.dumps({"case": case, "wrong": totals[0], "bytes_differ": totals[1], **facts}), flush=True)


def move(
    mesh: meshes.Mesh, case: str, src: WeightLayout, dst: WeightLayout, source: dict, canonical: dict,
    dtype: torch.dtype, strategy: str = MINIMAL,
) -> None:
    transfer = transfer_by(strategy, src, dst, itemsize=dtype.itemsize)
    mesh.make(transfer.groups)
    mover = WeightMover(transfer, comm.rank, groups=mesh.group, dtype=dtype, bucket_bytes=SMALL_BUCKET)
    destination = garbage(dst, dtype)
    mover.move(source, destination)
    counted = (mover.bytes_sent, mover.bytes_received)
    planned = (transfer.bytes_sent(comm.rank), transfer.bytes_received(comm.rank))
    report(
        case, wrong_elements(destination, expected(dst, canonical, dtype)), counted != planned,
        moved=comm.allreduce(mover.bytes_received), planned=transfer.total_bytes,
        lower_bound=transfer.lower_bound_bytes, strategy=strategy,
    )


def model_cases(mesh: meshes.Mesh, folder: Path) -> None:
    shape, hf = shape_from_config(folder), HFFolder(folder)
    canonical = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    everyone = tuple(range(comm.size))
    for tp, pp, dp in TRAINING:
        train = ModelLayout(everyone, tp, pp, dp)
        src = WeightLayout(shape, "policy", train, "megatron")
        source = garbage(src, torch.float32)
        hf.read_into(source, src, comm.rank)
        name = f"{folder.name} tp{tp} pp{pp} dp{dp}"
        report(f"{name} from disk", wrong_elements(source, expected(src, canonical, torch.float32)), False)
        targets = {f"torch tp{n}": WeightLayout(shape, "policy", generation_layout(train, n), "torch") for n in (1, 2)}
        targets["disk"] = WeightLayout(shape, "policy", ModelLayout((0,)), "disk")
        targets["disk pp2"] = WeightLayout(shape, "policy", ModelLayout((3, 1), pp=2), "disk")
        for target, dst in targets.items():
            move(mesh, f"{name} to {target}", src, dst, source, canonical, torch.float32)
        for (n, strategy), dst in generation_layouts(src):
            if strategy != MINIMAL:
                move(mesh, f"{name} to torch tp{n} by {strategy}", src, dst, source, canonical, torch.float32, strategy)
        move(mesh, f"{name} to torch tp2 in bf16", src, targets["torch tp2"], source, canonical, torch.bfloat16)
        back = garbage(targets["torch tp2"], torch.float32)
        hf.read_into(back, targets["torch tp2"], comm.rank)
        move(mesh, f"{name} from torch tp2", targets["torch tp2"], src, back, canonical, torch.float32)


def sets_case(mesh: meshes.Mesh, folder: Path, name: str, train: ModelLayout, generate: ModelLayout) -> None:
    """From some ranks to others, which may be partly the same."""
    shape = shape_from_config(folder)
    src, dst = WeightLayout(shape, "policy", train, "megatron"), WeightLayout(shape, "policy", generate, "torch")
    source = garbage(src, torch.float32)
    if comm.rank in train:
        HFFolder(folder).read_into(source, src, comm.rank)
    canonical = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    move(mesh, name, src, dst, source, canonical, torch.float32)


def generation_layouts(src: WeightLayout) -> Iterator[tuple[tuple[int, str], WeightLayout]]:
    """By tp and strategy."""
    for n, strategy in itertools.product((1, 2), STRATEGIES):
        order = transitions.ORDERS[strategy](src.layout, n)
        yield (n, strategy), WeightLayout(src.shape, "policy", order, "torch")


def eight_ranks_cases(mesh: meshes.Mesh, folder: Path) -> None:
    """To generation by every strategy."""
    shape, hf = shape_from_config(folder), HFFolder(folder)
    canonical = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    for tp, pp, dp in TRAINING:
        src = WeightLayout(shape, "policy", ModelLayout(tuple(range(comm.size)), tp, pp, dp), "megatron")
        source = garbage(src, torch.float32)
        hf.read_into(source, src, comm.rank)
        for (n, strategy), dst in generation_layouts(src):
            name = f"{folder.name} tp{tp} pp{pp} dp{dp} to torch tp{n} by {strategy}"
            move(mesh, name, src, dst, source, canonical, torch.float32, strategy)


def memory_cases(mesh: meshes.Mesh, folder: Path) -> None:
    """Of tensors that have memory of their own."""
    shape, hf = shape_from_config(folder), HFFolder(folder)
    for tp, pp, dp in TRAINING:
        src = WeightLayout(shape, "policy", ModelLayout(tuple(range(comm.size)), tp, pp, dp), "megatron")
        training = garbage(src, torch.float32)
        hf.read_into(training, src, comm.rank)
        for (n, strategy), dst in generation_layouts(src):
            ends = training, garbage(dst, torch.float32)
            name = f"{folder.name} tp{tp} pp{pp} dp{dp} to tp{n} by {strategy}"
            transition(mesh, name, transfer_by(strategy, src, dst), ends)


def engine_cases(mesh: meshes.Mesh, folder: Path) -> None:
    """Of engines, whose parameters lie as these lay them."""
    shape, hf = shape_from_config(folder), HFFolder(folder)
    settings, everyone = AdamW((0.9, 0.95), 1e-8, 0.0, 1.0), tuple(range(comm.size))
    for degrees, sharded in itertools.product(TRAINED, (False, True)):
        train = ModelLayout(everyone, *degrees)
        generate = transitions.ORDERS[ZERO_REDUNDANCY](train, 1)
        trainer = MegatronEngine(shape, "policy", train, mesh, settings, Execution(sharded_optimizer=sharded))
        trainer.load(hf)
        sampler = SamplerEngine(shape, generate, comm.rank)
        src, dst = WeightLayout(shape, "policy", train, "megatron"), WeightLayout(shape, "policy", generate, "torch")
        name = f"{folder.name} engines of tp{train.tp} pp{train.pp} dp{train.dp}{' sharded' * sharded}"
        transition(mesh, name, transfer_by(ZERO_REDUNDANCY, src, dst), (trainer.export(), sampler.weights))


def transition(mesh: meshes.Mesh, name: str, transfer: WeightTransfer, ends: tuple[dict, dict]) -> None:
    """Twice to generation and back in place: training has its weights as before, and memory is what is planned."""
    mesh.make(transfer.groups)
    before, right = ({name: tensor.clone() for name, tensor in end.items()} for end in ends)
    WeightMover(transfer, comm.rank, groups=mesh.group).move(before, right)
    bound = transition_bytes(transfer, comm.rank, SMALL_BUCKET)
    wrong, most = in_place(mesh, transfer, ends, (before, right), bound)
    held = transfer.peak_bytes(comm.rank)
    report(f"{name} in place", wrong, False,
           fullest=comm.allreduce(most / bound, op=MPI.MAX), emptiest=comm.allreduce(most / bound, op=MPI.MIN),
           over_weights=comm.allreduce((bound - held) / held, op=MPI.MAX))


def in_place(mesh: meshes.Mesh, transfer: WeightTransfer, ends: tuple[dict, dict], right: tuple[dict, dict],
             bound: int) -> tuple[int, int]:
    """(wrong elements at either end, the most bytes that tensors took)."""
    training, generating = ends
    tensors = [*training.values(), *generating.values()]
    mover = WeightMover(transfer, comm.rank, groups=mesh.group, bucket_bytes=SMALL_BUCKET)
    memory = InPlace(transfer, comm.rank, training, generating)
    wrong = most = 0
    for _ in range(2):
        with Peak(tensors, bound) as peak:
            mover.move(training, generating, memory.arrives, memory.left)
        wrong += wrong_elements(generating, right[1])
        with Peak(tensors, bound) as back:
            memory.give_back()
        wrong += wrong_elements(training, right[0]) + sum(t.untyped_storage().nbytes() for t in generating.values())
        most = max(most, peak.most, back.most)
    return wrong, most


def subgroup_case(folder: Path) -> None:
    """Two of the four ranks move among themselves, in a group of their own, whose order is not that of the layout."""
    shape, ranks = shape_from_config(folder), (3, 1)
    src = WeightLayout(shape, "policy", ModelLayout(ranks, tp=2), "megatron")
    dst = WeightLayout(shape, "policy", ModelLayout(ranks, dp=2), "torch")
    group = torch.distributed.new_group(sorted(ranks))
    destination = garbage(dst, torch.float32)
    if comm.rank in ranks:
        source = garbage(src, torch.float32)
        HFFolder(folder).read_into(source, src, comm.rank)
        WeightMover(redistribute(src, dst), comm.rank, group).move(source, destination)
    canonical = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    report("two of four ranks", wrong_elements(destination, expected(dst, canonical, torch.float32)), False)


def main() -> None:
    torch.set_num_threads(1)
    everyone = tuple(range(comm.size))
    made = [ModelLayout(everyone, *degrees) for degrees in TRAINED]
    mesh = meshes.Mesh(meshes.start(comm), made)
    folders = sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir())
    for folder in folders if comm.size == 4 else ():
        model_cases(mesh, folder)
        sets_case(mesh, folder, f"{folder.name} to other ranks", ModelLayout((0, 1), tp=2), ModelLayout((2, 3), dp=2))
        overlapping = ModelLayout((0, 1, 2), pp=3), ModelLayout((1, 2, 3), dp=3)
        sets_case(mesh, folder, f"{folder.name} to some of the same ranks", *overlapping)
    if comm.size == 4:
        subgroup_case(folders[0])
    else:
        eight_ranks_cases(mesh, folders[0])
    memory_cases(mesh, folders[-1])
    engine_cases(mesh, folders[-1])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
