"""A layer of Megatron's parts that computes what is read: the last one, the tokens that a head reads."""

from __future__ import annotations

from typing import Optional

from runtime.engines import megatron_cpu  # noqa: F401  must precede megatron.core

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from runtime.engines.megatron_attention import PackedAttention, PackedRows
from runtime.engines.megatron_linear import ColumnLinear, RowLinear
from runtime.engines.megatron_mlp import GatedMLP
from runtime.engines.megatron_norm import RMSNorm
from runtime.meshes import LayoutGroups


class Layer(TransformerLayer):
    """Attention and MLP, each added to what it read. Nothing is dropped and no bias comes after a sum."""

    def forward(self, hidden: Tensor, packed: PackedRows) -> Tensor:
        """[tokens, 1, hidden] → [m, 1, hidden], of the m tokens that are wanted; keys and values are of all."""
        mixed, _ = self.self_attention(self.input_layernorm(hidden), None, packed_seq_params=packed)
        hidden = packed.taken(hidden) + mixed
        return hidden + self.mlp(self.pre_mlp_layernorm(hidden))[0]


def layers(config: TransformerConfig, groups: LayoutGroups, vp_stage: Optional[int]) -> TransformerBlockSubmodules:
    """Those of one chunk of a stage."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer.module, parts = Layer, layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention, attention.linear_qkv, attention.linear_proj = PackedAttention, ColumnLinear, RowLinear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    parts.mlp = GatedMLP
    here = get_num_layers_to_build(config, vp_stage, groups.at.pp)
    return TransformerBlockSubmodules(layer_specs=[layer] * here, layer_norm=RMSNorm)
