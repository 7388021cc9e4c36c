"""The sampler over two and four tensor-parallel ranks: see `sampler_tp.py`."""

from __future__ import annotations

import pytest

from tests.distributed.judging import told


@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_are_those_of_one_rank(ranks, tmp_path):
    cases = told(ranks, "sampler_tp", tmp_path, tmp_path / "scratch")
    assert len(cases) == 16
    assert [c["case"] for c in cases if not c["equal"] or c["off"] > 2e-5] == []
