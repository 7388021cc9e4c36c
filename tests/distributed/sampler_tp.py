"""Run under mpiexec: the sampler over tensor-parallel ranks gives the tokens of one rank.

Every rank makes the same random model, fills a whole engine and its own shard, and compares what they generate. Prints
one line of JSON per case from rank 0: the case, whether all ranks drew the tokens of the whole, the largest difference
of log-probabilities.
"""

from __future__ import annotations

import json

import numpy as np
import torch
from mpi4py import MPI

from compiler.layout import ModelLayout
from compiler.shapes import ModelShape, tensors
from compiler.weights import pieces
from runtime.engines.sampler import SamplerEngine
from runtime.engines.sampling import SamplingOptions
from runtime.meshes import Mesh, start
from tests.filling import fill

comm = MPI.COMM_WORLD
SIZES = dict(hidden=48, layers=3, heads=4, kv_heads=2, head_dim=16, ffn=80, vocab=61, max_positions=40)
SHAPES = {
    "llama": ModelShape("llama", **SIZES),
    "qwen2, tied": ModelShape("qwen2", **SIZES, tied=True, qkv_bias=True),
    "qwen3": ModelShape("qwen3", **{**SIZES, "head_dim": 8}, qk_norm=True),
    "one key/value head": ModelShape("llama", **{**SIZES, "kv_heads": 1}),
}
PROMPTS = [[1, 5, 6], [1], [1, 9, 8, 7, 6, 5, 4], [1, 5, 6, 7], [3, 3]]
OPTIONS = {
    "sampled": SamplingOptions(max_tokens=9, temperature=0.9, top_p=0.95, stop_ids=(2, 5, 7), min_tokens=1),
    "greedy": SamplingOptions(max_tokens=9, temperature=0, stop_ids=(2,)),
}


def weights(shape: ModelShape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(size, generator=generator) for name, size in tensors(shape, "policy").items()}
    return {name: 1 + 0.2 * x if "norm" in name else 0.2 * x for name, x in made.items()}


def engine(shape: ModelShape, layout: ModelLayout, rank: int, group=None) -> SamplerEngine:
    made = SamplerEngine(shape, layout, rank, group)
    fill(made.weights, pieces(shape, "policy", layout, rank, "torch"), weights(shape))
    return made


def main() -> None:
    torch.set_num_threads(1)
    job = start(comm)
    # Shards in the order of the ranks, and against it: a group is always in the order of the ranks.
    orders = {"forward": tuple(range(comm.size)), "backward": tuple(reversed(range(comm.size)))}
    layouts = {name: ModelLayout(ranks, tp=comm.size) for name, ranks in orders.items()}
    mesh = Mesh(job, layouts.values())
    for model, shape in SHAPES.items():
        alone = engine(shape, ModelLayout((job.rank,)), job.rank)
        for order, layout in layouts.items():
            split = engine(shape, layout, job.rank, mesh.groups(layout).tp)
            for case, options in OPTIONS.items():
                wanted, made = (
                    e.generate(PROMPTS, 3, np.arange(5) + 9, "y", 2, 7, options) for e in (alone, split))
                equal = torch.equal(wanted.tokens, made.tokens) and torch.equal(wanted.truncated, made.truncated)
                off = float((wanted.logprobs - made.logprobs).abs().max()) if equal else -1.0
                equal, off = comm.allreduce(equal, MPI.LAND), comm.allreduce(off, MPI.MAX)
                if job.rank == 0:
                    print(json.dumps({"case": f"{model}, {order}, {case}", "equal": equal, "off": off}), flush=True)


if __name__ == "__main__":
    main()
