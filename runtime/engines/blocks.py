"""Rows a few at a time: on a CPU what is computed of them stays in a core's cache until it is used."""

from __future__ import annotations

from typing import Iterator

from torch import Tensor

NUMBERS = 1 << 17  # of a block


def blocks(rows: Tensor, share: float = 1.0) -> Iterator[slice]:
    """Runs of `rows` [n, width] with about `share` of NUMBERS numbers each; all at once on other devices."""
    size = len(rows) if rows.device.type != "cpu" else int(share * NUMBERS) // max(1, rows.shape[1])
    size = max(1, size)
    return (slice(start, start + size) for start in range(0, len(rows), size))
