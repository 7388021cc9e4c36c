"""Shapes of published models, each as the `config.json` of its release says."""

from __future__ import annotations

import functools

from compiler.shapes import FAMILIES, ModelShape
from rlhf_dsl.diagnostics import did_you_mean, fault

PREFIX = "catalog:"

# name: (family, hidden, layers, heads, kv_heads, head_dim, ffn, vocab, tied, max_positions)
_MODELS = {
    "llama-1-7b": ("llama", 4096, 32, 32, 32, 128, 11008, 32000, False, 2048),
    "llama-1-13b": ("llama", 5120, 40, 40, 40, 128, 13824, 32000, False, 2048),
    "llama-1-33b": ("llama", 6656, 60, 52, 52, 128, 17920, 32000, False, 2048),
    "llama-1-65b": ("llama", 8192, 80, 64, 64, 128, 22016, 32000, False, 2048),
    "llama-2-7b": ("llama", 4096, 32, 32, 32, 128, 11008, 32000, False, 4096),
    "llama-2-13b": ("llama", 5120, 40, 40, 40, 128, 13824, 32000, False, 4096),
    "llama-2-70b": ("llama", 8192, 80, 64, 8, 128, 28672, 32000, False, 4096),
    "llama-3-8b": ("llama", 4096, 32, 32, 8, 128, 14336, 128256, False, 8192),
    "llama-3-70b": ("llama", 8192, 80, 64, 8, 128, 28672, 128256, False, 8192),
    "llama-3.1-8b": ("llama", 4096, 32, 32, 8, 128, 14336, 128256, False, 131072),
    "llama-3.1-70b": ("llama", 8192, 80, 64, 8, 128, 28672, 128256, False, 131072),
    "llama-3.1-405b": ("llama", 16384, 126, 128, 8, 128, 53248, 128256, False, 131072),
    "llama-3.2-1b": ("llama", 2048, 16, 32, 8, 64, 8192, 128256, True, 131072),
    "llama-3.2-3b": ("llama", 3072, 28, 24, 8, 128, 8192, 128256, True, 131072),
    "llama-3.3-70b": ("llama", 8192, 80, 64, 8, 128, 28672, 128256, False, 131072),
    "codellama-7b": ("llama", 4096, 32, 32, 32, 128, 11008, 32016, False, 16384),
    "codellama-13b": ("llama", 5120, 40, 40, 40, 128, 13824, 32016, False, 16384),
    "codellama-34b": ("llama", 8192, 48, 64, 8, 128, 22016, 32000, False, 16384),
    "codellama-70b": ("llama", 8192, 80, 64, 8, 128, 28672, 32016, False, 16384),
    "qwen2.5-0.5b": ("qwen2", 896, 24, 14, 2, 64, 4864, 151936, True, 32768),
    "qwen2.5-1.5b": ("qwen2", 1536, 28, 12, 2, 128, 8960, 151936, True, 32768),
    "qwen2.5-3b": ("qwen2", 2048, 36, 16, 2, 128, 11008, 151936, True, 32768),
    "qwen2.5-7b": ("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, False, 32768),
    "qwen2.5-14b": ("qwen2", 5120, 48, 40, 8, 128, 13824, 152064, False, 32768),
    "qwen2.5-32b": ("qwen2", 5120, 64, 40, 8, 128, 27648, 152064, False, 32768),
    "qwen2.5-72b": ("qwen2", 8192, 80, 64, 8, 128, 29568, 152064, False, 32768),
    "qwen3-0.6b": ("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True, 40960),
    "qwen3-1.7b": ("qwen3", 2048, 28, 16, 8, 128, 6144, 151936, True, 40960),
    "qwen3-4b": ("qwen3", 2560, 36, 32, 8, 128, 9728, 151936, True, 40960),
    "qwen3-8b": ("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, False, 40960),
    "qwen3-14b": ("qwen3", 5120, 40, 40, 8, 128, 17408, 151936, False, 40960),
    "qwen3-32b": ("qwen3", 5120, 64, 64, 8, 128, 25600, 151936, False, 40960),
    "mistral-7b": ("mistral", 4096, 32, 32, 8, 128, 14336, 32000, False, 32768),
    "ministral-8b": ("mistral", 4096, 36, 32, 8, 128, 12288, 131072, False, 32768),
    "mistral-nemo-12b": ("mistral", 5120, 40, 32, 8, 128, 14336, 131072, False, 131072),
    "mistral-small-22b": ("mistral", 6144, 56, 48, 8, 128, 16384, 32768, False, 32768),
    "mistral-small-24b": ("mistral", 5120, 40, 32, 8, 128, 32768, 131072, False, 32768),
    "mistral-large-123b": ("mistral", 12288, 88, 96, 8, 128, 28672, 32768, False, 131072),
}


@functools.lru_cache(maxsize=None)
def model_shape(name: str) -> ModelShape:
    """The shape of `llama-2-7b`, also written `catalog:llama-2-7b`. Raises DiagnosticError P0112."""
    key = name.removeprefix(PREFIX)
    if key not in _MODELS:
        raise fault("P0112", model=key, help=did_you_mean(key, _MODELS))
    family, hidden, layers, heads, kv_heads, head_dim, ffn, vocab, tied, positions = _MODELS[key]
    return ModelShape(family, hidden, layers, heads, kv_heads, head_dim, ffn, vocab, tied=tied,
                      qkv_bias=FAMILIES[family].qkv_bias, qk_norm=FAMILIES[family].qk_norm, max_positions=positions)


def model_names() -> tuple[str, ...]:
    """All names, in order of family and size."""
    return tuple(_MODELS)
