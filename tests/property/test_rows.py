"""Rows move between any two assignments to ranks, of uneven numbers: each arrives once, where it is wanted, in order."""

from __future__ import annotations

import random

import pytest
import torch

from compiler.layout import ModelLayout, generation_layout
from compiler.rows import balance, home_range
from runtime.exchange import Route, move_rows
from runtime.world import run_threads

SIZES = ((3, 1, 1, 3), (4, 2, 1, 2), (4, 1, 2, 2), (4, 2, 2, 1), (1, 1, 1, 1))  # ranks, tp, pp, dp


def held(lengths: list[int], rows: torch.Tensor, offset: int) -> torch.Tensor:
    """The packed values of rows: each element says its row and place."""
    parts = [offset + 100 * row + torch.arange(lengths[row]) for row in rows.tolist()]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def tensor(rows) -> torch.Tensor:
    return torch.tensor(list(rows), dtype=torch.int64)


def between_home_and(layout: ModelLayout, lengths: list[int]) -> tuple[list, list]:
    """(rows by rank at home, rows by rank of the layout): every rank of a data shard gets the shard's rows."""
    n, world = len(lengths), len(layout.ranks)
    home = [tensor(range(*home_range(n, world, rank))) for rank in range(world)]
    shares = balance(lengths, layout.dp)
    return home, [tensor(shares[layout.coordinates(rank).dp]) for rank in range(world)]


def check(world_size: int, here: list, wants: list, lengths: list[int]) -> None:
    """here: by rank, rows of which each is held by one rank at least, of which the first gives it."""
    n = len(lengths)
    source = torch.full((n,), -1, dtype=torch.int64)
    for rank in reversed(range(world_size)):
        source[here[rank]] = rank
    sizes = torch.tensor(lengths, dtype=torch.int64)

    def work(world):
        rows = here[world.rank]
        columns = [(held(lengths, rows, 0), sizes), (held(lengths, rows, 10**6).double(), sizes),
                   (rows.clone(), torch.ones(n, dtype=torch.int64))]
        return move_rows(world, Route(rows, source, tuple(wants)), columns)

    for rank, (one, other, numbers) in enumerate(run_threads(world_size, work)):
        assert torch.equal(one, held(lengths, wants[rank], 0))
        assert torch.equal(other, held(lengths, wants[rank], 10**6).double())
        assert torch.equal(numbers, wants[rank])


@pytest.mark.parametrize("size", SIZES)
def test_rows_go_out_to_data_shards_and_come_home(size):
    rng = random.Random(sum(size))
    world, tp, pp, dp = size
    train = ModelLayout(tuple(range(world)), tp, pp, dp)
    for layout in (train, generation_layout(train, 1)):
        for _ in range(20):
            lengths = [rng.choice((0, 1, 2, 7)) for _ in range(rng.choice((0, 1, 2, 7, 13)))]
            home, there = between_home_and(layout, lengths)
            check(world, home, there, lengths)
            check(world, there, home, lengths)


def test_rows_go_between_shards_of_unlike_layouts():
    """From one data parallelism to another, with rows in any order and wanted by many, or by none."""
    rng = random.Random(7)
    for _ in range(40):
        world, n = rng.choice((2, 3, 4)), rng.choice((1, 5, 7))
        lengths = [rng.choice((0, 1, 3, 9)) for _ in range(n)]
        order = rng.sample(range(n), n)
        here = [tensor(order[rank::world]) for rank in range(world)]
        wants = [tensor(rng.sample(range(n), rng.randint(0, n))) for _ in range(world)]
        check(world, here, wants, lengths)
