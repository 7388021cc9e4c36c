"""How the rows of a batch go to ranks, mini-batches and micro-batches: pure functions of numbers that every rank knows.

Only the standard library and 64-bit integer arithmetic: the same answer on every rank, machine and version.
"""

from __future__ import annotations

import heapq
from typing import Optional, Sequence, TypeVar

Row = TypeVar("Row")
_MASK = (1 << 64) - 1


def home_range(n: int, shards: int, k: int) -> tuple[int, int]:
    """The half-open range of rows whose home is shard k: those with `home_owner(i, n, shards) == k`."""
    return -(-k * n // shards), -(-(k + 1) * n // shards)


def home_owner(row: int, n: int, shards: int) -> int:
    """The shard at which row `row` of n lives; shards own contiguous ranges whose lengths differ by at most one."""
    return row * shards // n


def permutation(seed: int, dim: str, iteration: int, epoch: int, n: int) -> tuple[int, ...]:
    """A permutation of range(n) named by its arguments: rows in ascending order of a 64-bit key, equal keys by row.

    The key is that of `runtime.draws`, so that `runtime.draws.permutation(n, seed, dim, iteration, epoch)` is the same.
    """
    prefix = _mix(seed & _MASK)
    for value in (_fnv1a(dim), iteration, epoch):
        prefix = _mix(prefix ^ value & _MASK)
    return tuple(sorted(range(n), key=lambda row: (_mix(prefix ^ row), row)))


def minibatch_rows(order: Sequence[Row], minibatches: int) -> tuple[tuple[Row, ...], ...]:
    """`order` cut into consecutive runs whose lengths differ by at most one; runs are empty where rows are fewer."""
    ranges = (home_range(len(order), minibatches, k) for k in range(minibatches))
    return tuple(tuple(order[start:stop]) for start, stop in ranges)


def balance(lengths: Sequence[int], shards: int) -> tuple[tuple[int, ...], ...]:
    """By shard, the units (positions in `lengths`, ascending) it computes, so that shards get about equal tokens.

    Longest first, each to the shard with least tokens so far (Graham, "Bounds on multiprocessing timing anomalies",
    1969: the largest shard is below 4/3 of the best possible); ties go to the shard with fewer units, then to the lower
    number.
    """
    heap = [(0, 0, shard) for shard in range(shards)]
    chosen: list[list[int]] = [[] for _ in range(shards)]
    for unit in sorted(range(len(lengths)), key=lambda u: (-lengths[u], u)):
        tokens, units, shard = heap[0]
        chosen[shard].append(unit)
        heapq.heapreplace(heap, (tokens + lengths[unit], units + 1, shard))
    return tuple(tuple(sorted(units)) for units in chosen)


def micro_batches(
    lengths: Sequence[int], rows: Optional[int] = None, tokens: Optional[int] = None
) -> tuple[tuple[int, ...], ...]:
    """Positions in `lengths`, ascending within a micro-batch, each position once, similar lengths together.

    rows: at most so many rows in one; tokens: rows times the longest of them at most this, which is what a padded batch
    takes (a row longer than that stands alone). Both may be given. The longest come first: if memory fails, it fails
    early.
    """
    found: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not found or _is_full(found[-1], lengths, rows, tokens):
            found.append([])
        found[-1].append(position)
    return tuple(tuple(sorted(batch)) for batch in found)


def _is_full(batch: list[int], lengths: Sequence[int], rows: Optional[int], tokens: Optional[int]) -> bool:
    longest = lengths[batch[0]]
    if rows is not None and len(batch) >= rows:
        return True
    return tokens is not None and (len(batch) + 1) * longest > tokens


def _mix(z: int) -> int:
    """The finaliser of SplitMix64 after its increment (Steele, Lea and Flood, OOPSLA 2014, figure 13)."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def _fnv1a(name: str) -> int:
    """The 64-bit FNV-1a hash of a name in UTF-8."""
    found = 0xCBF29CE484222325
    for byte in name.encode():
        found = (found ^ byte) * 0x100000001B3 & _MASK
    return found
