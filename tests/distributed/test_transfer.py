"""Four ranks move weights between training layouts, the sampler's and the disk's: bitwise, at the planned bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compiler.shapes import shape_from_config, tensors
from runtime.hf_folder import write_parts
from tests.distributed.judging import told

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 24, "vocab_size": 67, "max_position_embeddings": 64,
}
MODELS = {
    "llama": {**SIZES, "model_type": "llama", "tie_word_embeddings": False},
    "qwen2-tied": {**SIZES, "model_type": "qwen2", "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    models = tmp_path_factory.mktemp("models")
    for seed, (name, config) in enumerate(MODELS.items()):
        generator = torch.Generator().manual_seed(seed)
        sizes = tensors(shape_from_config(config), "policy")
        weights = {key: torch.randn(size, generator=generator) for key, size in sizes.items()}
        write_parts(models / name, config, [weights] if seed else ({key: weights[key]} for key in weights))
    return models


@pytest.fixture(scope="module")
def cases(models, tmp_path_factory) -> dict[str, dict]:
    """Of four ranks."""
    return {line["case"]: line for line in told(4, "transfer_cases", models, tmp_path_factory.mktemp("four") / "mpi")}


@pytest.fixture(scope="module")
def on_eight(models, tmp_path_factory) -> dict[str, dict]:
    return {line["case"]: line for line in told(8, "transfer_cases", models, tmp_path_factory.mktemp("eight") / "mpi")}


def test_all_cases_ran(cases, on_eight):
    assert len(cases) == len(MODELS) * (6 * 13 + 2) + 6 * 8 + 2 * 2 + 1
    assert len(on_eight) == 4 * 8 + 4 * 8 + 2


def test_every_element_arrives_bitwise(cases, on_eight):
    assert {name: c["wrong"] for name, c in (*cases.items(), *on_eight.items()) if c["wrong"]} == {}


@pytest.mark.parametrize("ranks", ["cases", "on_eight"])
def test_bytes_are_those_of_the_plan(request, ranks):
    cases = request.getfixturevalue(ranks)
    assert [name for name, c in cases.items() if c["bytes_differ"]] == []
    moved = [c for c in cases.values() if "moved" in c]
    assert all(c["moved"] == c["planned"] for c in moved)
    for strategy, is_least in (("minimal", True), ("zero-redundancy", True), ("vanilla", False), ("all-gather", False)):
        those = [c for c in moved if c["strategy"] == strategy]
        assert any(c["moved"] for c in those)
        assert all(c["moved"] == c["lower_bound"] for c in those) == is_least, strategy


@pytest.mark.parametrize("model", MODELS)
def test_replicas_that_hold_all_receive_nothing(cases, model):
    assert cases[f"{model} tp1 pp1 dp4 to torch tp1"]["moved"] == 0


@pytest.mark.parametrize("model", MODELS)
def test_bf16_takes_half(cases, model):
    name = f"{model} tp4 pp1 dp1 to torch tp2"
    assert cases[f"{name} in bf16"]["moved"] * 2 == cases[name]["moved"] > 0


def test_memory_in_place_is_what_is_planned(cases, on_eight):
    """Every allocation counted: weights of both layouts, buffers and what copying makes."""
    in_place = {name: c for name, c in (*cases.items(), *on_eight.items()) if name.endswith("in place")}
    assert len(in_place) == 6 * 8 + 2 * 2 + 4 * 8 + 2
    for name, case in in_place.items():
        assert 0.95 <= case["emptiest"] <= case["fullest"] <= 1, name
