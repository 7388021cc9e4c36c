"""The forward pass of a Llama-like model with a cache of keys and values, as generation needs it.

Legend: n rows, p prompt tokens, h query heads, k key/value heads and d their width on this rank, v vocabulary. A row
lives in one slot of the cache; its token at position i is at place i there.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Iterator, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from compiler.shapes import ModelShape
from runtime.engines.positions import rotary_frequencies, window_mask
from runtime.engines.sampler_cache import Cache
from runtime.engines.sampler_products import Products


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Optional[Tensor]
    q_norm: Optional[Tensor]
    k_norm: Optional[Tensor]
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class SamplerModel:
    """One tensor-parallel shard of a policy.

    weights: the local tensors of `compiler.weights` for engine "torch", used in place
    peers: global ranks of the tp shards, in their order; this is the one of `shard`
    group: their torch.distributed group, in whatever order; None where there is one
    """

    def __init__(
        self, shape: ModelShape, weights: dict[str, Tensor], shard: int = 0, peers: tuple[int, ...] = (0,), group=None,
    ) -> None:
        self.shape, self.group, tp = shape, group, len(peers)
        self.tp, self.places = tp, [dist.get_group_rank(group, rank) for rank in peers] if tp > 1 else [0]
        self.heads, self.kv_heads = shape.heads // tp, max(shape.kv_heads // tp, 1)
        self.embed, self.norm = weights["embed.weight"], weights["norm.weight"]
        self.head = self.embed if shape.tied else weights["head.weight"]
        self.layers = [_layer(weights, i) for i in range(shape.layers)]
        self._eps = torch.tensor(shape.norm_eps, device=self.embed.device)
        self.first_token = shard * self.embed.shape[0]
        self._tables, self._products = rotary_tables(shape, 0), Products()

    @contextlib.contextmanager
    def unchanging(self, memory: int) -> Iterator[None]:
        """Within, nobody writes to the weights, and products may keep copies of them in so many bytes."""
        matrices = [m for layer in self.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        self._products = Products([*matrices, self.head], memory)
        try:
            yield
        finally:
            self._products = Products()

    def row_bytes(self, capacity: int) -> int:
        """Bytes of cache for one row."""
        return 2 * len(self.layers) * capacity * self.kv_heads * self.shape.head_dim * self.embed.element_size()

    def cache(self) -> Cache:
        """One without slots."""
        return Cache(len(self.layers), self.kv_heads, self.shape.head_dim, self.embed.dtype, self.device)

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def prefill(self, tokens: Tensor, lengths: Tensor, cache: Cache, first: int, samples: Tensor) -> Tensor:
        """Reads prompts and returns the logits that follow, repeated for each sample, f32 [sum(samples), v].

        tokens: int64 [n, p], each row a prompt and then anything; lengths: int64 [n]
        samples: int64 [n]; prompt i is written into so many slots, one after the other, from slot `first` on
        """
        n, p = tokens.shape
        tokens, lengths, samples = (x.to(self.device) for x in (tokens, lengths, samples))
        which = torch.repeat_interleave(torch.arange(n, device=self.device), samples)
        slots = slice(first, first + which.numel())
        rotary = tuple(table[:p].repeat(n, 1, 1) for table in self._rotary(p))
        near = window_mask(self.shape.window, p, self.device)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(n, p, -1, self.shape.head_dim).transpose(1, 2) for x in (q, k, v))
            cache.fill(i, slots, k[which], v[which])
            # Causality hides the filling after a prompt from its tokens.
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=near, is_causal=near is None, enable_gqa=True)
            return mixed.transpose(1, 2)

        hidden = self._trunk(tokens.flatten(), rotary, attend)
        last = torch.arange(n, device=self.device) * p + lengths - 1
        return self._logits(hidden[last])[which]

    def decode(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Reads one more token in each of the slots 0 .. n-1 and returns the logits that follow, f32 [n, v].

        tokens, positions: int64 [n]; the places before `positions` are already in the cache
        """
        n, end, window = tokens.numel(), int(positions.max()) + 1, self.shape.window or self.shape.max_positions
        behind = positions[:, None] - torch.arange(end)
        unseen = ((behind < 0) | (behind >= window)).to(self.device)
        bias = torch.zeros(n, end, dtype=self.embed.dtype, device=self.device).masked_fill_(unseen, -torch.inf)
        bias = bias.repeat_interleave(self.kv_heads, 0)[:, None]
        places, rotary = cache.places(positions), tuple(table[positions.to(self.device)] for table in self._rotary(end))

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(i, places, k, v)
            return _attended(q.reshape(n * self.kv_heads, -1, self.shape.head_dim), *cache.read(i, n, end), bias)

        return self._logits(self._trunk(tokens.to(self.device), rotary, attend))

    def _trunk(self, tokens: Tensor, rotary: tuple[Tensor, Tensor], attend) -> Tensor:
        """Hidden states [m, hidden] after the last layer, for m tokens; attend(layer, q, k, v) → [.., heads, d]."""
        hidden, turned = self._embedded(tokens), self.heads + self.kv_heads
        for i, layer in enumerate(self.layers):
            qkv = self._products.of(self._normed(hidden, layer.attention_norm), layer.qkv, layer.qkv_bias)
            qkv = qkv.view(-1, turned + self.kv_heads, self.shape.head_dim)
            qk, v = rotate(self._normed_heads(qkv[:, :turned], layer), *rotary), qkv[:, turned:]
            mixed = attend(i, qk[:, :self.heads], qk[:, self.heads:], v)
            hidden = self._added(hidden, mixed.reshape(tokens.numel(), -1), layer.out)
            gate, up = self._products.of(self._normed(hidden, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            hidden = self._added(hidden, F.silu(gate, inplace=True).mul_(up), layer.down)
        return hidden

    def _added(self, hidden: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
        """hidden + x W^T, summed over the shards."""
        if self.tp == 1:
            return self._products.added(hidden, x, matrix)
        return hidden.add_(self._summed(self._products.of(x, matrix)))

    def _embedded(self, tokens: Tensor) -> Tensor:
        if self.tp == 1:
            return self.embed[tokens]
        local = tokens - self.first_token
        elsewhere = (local < 0) | (local >= self.embed.shape[0])
        return self._summed(self.embed[local.masked_fill(elsewhere, 0)].masked_fill(elsewhere[:, None], 0))

    def _logits(self, hidden: Tensor) -> Tensor:
        local = self._products.of(self._normed(hidden, self.norm), self.head)
        if self.tp == 1:
            return local.float()
        parts = torch.empty(self.tp, *local.shape, dtype=local.dtype, device=local.device)
        dist.all_gather(list(parts), local, group=self.group)
        whole = parts[self.places].transpose(0, 1).reshape(hidden.shape[0], -1)
        return whole[:, :self.shape.vocab].float()  # without the padding

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (wide * inverse).to(x.dtype).mul_(weight)

    def _normed_heads(self, qk: Tensor, layer: _Layer) -> Tensor:
        """Query heads, then key heads, [m, heads, d]."""
        if layer.q_norm is None:
            return qk
        weight = torch.cat([layer.q_norm.expand(self.heads, -1), layer.k_norm.expand(self.kv_heads, -1)])
        return self._normed(qk, weight)

    def _summed(self, x: Tensor) -> Tensor:
        if self.tp > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def _rotary(self, end: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine tables, [at least end, 1, d / 2] each."""
        if self._tables[0].shape[0] < end:
            tables = rotary_tables(self.shape, min(self.shape.max_positions, 2 * end))
            self._tables = tuple(t.to(self.device, self.embed.dtype) for t in tables)
        return self._tables


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864), dimension i paired with i + d/2. x: [m, heads, d], tables: [m, 1, d/2]."""
    (real, imaginary), turned = x.chunk(2, -1), torch.empty_like(x, memory_format=torch.contiguous_format)
    turned_real, turned_imaginary = turned.chunk(2, -1)
    torch.mul(real, cos, out=turned_real).addcmul_(imaginary, sin, value=-1)
    torch.mul(imaginary, cos, out=turned_imaginary).addcmul_(real, sin)
    return turned


def rotary_tables(shape: ModelShape, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin of position times frequency, f32 [length, 1, d / 2]."""
    angles = torch.arange(length, dtype=torch.float32)[:, None] * rotary_frequencies(shape)
    return angles.cos()[:, None], angles.sin()[:, None]


def _attended(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """One query a row and head: q [n * k, h / k, d], keys, values [n * k, end, d], bias [n * k, 1, end] → like q.

    The query heads of a group are rows of one small product: keys are read once and never repeated. In 32 bits on a
    CPU two plain products are faster than the fused kernel, whose blocks are made for many queries.
    """
    if q.dtype != torch.float32 or q.is_cuda:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=bias)
    scores = torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1), values)


def _layer(weights: dict[str, Tensor], i: int) -> _Layer:
    name = f"layers.{i}."
    return _Layer(
        weights[name + "attention_norm.weight"], weights[name + "qkv.weight"], weights.get(name + "qkv.bias"),
        weights.get(name + "q_norm.weight"), weights.get(name + "k_norm.weight"),
        weights[name + "out.weight"], weights[name + "mlp_norm.weight"], weights[name + "gate_up.weight"],
        weights[name + "down.weight"])
