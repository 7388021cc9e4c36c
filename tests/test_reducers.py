"""What crosses shards, by threads and by gloo processes."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from runtime.reducers import DistReducer, Reducer, ThreadReducer
from runtime.values import Value
from tests.equations import Graph, frame, sharded

SHARDS = 3


def exchange(reducer: Reducer) -> dict:
    """Each kind of exchange once, with numbers that depend on the shard."""
    mine = torch.tensor([reducer.rank + 1.0, 2.0 ** (24 * (reducer.rank == 1))], dtype=torch.float32)
    return {
        "place": (reducer.rank, reducer.size),
        "sum": reducer.all_reduce(mine, "sum").tolist(),
        "min": reducer.all_reduce(mine, "min").tolist(),
        "max": reducer.all_reduce(mine, "max").tolist(),
        "count": reducer.all_reduce(torch.tensor([reducer.rank]), "sum").tolist(),
        "gather": reducer.all_gather(mine.double()).tolist(),
        "rows": [part.tolist() for part in reducer.all_gather_rows(torch.full((reducer.rank, 2), float(reducer.rank)))],
        "mine": mine.tolist(),
    }


def expected(rank: int) -> dict:
    big = 2.0 ** 24
    return {
        "place": (rank, SHARDS),
        "sum": [6.0, big + 2],  # 32-bit sums would lose both ones beside 2^24
        "min": [1.0, 1.0],
        "max": [3.0, big],
        "count": [3],
        "gather": [[1.0, 1.0], [2.0, big], [3.0, 1.0]],
        "rows": [[], [[1.0, 1.0]], [[2.0, 2.0], [2.0, 2.0]]],
        "mine": [rank + 1.0, big if rank == 1 else 1.0],
    }


def gloo_shard(rank: int, store: str, answers) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, SHARDS), rank=rank, world_size=SHARDS)
    answers.put((rank, exchange(DistReducer())))
    dist.barrier()
    dist.destroy_process_group()


def test_threads():
    assert ThreadReducer.run(SHARDS, exchange) == [expected(rank) for rank in range(SHARDS)]


@pytest.mark.slow
def test_gloo_processes(tmp_path):
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(gloo_shard, (str(tmp_path / "store"), answers), nprocs=SHARDS)
    found = dict(answers.get() for _ in range(SHARDS))
    assert found == {rank: expected(rank) for rank in range(SHARDS)}


def test_a_shard_that_fails_lets_the_others_go():
    before = threading.active_count()

    def work(reducer: Reducer):
        if reducer.rank == 1:
            raise ValueError("shard 1 has no rows")
        return reducer.all_reduce(torch.ones(1), "sum")

    with pytest.raises(ValueError, match="shard 1"):
        ThreadReducer.run(SHARDS, work)
    assert threading.active_count() == before


@pytest.mark.parametrize("parts", [[[0, 1, 2]], [[2, 0], [1]], [[], [1, 2, 0], []], [[0], [1], [2], []]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_values_are_exact_over_shards(parts, dtype):
    g = Graph()
    x = g.leaf("x", ("b", "g"))
    for number in (0.95, 0.1, 0.7, -3.3, 1 / 3, 0.57, 0.0019, 1.1, 0.3, 2.3):
        value = Value(("b", "g"), torch.full((21,), number, dtype=dtype))
        for op, want in (("mean", value.data[0].item()), ("std", 0.0)):
            expr = g.make(op, x, over=("b", "g"))
            for _, found in sharded(expr, frame(b=3, g=7), {x: value}, {}, parts, dtype):
                assert found.data.tolist() == [want]
