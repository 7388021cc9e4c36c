"""How models are cut: against plain formulas, element by element, and rows of a batch likewise."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_cases import local_arrays, model_layouts, numbered, shapes

from compiler.layout import ModelLayout, generation_layout, megatron_stages, stage_layers, vanilla_generation_layout
from compiler.rows import balance, home_owner, home_range, micro_batches, minibatch_rows, permutation
from compiler.shapes import ModelShape, parameters, shape_from_config
from compiler.weights import WeightLayout, misfit
from rlhf_dsl.diagnostics import DiagnosticError
from runtime import draws

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 101,
}


# ---- shapes --------------------------------------------------------------------------------------

def test_config_of_both_generations():
    old = shape_from_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = shape_from_config(LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}})
    assert old == new
    assert (new.rope_theta, new.rope_scaling) == (5e5, (("factor", 2.0), ("rope_type", "linear")))
    assert shape_from_config(LLAMA).rope_scaling is None
    assert shape_from_config(LLAMA).head_dim == 16


def test_families_differ_in_what_their_configs_leave_out():
    short = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"} | {"num_attention_heads": 8}
    mistral = shape_from_config(short | {"model_type": "mistral", "max_position_embeddings": 32768})
    assert (mistral.kv_heads, mistral.window, mistral.head_dim) == (8, 4096, 8)
    assert shape_from_config(LLAMA | {"model_type": "mistral"}).window == 0  # the context is within the window
    assert shape_from_config(LLAMA | {"model_type": "mistral", "sliding_window": None}).window == 0
    qwen3 = shape_from_config(LLAMA | {"model_type": "qwen3", "sliding_window": 16, "use_sliding_window": False})
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias, qwen3.window) == (128, True, False, 0)


def test_end_tokens_of_both_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert shape_from_config(tmp_path).eos == (2, 7)


def test_llama_7b_has_its_parameters():
    shape = ModelShape("llama", hidden=4096, layers=32, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=32000)
    assert parameters(shape, "policy") == 6_738_415_616
    assert parameters(shape, "scorer") == 6_738_415_616 - 32000 * 4096 + 4096


@pytest.mark.parametrize("code, change", [
    ("R0132", {"model_type": "lama"}), ("R0132", {"attention_bias": True}), ("R0132", {"hidden_act": "gelu"}),
    ("R0132", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}), ("R0131", {"hidden_size": None}),
    ("R0131", {"num_key_value_heads": 3}), ("R0131", {"vocab_size": 0}),
    ("R0131", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}), ("R0132", {"partial_rotary_factor": 0.5}),
    ("R0132", {"model_type": "qwen3", "use_sliding_window": True}), ("R0132", {"quantization_config": {"bits": 4}}),
    ("R0132", {"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}),
])
def test_faults_of_a_config(code, change):
    with pytest.raises(DiagnosticError) as caught:
        shape_from_config(LLAMA | change)
    assert caught.value.diagnostics[0].code == code
    assert caught.value.exit_code == 2


def test_faults_of_a_folder(tmp_path):
    with pytest.raises(DiagnosticError, match="R0130"):
        shape_from_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DiagnosticError, match="R0131"):
        shape_from_config(tmp_path)


# ---- layouts -------------------------------------------------------------------------------------

def test_rank_order_is_tp_dp_pp():
    layout = ModelLayout(tuple(range(8)), tp=2, pp=2, dp=2)
    assert layout.tp_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.dp_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.pp_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.replica(1) == (2, 3, 6, 7)
    assert layout.outputs() == (4, 6)
    for rank in layout.ranks:
        at = layout.coordinates(rank)
        assert layout.rank(at.dp, at.pp, at.tp) == rank
    assert ModelLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_a_layout_has_its_number_of_ranks():
    with pytest.raises(ValueError):
        ModelLayout((0, 1, 2), tp=2)
    with pytest.raises(ValueError):
        ModelLayout((0, 0), tp=2)


def test_first_stages_take_the_rest():
    assert stage_layers(7, 3) == ((0, 3), (3, 5), (5, 7))
    assert megatron_stages(6, 3) is None
    assert megatron_stages(5, 3) == [["embedding", "decoder", "decoder"], ["decoder", "decoder"], ["decoder", "loss"]]


def test_generation_groups_of_hybridflow():
    """Figure 8 of arXiv 2409.19256: 8 GPUs, training (p, t, d) = (1, 4, 2), generation tp 2."""
    train = ModelLayout(tuple(range(8)), tp=4, pp=1, dp=2)
    assert set(generation_layout(train, 2).tp_groups()) == {(0, 2), (1, 3), (4, 6), (5, 7)}
    assert vanilla_generation_layout(train, 2).tp_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_replicas_of_one_rank_keep_the_order_of_ranks():
    train = ModelLayout(tuple(range(8)), tp=2, pp=2, dp=2)
    assert generation_layout(train, 1).ranks == train.ranks


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_generation_layout_uses_every_rank_once(data):
    tp, pp, dp = (data.draw(st.sampled_from([1, 2, 3, 4])) for _ in range(3))
    train = ModelLayout(tuple(data.draw(st.permutations(range(tp * pp * dp)))), tp, pp, dp)
    degree = data.draw(st.sampled_from([n for n in range(1, len(train.ranks) + 1) if len(train.ranks) % n == 0]))
    generate = generation_layout(train, degree)
    assert sorted(generate.ranks) == sorted(train.ranks)
    assert (generate.tp, generate.pp) == (degree, 1)
    if tp % degree == 0:
        for rank in train.ranks:
            assert generate.coordinates(rank).tp == train.coordinates(rank).tp // (tp // degree)


# ---- weights -------------------------------------------------------------------------------------

def _chunk(array: np.ndarray, parts: int, i: int, axis: int = 0) -> np.ndarray:
    return np.split(array, parts, axis)[i]


def _padded_rows(array: np.ndarray, parts: int, i: int) -> np.ndarray:
    rows = math.ceil(len(array) / parts)
    padding = np.full((rows * parts - len(array), *array.shape[1:]), -1)
    return np.concatenate([array, padding])[i * rows : (i + 1) * rows]


def _interleaved(shape: ModelShape, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Megatron's fused matrix of the whole model."""
    def by_group(x: np.ndarray) -> np.ndarray:
        return x.reshape(shape.kv_heads, -1, *x.shape[1:])

    return np.concatenate([by_group(q), by_group(k), by_group(v)], 1).reshape(-1, *q.shape[1:])


