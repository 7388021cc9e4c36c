"""Rows of data in the order in which iterations take them."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_dsl.typed import Data
from tests.oracle.draws import permuted


class Source:
    """A JSON Lines file, reshuffled each pass."""

    def __init__(self, spec: Data, folder: Path, seed: int) -> None:
        if spec.kind != "jsonl":
            raise ValueError(f"the oracle reads jsonl alone, not `{spec.kind}`")
        path = folder / spec.path
        lines = (path if path.exists() else Path(spec.path)).read_text(encoding="utf-8").splitlines()
        self.rows = [json.loads(line) for line in lines if line.strip()]
        self.spec, self.seed = spec, seed
        self._passes: dict[int, list[int]] = {}

    def drawn(self, position: int, n: int) -> list[tuple[int, dict]]:
        """(position in the stream, row) of the next n."""
        size = len(self.rows)
        return [(p, self.rows[self._order(p // size)[p % size]]) for p in range(position, position + n)]

    def first(self, n: int) -> list[tuple[int, dict]]:
        return list(enumerate(self.rows[:n]))

    def _order(self, number: int) -> list[int]:
        if number not in self._passes:
            self._passes[number] = permuted(len(self.rows), self.seed, self.spec.root, number)
        return self._passes[number]
