"""Model folders: what is written loads in transformers, and what is wrong with a folder is said."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiler.layout import ModelLayout
from compiler.shapes import shape_from_config, tensors
from compiler.weights import WeightLayout
from rlhf_dsl.diagnostics import DiagnosticError
from runtime.hf_folder import HFFolder, config_for_role, in_parts, read_config, write_parts
from runtime.weight_files import WeightFiles

CONFIG = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 33, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
SHAPE = shape_from_config(CONFIG)
ALONE = ModelLayout((0,))


def _weights(role: str = "policy") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(size, generator=generator) for name, size in tensors(SHAPE, role).items()}


def _parts(weights: dict[str, torch.Tensor], most: int) -> list[dict[str, torch.Tensor]]:
    sizes = {name: weight.nbytes for name, weight in weights.items()}
    return [{name: weights[name] for name in part} for part in in_parts(sizes, most)]


def _read(folder, role: str, dtype=torch.float32) -> dict[str, torch.Tensor]:
    weights = WeightLayout(SHAPE, role, ALONE, "disk")
    found = {name: torch.full(size, 7.0, dtype=dtype) for name, size in weights.local_tensors(0).items()}
    HFFolder(folder).read_into(found, weights, 0)
    return found


def _fault(folder, role: str = "policy"):
    with pytest.raises(DiagnosticError) as caught:
        _read(folder, role)
    assert caught.value.exit_code == 2
    return caught.value.diagnostics[0]


@pytest.mark.parametrize("most, files", [(1 << 30, 1), (4000, 6)])
def test_weights_come_back_from_one_file_and_from_parts(tmp_path, most, files):
    weights = _weights()
    write_parts(tmp_path / "m", CONFIG, _parts(weights, most))
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == files
    found = _read(tmp_path / "m", "policy")
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    rounded = _read(tmp_path / "m", "policy", torch.bfloat16)
    assert torch.equal(rounded["lm_head.weight"], weights["lm_head.weight"].bfloat16())


@pytest.mark.parametrize("role, head", [("policy", "lm_head"), ("scorer", "score")])
def test_transformers_loads_what_is_written(tmp_path, role, head):
    transformers = pytest.importorskip("transformers")
    weights = _weights(role)
    write_parts(tmp_path / "m", config_for_role(CONFIG, role), [weights])
    loader = transformers.AutoModelForCausalLM if role == "policy" else transformers.AutoModelForSequenceClassification
    model, info = loader.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert getattr(model, head).weight.shape == weights[f"{head}.weight"].shape


def test_a_new_head_starts_at_zero_and_the_old_is_ignored(tmp_path):
    write_parts(tmp_path / "m", CONFIG, [_weights()])
    found = _read(tmp_path / "m", "value")
    assert torch.equal(found["score.weight"], torch.zeros(1, 16))
    assert "lm_head.weight" not in found


def test_writing_replaces_a_folder_whole(tmp_path):
    companions = tmp_path / "base"
    companions.mkdir()
    (companions / "tokenizer.json").write_text("{}")
    (companions / "notes.txt").write_text("not the model's")
    write_parts(tmp_path / "m", CONFIG, _parts(_weights(), 4000))
    write_parts(tmp_path / "m", CONFIG, [_weights()], companions)
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "m"]
    assert read_config(tmp_path / "m") == CONFIG


def test_a_failed_write_leaves_the_old_folder(tmp_path):
    write_parts(tmp_path / "m", CONFIG, [_weights()])
    with pytest.raises(TypeError):
        write_parts(tmp_path / "m", CONFIG | {"bad": object()}, [_weights()])
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    _read(tmp_path / "m", "policy")


def test_faults(tmp_path):
    assert _fault(tmp_path / "none").code == "R0130"
    assert _fault(tmp_path).code == "R0133"
    folder = tmp_path / "m"
    write_parts(folder, CONFIG, [_weights()])
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k != "model.norm.weight"}, folder / "model.safetensors")
    assert "`model.norm.weight`" in _fault(folder).message
    save_file(weights | {"model.norm.weight": torch.zeros(17)}, folder / "model.safetensors")
    assert (_fault(folder).code, "[17]" in _fault(folder).message) == ("R0136", True)
    (folder / "model.safetensors").write_bytes(b"\x40")
    assert _fault(folder).code == "R0134"


def test_weights_that_the_config_does_not_describe(tmp_path):
    folder = tmp_path / "m"
    write_parts(folder, CONFIG, [_weights()])
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(2)}, folder / "model.safetensors")
    WeightFiles(folder).check(SHAPE, "policy")
    save_file(weights | {"model.layers.2.input_layernorm.weight": torch.zeros(16)}, folder / "model.safetensors")
    with pytest.raises(DiagnosticError, match="R0137.*layers.2"):
        WeightFiles(folder).check(SHAPE, "policy")


def test_faults_of_an_index(tmp_path):
    folder = tmp_path / "m"
    write_parts(folder, CONFIG, _parts(_weights(), 4000))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first, last = sorted(folder.glob("*.safetensors"))[::5]
    index["weight_map"]["model.embed_tokens.weight"] = last.name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert _fault(folder).code == "R0135"
    last.unlink()
    assert _fault(folder).code == "R0134"
    (folder / "model.safetensors.index.json").write_text("[]")
    assert _fault(folder).code == "R0134"
