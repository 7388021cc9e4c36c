"""Builds one pipeline stage of a Llama-like model out of Megatron's layers, with the head of its role."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, Optional

from runtime.engines import megatron_cpu  # noqa: F401  must precede megatron.core

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from compiler.layout import megatron_stages
from compiler.shapes import ModelShape
from compiler.weights import padded_vocab
from runtime.engines.base import Execution
from runtime.engines.megatron_attention import PackedRows
from runtime.engines.megatron_layer import layers
from runtime.engines.megatron_linear import linear, native
from runtime.meshes import LayoutGroups


_GATHERED = GlobalMemoryBuffer()


@contextmanager
def using(groups: LayoutGroups) -> Iterator[None]:
    """Megatron's module globals are those of `groups` in the meantime.

    Most of Megatron that we use takes its groups as arguments. Attention with fewer key/value heads than tp ranks, the
    buffer of sequence parallelism, and how layers fall to stages ask `parallel_state`. Models of different layouts take
    turns, so each engine call sets the globals.
    """
    now = {
        "_GLOBAL_MEMORY_BUFFER": _GATHERED,
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": _virtual(groups),
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


def _virtual(groups: LayoutGroups) -> Optional[int]:
    return groups.layout.chunks if groups.layout.chunks > 1 else None


def process_groups(groups: LayoutGroups) -> ProcessGroupCollection:
    """The groups as Megatron takes them; context and expert parallelism are this rank alone."""
    alone = groups.alone
    return ProcessGroupCollection(
        tp=groups.tp, pp=groups.pp, mp=groups.replica, dp=groups.dp, dp_cp=groups.dp, embd=groups.ends, pos_embd=None,
        cp=alone, ep=alone, expt_tp=alone, expt_dp=alone, tp_ep_pp=alone,
    )


class Trunk(GPTModel):
    """A chunk of a stage. The last one returns the hidden states, so that a head reads only the tokens it needs.

    recompute: layers forget their activations, and compute them again for their gradients
    """

    recompute = False

    def __init__(self, shape: ModelShape, role: str, groups: LayoutGroups, execution: Execution, chunk: int = 0) -> None:
        config, chunks = transformer_config(shape, groups, execution), groups.layout.chunks
        vp_stage = None if _virtual(groups) is None else chunk
        last = groups.is_last and chunk == chunks - 1
        super().__init__(
            config, layers(config, groups, vp_stage),
            vocab_size=padded_vocab(shape, groups.layout.tp), max_sequence_length=shape.max_positions,
            pre_process=groups.is_first and chunk == 0, post_process=last, vp_stage=vp_stage,
            share_embeddings_and_output_weights=shape.tied and role == "policy",
            position_embedding_type="none",  # positions rotate inside PackedAttention
            pg_collection=process_groups(groups),
        )
        if last and role != "policy":
            self.output_layer = torch.nn.Linear(shape.hidden, 1, bias=False, dtype=execution.dtype)
        elif last and config.sequence_parallel:  # the hidden states that it reads are gathered already
            self.output_layer.sequence_parallel, self.output_layer.allreduce_dgrad = False, True
        _mark_sharded(self)

    def forward(self, tokens: Tensor, packed: PackedRows) -> Tensor:
        """tokens int64 [1, tokens] → [tokens, 1, hidden], in the end [m, 1, hidden] of the m tokens that are read.

        A later stage takes what `set_input_tensor` was given.

        The layers run without the block around them: as nothing is dropped, its random states, which want CUDA, and
        its checkpointing, which saves them, have no use.
        """
        hidden = self._embedded(tokens) if self.pre_process else self.decoder.input_tensor
        for layer in self.decoder.layers:
            rows = packed if self.post_process and layer is self.decoder.layers[-1] else packed.reading(None)
            if self.recompute and torch.is_grad_enabled():
                hidden = checkpoint(layer, hidden, rows, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = layer(hidden, rows)
        if not self.post_process:
            return hidden
        hidden = self.decoder.final_layernorm(hidden)
        if not self.config.sequence_parallel:
            return hidden
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp)

    def _embedded(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding.word_embeddings(tokens)
        return embedded if self.config.sequence_parallel else embedded.transpose(0, 1).contiguous()

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [k, hidden] → this rank's columns, those of the padding too, [k, padded vocabulary / tp]."""
        tied, head = self.share_embeddings_and_output_weights, self.output_layer
        weight = self.shared_embedding_or_output_weight() if tied else head.weight
        if native(hidden):
            return linear(hidden, weight, group=self.pg_collection.tp if head.allreduce_dgrad else None)
        return head(hidden, weight=weight)[0]

    def scalars(self, hidden: Tensor) -> Tensor:
        """hidden [k, hidden] → f32 [k]."""
        return self.output_layer(hidden).float().squeeze(1)


def _mark_sharded(trunk: torch.nn.Module) -> None:
    """Gradient norms count a parameter once per tp rank if it is marked. Megatron marks while it initializes."""
    sharded = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
    for module in trunk.modules():
        for parameter in module.parameters(recurse=False) if isinstance(module, sharded) else ():
            parameter.tensor_model_parallel = True


def transformer_config(shape: ModelShape, groups: LayoutGroups, execution: Execution) -> TransformerConfig:
    """Fusions need CUDA extensions; parameters are not initialized, as they are loaded.

    With `calculate_per_token_loss` Megatron divides neither by micro-batches nor by data-parallel ranks: objectives
    come with their own denominators.
    """
    layout, dtype = groups.layout, execution.dtype
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
        pipeline_model_parallel_layout=megatron_stages(shape.layers, layout.pp * layout.chunks),
        virtual_pipeline_model_parallel_size=_virtual(groups),
        sequence_parallel=execution.sequence_parallel and layout.tp > 1,
        # variable lengths insist on this dispatcher, even without experts
        variable_seq_lengths=True, moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=False, calculate_per_token_loss=True,
    )