def _megatron(shape: ModelShape, role: str, layout: ModelLayout, rank: int, w: dict[str, np.ndarray]) -> dict:
    at, tp = layout.coordinates(rank), layout.tp
    runs = stage_layers(shape.layers, layout.pp * layout.chunks)[at.pp::layout.pp]
    made = {}
    if at.pp == 0:
        made["embedding.word_embeddings.weight"] = _padded_rows(w["model.embed_tokens.weight"], tp, at.tp)
    for i, layer in enumerate(layer for run in runs for layer in range(*run)):
        here, there = f"decoder.layers.{i}.", f"model.layers.{layer}."
        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            whole = _interleaved(shape, *(w[f"{there}self_attn.{x}_proj.{kind}"] for x in "qkv"))
            made[f"{here}self_attention.linear_qkv.{kind}"] = _chunk(whole, tp, at.tp)
        for head in "qk" if shape.qk_norm else "":
            made[f"{here}self_attention.{head}_layernorm.weight"] = w[f"{there}self_attn.{head}_norm.weight"]
        made[here + "self_attention.linear_proj.weight"] = _chunk(w[there + "self_attn.o_proj.weight"], tp, at.tp, 1)
        halves = [_chunk(w[f"{there}mlp.{x}_proj.weight"], tp, at.tp) for x in ("gate", "up")]
        made[here + "mlp.linear_fc1.weight"] = np.concatenate(halves)
        made[here + "mlp.linear_fc2.weight"] = _chunk(w[there + "mlp.down_proj.weight"], tp, at.tp, 1)
        made[here + "input_layernorm.weight"] = w[there + "input_layernorm.weight"]
        made[here + "pre_mlp_layernorm.weight"] = w[there + "post_attention_layernorm.weight"]
    if at.pp < layout.pp - 1:
        return made
    made["decoder.final_layernorm.weight"] = w["model.norm.weight"]
    if role != "policy":
        made["output_layer.weight"] = w["score.weight"]
    elif not shape.tied or layout.pp > 1:
        head = w["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
        made["output_layer.weight"] = _padded_rows(head, tp, at.tp)
    return made


def _torch(shape: ModelShape, role: str, layout: ModelLayout, rank: int, w: dict[str, np.ndarray]) -> dict:
    t, tp, width = layout.coordinates(rank).tp, layout.tp, shape.head_dim
    heads = range(t * shape.heads // tp, (t + 1) * shape.heads // tp)
    groups = sorted({head // shape.queries_per_group for head in heads})

    def pick(x: np.ndarray, which) -> np.ndarray:
        return np.concatenate([x[i * width : (i + 1) * width] for i in which])

    made = {"embed.weight": _padded_rows(w["model.embed_tokens.weight"], tp, t), "norm.weight": w["model.norm.weight"]}
    for i in range(shape.layers):
        here, there = f"layers.{i}.", f"model.layers.{i}."
        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            q, k, v = (w[f"{there}self_attn.{x}_proj.{kind}"] for x in "qkv")
            made[f"{here}qkv.{kind}"] = np.concatenate([pick(q, heads), pick(k, groups), pick(v, groups)])
        for head in "qk" if shape.qk_norm else "":
            made[f"{here}{head}_norm.weight"] = w[f"{there}self_attn.{head}_norm.weight"]
        made[here + "out.weight"] = _chunk(w[there + "self_attn.o_proj.weight"], tp, t, 1)
        halves = [_chunk(w[f"{there}mlp.{x}_proj.weight"], tp, t) for x in ("gate", "up")]
        made[here + "gate_up.weight"] = np.concatenate(halves)
        made[here + "down.weight"] = _chunk(w[there + "mlp.down_proj.weight"], tp, t, 1)
        made[here + "attention_norm.weight"] = w[there + "input_layernorm.weight"]
        made[here + "mlp_norm.weight"] = w[there + "post_attention_layernorm.weight"]
    if role != "policy":
        made["head.weight"] = w["score.weight"]
    elif not shape.tied:
        made["head.weight"] = _padded_rows(w["lm_head.weight"], tp, t)
    return made


def _vllm(shape: ModelShape, role: str, layout: ModelLayout, rank: int, w: dict[str, np.ndarray]) -> dict:
    """As torch, with vocabularies filled up to a multiple of 64 before they are cut."""
    def filled(x: np.ndarray) -> np.ndarray:
        return np.pad(x, ((0, -len(x) % 64), (0, 0)), constant_values=-1)

    words = {name: filled(x) for name, x in w.items() if name in ("model.embed_tokens.weight", "lm_head.weight")}
    return _torch(shape, role, layout, rank, w | words)


@pytest.mark.parametrize("engine, formula", [("megatron", _megatron), ("torch", _torch), ("vllm", _vllm)])
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_pieces_are_what_the_engine_keeps(engine, formula, data):
    shape, role = data.draw(shapes()), data.draw(st.sampled_from(["policy", "value", "scorer"]))
    layout = data.draw(model_layouts(shape, engine))
    weights = WeightLayout(shape, role, layout, engine)
    whole = numbered(weights)
    for rank in layout.ranks:
        expected, found = formula(shape, role, layout, rank, whole), local_arrays(weights, rank, whole)
        assert expected.keys() == found.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_replica_on_disk_holds_each_tensor_once(data):
    shape = data.draw(shapes())
    layout = data.draw(model_layouts(shape, "disk"))
    weights = WeightLayout(shape, "policy", layout, "disk")
    for d in range(layout.dp):
        held = [name for rank in layout.replica(d) for name in weights.local_tensors(rank)]
        assert sorted(held) == sorted(weights.tensors)


def test_misfits_are_named():
    shape = ModelShape("llama", hidden=12, layers=2, heads=6, kv_heads=3, head_dim=2, ffn=12, vocab=5)
    assert "heads, 6" in misfit(shape, ModelLayout((0, 1, 2, 3), tp=4), "megatron")
    assert "key/value heads, 3" in misfit(shape, ModelLayout((0, 1), tp=2), "torch")
    assert "2 layers" in misfit(shape, ModelLayout((0, 1, 2), pp=3), "megatron")
    assert "pipeline" in misfit(shape, ModelLayout((0, 1), pp=2), "torch")
    assert "2 chunks exceeds the 2 layers" in misfit(shape, ModelLayout((0, 1), pp=2, chunks=2), "megatron")
    with pytest.raises(ValueError, match="chunks 2"):
        ModelLayout((0, 1), tp=2, chunks=2)
    assert "tensor" in misfit(shape, ModelLayout((0, 1, 2), tp=3), "disk")
    assert "pads to 64" in misfit(shape, ModelLayout((0, 1, 2), tp=3), "vllm")
    assert misfit(shape, ModelLayout((0, 1, 2), tp=3), "megatron") == ""
    with pytest.raises(ValueError, match="heads, 6"):
        WeightLayout(shape, "policy", ModelLayout((0, 1, 2, 3), tp=4), "torch")


# ---- rows ----------------------------------------------------------------------------------------

@given(st.integers(1, 200), st.integers(1, 12))
def test_home_ranges_partition_rows(n, shards):
    ranges = [home_range(n, shards, k) for k in range(shards)]
    assert [i for a, b in ranges for i in range(a, b)] == list(range(n))
    assert max(b - a for a, b in ranges) - min(b - a for a, b in ranges) <= 1
    assert all(home_owner(i, n, shards) == k for k, (a, b) in enumerate(ranges) for i in range(a, b))


def test_permutations_have_names():
    names = [(0, "b", 1, 0), (1, "b", 1, 0), (0, "c", 1, 0), (0, "b", 2, 0), (0, "b", 1, 1)]
    orders = [permutation(*name, 64) for name in names]
    assert all(sorted(order) == list(range(64)) for order in orders)
    assert len(set(orders)) == len(orders)
    assert permutation(0, "b", 1, 0, 8) == (0, 2, 5, 7, 1, 3, 6, 4)


def test_permutation_is_that_of_named_draws():
    assert list(permutation(5, "prompts", 3, 1, 300)) == draws.permutation(300, 5, "prompts", 3, 1).tolist()


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 8))
def test_minibatches_cut_the_order(order, minibatches):
    runs = minibatch_rows(order, minibatches)
    assert [row for run in runs for row in run] == order
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@given(st.lists(st.integers(0, 500), max_size=60), st.integers(1, 8))
def test_balance_assigns_each_unit_once_within_the_bound(lengths, shards):
    chosen = balance(lengths, shards)
    assert sorted(unit for units in chosen for unit in units) == list(range(len(lengths)))
    assert all(list(units) == sorted(units) for units in chosen)
    # each unit went to the least loaded shard, so none exceeds the mean by more than one unit
    loads = [sum(lengths[u] for u in units) for units in chosen]
    assert max(loads) <= sum(lengths) / shards + max(lengths, default=0)


@given(st.lists(st.integers(1, 500), max_size=60), st.sampled_from([None, 1, 3]), st.sampled_from([None, 100, 900]))
def test_micro_batches_keep_their_limits(lengths, rows, tokens):
    batches = micro_batches(lengths, rows, tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert rows is None or len(batch) <= rows
        assert tokens is None or len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= tokens
    if rows and not tokens:
        assert len(batches) == math.ceil(len(lengths) / rows)
