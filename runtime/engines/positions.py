"""What positions mean, in training as in generation: rotary frequencies (arXiv 2104.09864) and sliding windows."""

from __future__ import annotations

import math
from typing import Any, Mapping, Optional

import torch
from torch import Tensor

from compiler.shapes import ModelShape


def rotary_frequencies(shape: ModelShape) -> Tensor:
    """f32 [head_dim / 2]: radians per position of each pair, theta^(-2i / head_dim), scaled as `rope_scaling` says."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    plain = 1.0 / shape.rope_theta**exponents
    scaling = dict(shape.rope_scaling or {})
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        return plain / scaling["factor"]
    return _llama3(plain, scaling) if kind == "llama3" else plain


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's scaling: long waves are slowed by `factor`, short ones kept, those between interpolated."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)  # in the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / factor + kept * plain


def window_mask(window: int, longest: int, device: torch.device) -> Optional[Tensor]:
    """The mask of rows of up to `longest` tokens, each of which sees `window` tokens at most, 0 = any number."""
    if not 0 < window < longest:
        return None
    behind = torch.arange(longest, device=device)[:, None] - torch.arange(longest, device=device)
    return (behind >= 0) & (behind < window)
