"""Rows that `keep if ..., refill=` adds to an iteration: whose they are, how they count, which are too many."""

import torch

from runtime.executor.refill import _drop_surplus, kept_rows
from runtime.executor.scope import Dims, Rows, Scope, gather
from runtime.values import Value
from runtime.world import run_threads

DIMS = Dims(roots=("b",), sizes={"g": 2}, lead={}, bounds={})


def scope(rank: int, shards: int, draws: int, rows: int) -> Scope:
    size = {"b": draws * rows}
    return Scope(Rows(DIMS, size=size, position={"b": torch.arange(size["b"])}, loads={"b": rows}), rank, shards)


def test_each_draw_has_the_homes_of_the_first():
    for shards in (1, 2, 3):
        scopes = [scope(rank, shards, 3, 5) for rank in range(shards)]
        once = [scope(rank, shards, 1, 5) for rank in range(shards)]
        for here, first in zip(scopes, once):
            rows = first.rows_of("b", here.rank)
            assert here.rows_of("b", here.rank).tolist() == torch.cat([rows, rows + 5, rows + 10]).tolist()
            assert (here.home_of("b")[here.rows_of("b", here.rank)] == here.rank).all()


def test_gather_puts_rows_in_stream_order():
    def shard(world):
        here = scope(world.rank, world.size, 3, 5)
        samples = here.rows.units(("b", "g"), here.rows_of("b", world.rank))
        return gather(world, here, ("b", "g"), torch.stack([samples, -samples], 1))

    for found in run_threads(2, shard):
        assert found[:, 0].tolist() == list(range(30)) and found[:, 1].tolist() == [-i for i in range(30)]


def test_surplus_is_dropped_in_stream_order():
    wanted = [True, False, True, True, False, False]
    for rank in (0, 1):
        here = scope(rank, 2, 2, 3)
        mask = torch.tensor([True, False, True, True, True, False]).repeat_interleave(2)
        mask[1] = False  # a row counts if any of its samples is kept
        mine = here.rows.units(("b", "g"), here.rows_of("b", rank))
        here.rows.kept[1], here.rows.keep_dims[1] = mask, ("b", "g")
        here.keeps[1] = Value(("b", "g"), mask[mine])
        _drop_surplus(here, 1, 3)
        assert kept_rows(here, 1) == 3
        assert here.rows.kept_units(("b",), 1).tolist() == wanted
        assert here.keeps[1].data.tolist() == here.rows.kept[1][mine].tolist()
        assert not here.rows.kept[1][1] and here.rows.kept[1][0]
