"""The shape of a decoder-only transformer, read from the `config.json` of a Hugging Face folder.

Two generations of that file are read: transformers 5 writes `rope_parameters`, earlier ones `rope_theta` beside
`rope_scaling`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Optional, Union

from rlhf_dsl.diagnostics import did_you_mean, fault, listing

ROLES = ("policy", "value", "scorer")
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE_TYPES = {"default": (), "linear": ("factor",), "llama3": LLAMA3}  # and the numbers that each needs
UNFOLLOWED = ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config")


@dataclass(frozen=True)
class Family:
    """What a `model_type` fixes beside its config.

    architecture: the stem of its classes in transformers
    windowed: `sliding_window` holds in every layer
    defaults: what these assume of settings that a config leaves out, where families differ
    """

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    windowed: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama"),
    "qwen2": Family("Qwen2", qkv_bias=True),
    "qwen3": Family("Qwen3", qk_norm=True, defaults={"head_dim": 128}),
    "mistral": Family("Mistral", windowed=True, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama-like transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    hidden, ffn: widths; heads, kv_heads: query and key/value heads of width head_dim; vocab: rows of the embedding
    tied: the output head is the embedding; qkv_bias: q, k and v have a bias; qk_norm: an RMSNorm over the width of each
    query and key head precedes their rotation
    window: how many tokens, itself included, a token attends to at most; 0 = all that precede it
    rope_scaling: items of the scaling's parameters, sorted, "rope_type" among them; None for plain rotary positions
    max_positions: the longest context; eos: the tokens that end a response; bos, pad: token ids or None
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Optional[tuple[tuple[str, Any], ...]] = None
    max_positions: int = 2048
    eos: tuple[int, ...] = ()
    bos: Optional[int] = None
    pad: Optional[int] = None
    qk_norm: bool = False
    window: int = 0

    @property
    def queries_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads


def shape_from_config(source: Union[str, Path, Mapping[str, Any]]) -> ModelShape:
    """The shape that a model folder (or the content of its `config.json`) describes.

    End tokens come from `generation_config.json` too, where the folder has one.
    Raises DiagnosticError: R0130 no such folder, R0131 an unreadable config, R0132 a model that is not supported.
    """
    if isinstance(source, Mapping):
        return _shape(source, source.get("eos_token_id"), "the given config")
    folder = Path(source)
    if not (folder / "config.json").is_file():
        raise fault("R0130", folder=folder)
    config = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    more = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    return _shape(config, [*_ids(config.get("eos_token_id")), *_ids(more)], str(folder / "config.json"))


def tensors(shape: ModelShape, role: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the canonical tensors, those of Hugging Face, in the order of the model's modules.

    A policy ends in `lm_head.weight` [vocab, hidden] unless tied, the other roles in `score.weight` [1, hidden].
    """
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        for name, rows in (("q", query), ("k", key), ("v", key)):
            found[f"{layer}self_attn.{name}_proj.weight"] = (rows, shape.hidden)
            if shape.qkv_bias:
                found[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        for name in "qk" if shape.qk_norm else "":
            found[f"{layer}self_attn.{name}_norm.weight"] = (shape.head_dim,)
        found[layer + "self_attn.o_proj.weight"] = (shape.hidden, query)
        found[layer + "mlp.gate_proj.weight"] = (shape.ffn, shape.hidden)
        found[layer + "mlp.up_proj.weight"] = (shape.ffn, shape.hidden)
        found[layer + "mlp.down_proj.weight"] = (shape.hidden, shape.ffn)
        found[layer + "input_layernorm.weight"] = (shape.hidden,)
        found[layer + "post_attention_layernorm.weight"] = (shape.hidden,)
    found["model.norm.weight"] = (shape.hidden,)
    return found | _head(shape, role)


def parameters(shape: ModelShape, role: str) -> int:
    """The number of parameters; a tied embedding counts once."""
    return sum(math.prod(size) for size in tensors(shape, role).values())


def _head(shape: ModelShape, role: str) -> dict[str, tuple[int, ...]]:
    if role not in ROLES:
        raise ValueError(f"role {role!r} is none of {', '.join(ROLES)}")
    if role != "policy":
        return {"score.weight": (1, shape.hidden)}
    return {} if shape.tied else {"lm_head.weight": (shape.vocab, shape.hidden)}


def _shape(config: Mapping[str, Any], eos: Any, place: str) -> ModelShape:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise fault("R0132", place=place, what=f"model_type `{family}`", help=did_you_mean(str(family), FAMILIES))
    facts = FAMILIES[family]
    config = {**facts.defaults, **config}
    _refuse_variants(config, place)
    try:
        return ModelShape(
            family=family, **_sizes(config), tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=facts.qkv_bias, qk_norm=facts.qk_norm, norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            **_rope(config, place), **_reach(config, facts.windowed),
            eos=tuple(dict.fromkeys(_ids(eos))), bos=config.get("bos_token_id"), pad=config.get("pad_token_id"),
        )
    except KeyError as missing:
        raise fault("R0131", place=place, reason=f"it lacks `{missing.args[0]}`") from missing
    except (TypeError, ValueError) as error:
        raise fault("R0131", place=place, reason=error) from error


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    sizes = {
        "hidden": hidden, "layers": int(config["num_hidden_layers"]), "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or hidden // max(heads, 1)),
        "ffn": int(config["intermediate_size"]), "vocab": int(config["vocab_size"]),
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be positive, not {size}")
    if heads % sizes["kv_heads"]:
        raise ValueError(f"{heads} heads do not divide into {sizes['kv_heads']} key/value heads")
    return sizes


def _reach(config: Mapping[str, Any], windowed: bool) -> dict[str, int]:
    """The longest context, and the window where it is shorter."""
    context = int(config.get("max_position_embeddings", 2048))
    window = int(config.get("sliding_window") or 0) if windowed else 0
    return {"max_positions": context, "window": window if window < context else 0}


def _rope(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` from `rope_parameters`, else from the older pair of fields."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(scaling.pop("rope_theta", None) or config.get("rope_theta", 10000.0))
    kind = scaling.pop("type", None)
    kind = scaling.setdefault("rope_type", kind or "default")
    if kind not in ROPE_TYPES:
        raise fault("R0132", place=place, what=f"rope_type `{kind}`", help=f"supported are {listing(ROPE_TYPES)}")
    for name in ROPE_TYPES[kind]:
        scaling[name] = float(scaling[name])
    return {"rope_theta": theta, "rope_scaling": None if kind == "default" else tuple(sorted(scaling.items()))}


def _refuse_variants(config: Mapping[str, Any], place: str) -> None:
    """Settings that would change what the model computes, and that no engine here follows."""
    for name in UNFOLLOWED:
        if config.get(name):
            raise fault("R0132", place=place, what=f"`{name}`" + (": true" if config[name] is True else ""))
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise fault("R0132", place=place, what="`layer_types` other than `full_attention`")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise fault("R0132", place=place, what="`partial_rotary_factor` other than 1")
    if config.get("hidden_act", "silu") != "silu":
        raise fault("R0132", place=place, what=f"hidden_act `{config['hidden_act']}`", help="supported is `silu`")


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(x) for x in value] if isinstance(value, (list, tuple)) else [int(value)]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise fault("R0131", place=str(path), reason=error) from error
    if not isinstance(content, dict):
        raise fault("R0131", place=str(path), reason="it is not a JSON object")
    return content
