"""Moves rows of packed values between two assignments of rows to ranks.

Every rank knows every row's length and both assignments, so no sizes are sent: the same pure arithmetic on all ranks
gives what each sends and receives. Only ranks that hold rows and ranks that want them take part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import torch
from torch import Tensor

from runtime.sequences import ragged_index
from runtime.world import World


@dataclass(frozen=True)
class Route:
    """Where rows are and where they shall be.

    here:   row numbers this rank holds, in the order in which its packed values hold them (int64 [k])
    source: the rank that sends each row (int64 [rows in all])
    wants:  for each rank, the rows it shall get, in that order; one row may go to many ranks
    """

    here: Tensor
    source: Tensor
    wants: tuple[Tensor, ...]

    def place_of_row(self) -> Tensor:
        """int64 [rows in all]: where a row stands in `here`, -1 for rows of others."""
        place = torch.full((self.source.numel(),), -1, dtype=torch.int64)
        place[self.here] = torch.arange(self.here.numel())
        return place


def move_rows(world: World, route: Route, columns: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The wanted rows of each column.

    columns: (data, lengths): `data` packed over the rows of `route.here`; `lengths` int64 [rows in all], the elements of
    each row, known to all ranks. Columns of one dtype travel in one message. Returns packed data in the order of
    `route.wants[world.rank]`.
    """
    if world.size == 1:
        return [_local(route, data, lengths) for data, lengths in columns]
    results: list[Tensor] = [torch.empty(0)] * len(columns)
    for dtype in dict.fromkeys(data.dtype for data, _ in columns):
        chosen = [i for i, (data, _) in enumerate(columns) if data.dtype == dtype]
        for i, moved in zip(chosen, _move_same_dtype(world, route, [columns[i] for i in chosen])):
            results[i] = moved
    return results


def _local(route: Route, data: Tensor, lengths: Tensor) -> Tensor:
    return data[ragged_index(lengths[route.here], route.place_of_row()[route.wants[0]])]


def _move_same_dtype(world: World, route: Route, columns: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    place = route.place_of_row()
    mine = [wanted[route.source[wanted] == world.rank] for wanted in route.wants]
    parts = [torch.cat([data[ragged_index(lengths[route.here], place[rows])] for data, lengths in columns]) for rows in mine]
    wanted = route.wants[world.rank]
    incoming = [wanted[route.source[wanted] == rank] for rank in range(world.size)]
    sizes = [[int(lengths[rows].sum()) for _, lengths in columns] for rows in incoming]
    received = world.exchange(parts, [sum(s) for s in sizes])
    pieces = [part.split(s) for part, s in zip(received, sizes)]
    arrived = torch.cat(incoming)
    order = torch.empty_like(arrived)
    order[torch.argsort(route.source[wanted], stable=True)] = torch.arange(arrived.numel())
    return [torch.cat([p[i] for p in pieces])[ragged_index(lengths[arrived], order)]
            for i, (_, lengths) in enumerate(columns)]
