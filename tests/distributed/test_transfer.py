"""Four ranks move weights between training layouts, the sampler's and the disk's: bitwise, at the planned bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compiler.shapes import shape_from_config, tensors
from runtime.hf_folder import write_folder
from runtime.launch import mpiexec, rank_environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RANKS = 4
SIZES = {
    "hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 24, "vocab_size": 67, "max_position_embeddings": 64,
}
MODELS = {
    "llama": {**SIZES, "model_type": "llama", "tie_word_embeddings": False},
    "qwen2-tied": {**SIZES, "model_type": "qwen2", "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, dict]:
    models, scratch = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("scratch")
    for seed, (name, config) in enumerate(MODELS.items()):
        generator = torch.Generator().manual_seed(seed)
        sizes = tensors(shape_from_config(config), "policy")
        weights = {key: torch.randn(size, generator=generator) for key, size in sizes.items()}
        write_folder(models / name, config, weights, shard_bytes=(1 << 30) if seed else 20_000)
    command = [mpiexec(), "-n", str(RANKS), sys.executable, "-P", "-m", "mpi4py", "-m", "transfer_cases", str(models)]
    environment = {**rank_environment(RANKS, str(scratch)), "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["case"]: line for line in lines}


def test_all_cases_ran(cases):
    assert len(cases) == len(MODELS) * (6 * 13 + 2) + 6 * 8 + 1


def test_every_element_arrives_bitwise(cases):
    assert {name: c["wrong"] for name, c in cases.items() if c["wrong"]} == {}


def test_bytes_are_those_of_the_plan(cases):
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


def test_memory_in_place_is_what_is_planned(cases):
    """Every allocation counted: weights of both layouts, buffers and what copying makes."""
    in_place = {name: c for name, c in cases.items() if name.endswith("in place")}
    assert len(in_place) == 6 * 8
    for name, case in in_place.items():
        assert 0.95 <= case["emptiest"] <= case["fullest"] <= 1, name
