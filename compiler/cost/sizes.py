"""Parameters, FLOP and elements of a model's parts; bytes follow from `machine.Storage`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from compiler.shapes import ModelShape

FP32 = 4
BETWEEN = 5  # of them between the parts of a layer that tensor shards divide (equation 2: 10 of 34 bytes)
ACTIVATION = 17  # elements a token, layer and hidden element that training keeps (arXiv 2205.05198, equation 2: 34
#                  bytes in 16 bit, without the quadratic term, which flash attention does not store)


@dataclass(frozen=True)
class Sizes:
    """Of one model; parameters counted without biases and norms, which are less than a thousandth.

    layer: parameters of a layer; embedding, head: of the two ends; query: heads * head_dim; kv: elements of keys
    and values a token and layer; head_flops: FLOP of the head a token, forward
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    policy: bool
    layer: int
    embedding: int
    head: int
    query: int
    kv: int

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.embedding + self.head

    def held(self, tp: int, pp: int) -> float:
        """Parameters on the fullest device: the first stages have a layer more, an end stage has its embedding."""
        ends = self.embedding + self.head if pp == 1 else max(self.embedding, self.head)
        return (self.stage_layers(pp) * self.layer + ends) / tp

    def stage_layers(self, pp: int) -> int:
        return -(-self.layers // pp)

    def cached(self, tp: int, pp: int = 1) -> float:
        """Elements of a token in the key/value cache of each device; fewer key/value heads than tp are repeated."""
        return self.kv * self.stage_layers(pp) / min(tp, self.kv_heads)

    @property
    def head_flops(self) -> int:
        return 2 * self.hidden * (self.vocab if self.policy else 1)


@functools.lru_cache(maxsize=None)
def sizes_of(shape: ModelShape, role: str) -> Sizes:
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = shape.hidden * (2 * query + 2 * key + 3 * shape.ffn)
    policy = role == "policy"
    head = shape.hidden * (shape.vocab * (not shape.tied) if policy else 1)
    return Sizes(shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.ffn, shape.vocab, policy, layer,
                 shape.vocab * shape.hidden, head, query, 2 * key)
