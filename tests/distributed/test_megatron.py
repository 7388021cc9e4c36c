"""The Megatron engine equals Hugging Face in every layout: see `megatron_cases.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.judging import told

# Of `rounding` the unit is how far Hugging Face in bf16 is off, of `masters` the learning rate; savings are what is
# left. What is retained is what would be computed, bit by bit.
BOUNDS = {
    "results": 2e-5, "retained": 0, "gradients": 1e-5, "norm": 1e-5, "weights": 1e-5, "folder": 0, "rounding": 2,
    "bf16 norm": 0.01, "masters": 0.5, "states, sharded": 0.55, "activations, sequence": 0.95, "activations, recompute": 0.2,
}
FOUR_RANKS = [
    *(f"llama policy {degrees}" for degrees in ("tp1 pp1 dp1", "tp2 pp1 dp1", "tp1 pp2 dp1", "tp1 pp1 dp2")),
    *(f"llama policy {degrees}" for degrees in ("tp2 pp1 dp2", "tp1 pp2 dp2", "tp2 pp2 dp1", "tp4 pp1 dp1")),
    *(f"{scenario} {degrees}" for scenario in (
        "qwen2 policy, tied", "llama value", "llama scorer, llama3 rope", "llama policy, tied, linear rope",
        "qwen3 policy", "qwen2 scorer", "mistral policy, window", "mistral scorer",
    ) for degrees in ("tp2 pp1 dp2", "tp1 pp2 dp2", "tp2 pp2 dp1")),
    *(f"{scenario}, 1 kv head {degrees}" for scenario in ("llama policy", "qwen3 value")
      for degrees in ("tp2 pp1 dp2", "tp2 pp2 dp1")),
    "llama policy, 3 layers tp1 pp2 dp2", "llama policy, 3 layers tp2 pp2 dp1",
    "qwen2 policy, tied tp2 pp1 dp2 sequence sharded recompute", "qwen2 policy, tied tp1 pp2 dp2 sharded",
    "qwen2 policy, tied tp2 pp2 dp1 sequence recompute", "qwen2 policy, tied tp1 pp2 dp2 chunks2",
    "qwen3 policy tp2 pp1 dp2 sequence sharded", "qwen3 value, 1 kv head tp2 pp2 dp1 sequence",
    "llama scorer, llama3 rope tp2 pp1 dp2 sequence recompute", "llama policy, 9 layers tp1 pp4 dp1 chunks2",
    "llama policy, 5 layers tp1 pp2 dp2 chunks2 sharded recompute",
    "mistral policy, window tp1 pp2 dp2 sharded recompute",
    *(f"sampler, {model}" for model in (
        "llama policy", "qwen2 policy, tied", "llama policy, 1 kv head", "llama policy, 3 layers",
        "llama policy, tied, linear rope", "qwen3 policy", "mistral policy, window",
    )),
    "bf16, llama policy", "bf16, qwen3 policy", "savings", "empty shard, pp 2", "empty shard, pp 1",
    "alternating", "two batches", "readings", "checkpoint",
]
EIGHT_RANKS = [
    "llama policy tp2 pp2 dp2", "llama policy tp1 pp4 dp2", "qwen2 policy, tied tp2 pp2 dp2",
    "llama policy tp2 pp2 dp2 sequence sharded recompute", "llama policy tp4 pp1 dp2 sequence sharded",
    "qwen2 policy, tied tp2 pp2 dp2 chunks2 sequence sharded", "llama policy, 1 kv head tp2 pp2 dp2 sequence",
    "llama policy, 5 layers tp2 pp2 dp2 chunks2 sharded recompute",
    "llama policy, 9 layers tp1 pp4 dp2 chunks2 sharded",
]


def run(ranks: int, scratch: Path) -> dict[str, dict]:
    """Differences by case."""
    lines = told(ranks, "megatron_cases", scratch, scratch / "mpi")
    print(*lines, sep="\n")
    return {line.pop("case"): line for line in lines}


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> dict[str, dict]:
    return run(4, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def eight(tmp_path_factory) -> dict[str, dict]:
    return run(8, tmp_path_factory.mktemp("eight"))


def test_every_case_is_judged(four):
    assert set(four) == set(FOUR_RANKS)


@pytest.mark.parametrize("case", FOUR_RANKS)
def test_four_ranks(four, case):
    check(four[case])


@pytest.mark.slow
def test_every_case_of_eight_ranks_is_judged(eight):
    assert set(eight) == set(EIGHT_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("case", EIGHT_RANKS)
def test_eight_ranks(eight, case):
    check(eight[case])


def check(differences: dict[str, float]) -> None:
    differences.pop("seconds")
    assert differences
    bounds = {name: BOUNDS.get(name, BOUNDS.get(name.split(",")[0])) for name in differences}
    assert {name: value for name, value in differences.items() if not value <= bounds[name]} == {}
