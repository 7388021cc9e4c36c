"""Builds one pipeline stage of a Llama-like model out of Megatron's layers, with the head of its role."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

from runtime.engines import megatron_cpu  # noqa: F401  must precede megatron.core

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from compiler.layout import megatron_stages
from compiler.shapes import ModelShape
from compiler.weights import padded_vocab
from runtime.engines.megatron_attention import PackedAttention
from runtime.engines.megatron_norm import RMSNorm
from runtime.meshes import LayoutGroups


@contextmanager
def using(groups: LayoutGroups) -> Iterator[None]:
    """Megatron's module globals are those of `groups` in the meantime.

    All of Megatron that we use takes its groups as arguments, but for attention with fewer key/value heads than tp
    ranks, which asks `parallel_state`. Models of different layouts take turns, so each engine call sets the globals.
    """
    now = {
        "_TENSOR_MODEL_PARALLEL_GROUP": groups.tp,
        "_PIPELINE_MODEL_PARALLEL_GROUP": groups.pp,
        "_DATA_PARALLEL_GROUP": groups.dp,
    }
    before = {name: getattr(parallel_state, name) for name in now}
    vars(parallel_state).update(now)
    try:
        yield
    finally:
        vars(parallel_state).update(before)


def process_groups(groups: LayoutGroups) -> ProcessGroupCollection:
    """The groups as Megatron takes them; context and expert parallelism are this rank alone."""
    alone = groups.alone
    return ProcessGroupCollection(
        tp=groups.tp, pp=groups.pp, mp=groups.replica, dp=groups.dp, dp_cp=groups.dp, embd=groups.ends, pos_embd=None,
        cp=alone, ep=alone, expt_tp=alone, expt_dp=alone, tp_ep_pp=alone,
    )


class Trunk(GPTModel):
    """A stage whose last one returns the hidden states, so that a head reads only the tokens it needs."""

    def __init__(self, shape: ModelShape, role: str, groups: LayoutGroups, dtype: torch.dtype) -> None:
        config = transformer_config(shape, groups, dtype)
        super().__init__(
            config, _layers(config, groups),
            vocab_size=padded_vocab(shape, groups.layout.tp), max_sequence_length=shape.max_positions,
            pre_process=groups.is_first, post_process=groups.is_last,
            share_embeddings_and_output_weights=shape.tied and role == "policy",
            position_embedding_type="none",  # positions rotate inside PackedAttention
            pg_collection=process_groups(groups),
        )
        if groups.is_last and role != "policy":
            self.output_layer = torch.nn.Linear(shape.hidden, 1, bias=False, dtype=dtype)
        _mark_sharded(self)

    def _postprocess(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        return hidden_states

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [k, hidden] → this rank's columns, those of the padding too, [k, padded vocabulary / tp]."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden, weight=weight)[0]

    def scalars(self, hidden: Tensor) -> Tensor:
        """hidden [k, hidden] → f32 [k]."""
        return self.output_layer(hidden).float().squeeze(1)


def _layers(config: TransformerConfig, groups: LayoutGroups) -> TransformerBlockSubmodules:
    """Megatron's own layers with our attention and, on a CPU, our norm."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    norm = WrappedTorchNorm if torch.cuda.is_available() else RMSNorm
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    if config.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = norm
    here = get_num_layers_to_build(config, pp_rank=groups.at.pp)
    return TransformerBlockSubmodules(layer_specs=[layer] * here, layer_norm=norm)


def _mark_sharded(trunk: torch.nn.Module) -> None:
    """Gradient norms count a parameter once per tp rank if it is marked. Megatron marks while it initializes."""
    sharded = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
    for module in trunk.modules():
        for parameter in module.parameters(recurse=False) if isinstance(module, sharded) else ():
            parameter.tensor_model_parallel = True


def transformer_config(shape: ModelShape, groups: LayoutGroups, dtype: torch.dtype) -> TransformerConfig:
    """Fusions need CUDA extensions; parameters are not initialized, as they are loaded.

    With `calculate_per_token_loss` Megatron divides neither by micro-batches nor by data-parallel ranks: objectives
    come with their own denominators.
    """
    layout = groups.layout
    return TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.hidden, ffn_hidden_size=shape.ffn, kv_channels=shape.head_dim,
        num_attention_heads=shape.heads, num_query_groups=shape.kv_heads,
        normalization="RMSNorm", layernorm_epsilon=shape.norm_eps, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0, attention_dropout=0.0,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, cross_entropy_loss_fusion=False,
        perform_initialization=False, use_cpu_initialization=True,
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        pipeline_model_parallel_layout=megatron_stages(shape.layers, layout.pp),
        # variable lengths insist on this dispatcher, even without experts
        variable_seq_lengths=True, moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=False, calculate_per_token_loss=True,
    )
