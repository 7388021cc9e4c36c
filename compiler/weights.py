"""Which piece of which tensor a rank holds, under the names and forms that an engine gives them.

A canonical tensor (`compiler.shapes.tensors`) is the whole, as Hugging Face stores it. A local tensor is what one rank
keeps: a stack of boxes of canonical tensors, as fused q, k and v, gate beside up, rows or columns of one shard. All
that is special about an engine (interleaving, padding, tying, repeated key/value heads) is said here, nowhere else.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from compiler.layout import ModelLayout
from compiler.shapes import ModelShape, tensors

ENGINES = ("megatron", "torch", "vllm", "disk")
VLLM_ROWS = 64  # vLLM pads a vocabulary to a multiple of it before cutting it
EMBEDDING, FINAL_NORM, HEAD, SCORE = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "score.weight"


@dataclass(frozen=True)
class Piece:
    """The box [start, stop) of canonical `tensor` lies in local tensor `local`, from `offset` on, in the same form."""

    tensor: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    local: str
    offset: tuple[int, ...]

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop))

    @property
    def elements(self) -> int:
        return math.prod(self.size)


@dataclass(frozen=True)
class LocalTensor:
    """A tensor of one rank. Elements that no piece covers are padding and hold zeros."""

    size: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class WeightLayout:
    """All weights of one model as `engine` keeps them over `layout`. engine: one of `ENGINES`.

    only: these canonical tensors and no others, for a move in parts; () for all
    Raises ValueError, with the reason of `misfit`, when the degrees do not cut the model.
    """

    shape: ModelShape
    role: str
    layout: ModelLayout
    engine: str
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        reason = misfit(self.shape, self.layout, self.engine)
        if reason:
            raise ValueError(reason)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The canonical tensors."""
        return tensors(self.shape, self.role)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` holds, none outside the layout."""
        held = pieces(self.shape, self.role, self.layout, rank, self.engine) if rank in self.layout else ()
        return tuple(piece for piece in held if piece.tensor in self.only) if self.only else held

    def local_tensors(self, rank: int) -> dict[str, tuple[int, ...]]:
        if rank not in self.layout:
            return {}
        held = local_tensors(self.shape, self.role, self.layout, rank, self.engine)
        mine = {piece.local for piece in self.pieces(rank)} if self.only else held
        return {name: size for name, size in held.items() if name in mine}


def pieces(shape: ModelShape, role: str, layout: ModelLayout, rank: int, engine: str) -> tuple[Piece, ...]:
    """Every piece on `rank`, in the order of `local_tensors`."""
    return tuple(piece for local in _locals(shape, role, layout, rank, engine).values() for piece in local.pieces)


def local_tensors(
    shape: ModelShape, role: str, layout: ModelLayout, rank: int, engine: str
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that `engine` keeps on `rank`.

    megatron: parameters of megatron-core 0.16.1's GPTModel with `get_gpt_layer_local_spec`; layers count within the
    stage, on from chunk to chunk; linear_qkv is [queries; key; value] of each key/value group in turn, cut into tp runs
    of rows (with fewer groups than tp a run is part of a group); linear_fc1 is [gate; up] of the shard; with tied
    embeddings and pp > 1 the last stage keeps a copy named `output_layer.weight`; a value's or scorer's head has that
    name too and is whole on every tp rank.
    torch: one stage; `layers.i.qkv` is [q; k; v] of the rank's heads, where key/value heads repeat if tp exceeds them.
    vllm: as torch, but for the vocabulary; what of a whole tensor its loader takes on this rank.
    disk: canonical tensors, whole; pp cuts them by stage, dp repeats them.
    The vocabulary is padded to `padded_vocab` rows (vllm: to a multiple of 64), the padding being last.
    """
    return {name: local.size for name, local in _locals(shape, role, layout, rank, engine).items()}


def padded_vocab(shape: ModelShape, tp: int) -> int:
    """Rows of a vocabulary-parallel matrix over tp ranks; logits of rows from `shape.vocab` on mean nothing."""
    return -(-shape.vocab // tp) * tp


def misfit(shape: ModelShape, layout: ModelLayout, engine: str) -> str:
    """Why `layout` cannot hold this model in `engine`, "" if it can."""
    tp, pp = layout.tp, layout.pp
    if engine not in ENGINES:
        return f"engine `{engine}` is none of {', '.join(ENGINES)}"
    if engine in ("torch", "vllm") and pp > 1 or engine == "disk" and tp > 1:
        return f"engine `{engine}` has no {'pipeline' if pp > 1 else 'tensor'} parallelism"
    if shape.layers < pp * layout.chunks:
        return f"pp {pp}{f' in {layout.chunks} chunks' if layout.chunks > 1 else ''} exceeds the {shape.layers} layers"
    for name, size in (("heads", shape.heads), ("ffn", shape.ffn)):
        if size % tp:
            return f"tp {tp} does not divide the model's {name}, {size}"
    if shape.kv_heads % tp and tp % shape.kv_heads:
        return f"tp {tp} neither divides nor is a multiple of the model's key/value heads, {shape.kv_heads}"
    if engine == "vllm" and _vllm_vocab(shape.vocab) % tp:
        return f"tp {tp} does not divide the vocabulary that vLLM pads to {_vllm_vocab(shape.vocab)}"
    if engine == "megatron" and (shape.heads + 2 * shape.kv_heads) * shape.head_dim % tp:
        return f"tp {tp} does not divide the rows of the fused query, key and value matrix"
    return ""


def _vllm_vocab(vocab: int) -> int:
    return -(-vocab // VLLM_ROWS) * VLLM_ROWS


@functools.lru_cache(maxsize=4096)
def _locals(shape: ModelShape, role: str, layout: ModelLayout, rank: int, engine: str) -> dict[str, LocalTensor]:
    at = layout.coordinates(rank)
    layers = [layer for run in layout.layers(shape.layers, at.pp) for layer in run]
    first, last = at.pp == 0, at.pp == layout.pp - 1
    if engine == "disk":
        return _disk(shape, role, layers, first, last)
    forms = {"megatron": _Megatron, "torch": _Torch, "vllm": _VLLM}[engine](_Cutter(tensors(shape, role)), shape, layout.tp, at.tp)
    if first:
        forms.embedding()
    for local, layer in enumerate(layers):
        forms.layer(local, f"model.layers.{layer}.")
    if last:
        forms.end(role, copies_embedding=shape.tied and not first)
    return forms.cut.made


def _disk(shape: ModelShape, role: str, layers: list[int], first: bool, last: bool) -> dict[str, LocalTensor]:
    cut = _Cutter(tensors(shape, role))
    for name in cut.sizes:
        parts = name.split(".")
        here = int(parts[2]) in layers if parts[1] == "layers" else first if name == EMBEDDING else last
        if here:
            cut.whole(name, name)
    return cut.made


class _Cutter:
    """Makes local tensors out of boxes of canonical ones. `sizes`: shapes of the canonical tensors."""

    def __init__(self, sizes: dict[str, tuple[int, ...]]) -> None:
        self.sizes = sizes
        self.made: dict[str, LocalTensor] = {}

    def whole(self, local: str, tensor: str) -> None:
        self.rows(local, [(tensor, 0, self.sizes[tensor][0])])

    def rows(self, local: str, runs: list[tuple[str, int, int]], padded: int = 0) -> None:
        """Stacks runs (tensor, first row, end row), all columns; `padded`: rows of the result if more than these."""
        rest = self.sizes[runs[0][0]][1:]
        zeros, row, found = (0,) * len(rest), 0, []
        for tensor, start, stop in runs:
            if stop > start:
                found.append(Piece(tensor, (start, *zeros), (stop, *rest), local, (row, *zeros)))
            row += stop - start
        self.made[local] = LocalTensor((max(row, padded), *rest), tuple(found))

    def columns(self, local: str, tensor: str, shard: int, shards: int) -> None:
        rows, columns = self.sizes[tensor]
        width = columns // shards
        piece = Piece(tensor, (0, shard * width), (rows, (shard + 1) * width), local, (0, 0))
        self.made[local] = LocalTensor((rows, width), (piece,))

    def vocabulary(self, local: str, tensor: str, shard: int, height: int) -> None:
        """Rows of a vocabulary in shards of `height`, the last of them padded."""
        vocab = self.sizes[tensor][0]
        self.rows(local, [(tensor, min(shard * height, vocab), min((shard + 1) * height, vocab))], padded=height)


@dataclass(frozen=True)
class _Forms:
    """The local tensors of tensor shard `t` of `tp`."""

    cut: _Cutter
    shape: ModelShape
    tp: int
    t: int

    def shard(self, tensor: str) -> tuple[str, int, int]:
        height = self.cut.sizes[tensor][0] // self.tp
        return tensor, self.t * height, (self.t + 1) * height

    def vocabulary(self, local: str, tensor: str) -> None:
        self.cut.vocabulary(local, tensor, self.t, padded_vocab(self.shape, self.tp) // self.tp)

    def qkv_kinds(self) -> tuple[str, ...]:
        return ("weight", "bias") if self.shape.qkv_bias else ("weight",)

    def normed_heads(self) -> str:
        return "qk" if self.shape.qk_norm else ""

    def head(self, local: str, role: str) -> None:
        if role != "policy":
            self.cut.whole(local, SCORE)
        elif not self.shape.tied:
            self.vocabulary(local, HEAD)


class _Megatron(_Forms):
    def embedding(self) -> None:
        self.vocabulary("embedding.word_embeddings.weight", EMBEDDING)

    def layer(self, local: int, layer: str) -> None:
        name = f"decoder.layers.{local}."
        self.cut.whole(name + "input_layernorm.weight", layer + "input_layernorm.weight")
        self.cut.columns(name + "self_attention.linear_proj.weight", layer + "self_attn.o_proj.weight", self.t, self.tp)
        for kind in self.qkv_kinds():
            self.cut.rows(f"{name}self_attention.linear_qkv.{kind}", self.qkv(f"{layer}self_attn.", kind))
        for head in self.normed_heads():
            self.cut.whole(f"{name}self_attention.{head}_layernorm.weight", f"{layer}self_attn.{head}_norm.weight")
        self.cut.whole(name + "pre_mlp_layernorm.weight", layer + "post_attention_layernorm.weight")
        gate_up = [self.shard(f"{layer}mlp.{half}_proj.weight") for half in ("gate", "up")]
        self.cut.rows(name + "mlp.linear_fc1.weight", gate_up)
        self.cut.columns(name + "mlp.linear_fc2.weight", layer + "mlp.down_proj.weight", self.t, self.tp)

    def qkv(self, layer: str, kind: str) -> list[tuple[str, int, int]]:
        """This shard's rows of the matrix in which each group's queries, key and value follow each other."""
        shape, width = self.shape, self.shape.head_dim
        many = shape.queries_per_group * width
        height = (shape.heads + 2 * shape.kv_heads) * width // self.tp
        begin, runs, row = self.t * height, [], 0
        for group in range(shape.kv_heads):
            for head, rows in (("q", many), ("k", width), ("v", width)):
                start, stop = max(begin - row, 0), min(begin + height - row, rows)
                if start < stop:
                    runs.append((f"{layer}{head}_proj.{kind}", group * rows + start, group * rows + stop))
                row += rows
        return runs

    def end(self, role: str, copies_embedding: bool) -> None:
        self.cut.whole("decoder.final_layernorm.weight", FINAL_NORM)
        if role == "policy" and copies_embedding:
            self.vocabulary("output_layer.weight", EMBEDDING)
        self.head("output_layer.weight", role)


class _Torch(_Forms):
    def embedding(self) -> None:
        self.vocabulary("embed.weight", EMBEDDING)

    def layer(self, local: int, layer: str) -> None:
        name = f"layers.{local}."
        self.cut.whole(name + "attention_norm.weight", layer + "input_layernorm.weight")
        for kind in self.qkv_kinds():
            self.cut.rows(f"{name}qkv.{kind}", self.qkv(f"{layer}self_attn.", kind))
        for head in self.normed_heads():
            self.cut.whole(f"{name}{head}_norm.weight", f"{layer}self_attn.{head}_norm.weight")
        self.cut.columns(name + "out.weight", layer + "self_attn.o_proj.weight", self.t, self.tp)
        self.cut.whole(name + "mlp_norm.weight", layer + "post_attention_layernorm.weight")
        gate_up = [self.shard(f"{layer}mlp.{half}_proj.weight") for half in ("gate", "up")]
        self.cut.rows(name + "gate_up.weight", gate_up)
        self.cut.columns(name + "down.weight", layer + "mlp.down_proj.weight", self.t, self.tp)

    def qkv(self, layer: str, kind: str) -> list[tuple[str, int, int]]:
        """Rows of this rank's query heads, then of the key/value heads that they read."""
        shape, width = self.shape, self.shape.head_dim
        first = self.t * shape.kv_heads // self.tp * width
        last = first + max(shape.kv_heads // self.tp, 1) * width
        return [self.shard(f"{layer}q_proj.{kind}"), *((f"{layer}{head}_proj.{kind}", first, last) for head in "kv")]

    def end(self, role: str, copies_embedding: bool) -> None:
        self.cut.whole("norm.weight", FINAL_NORM)
        self.head("head.weight", role)


class _VLLM(_Torch):
    def vocabulary(self, local: str, tensor: str) -> None:
        self.cut.vocabulary(local, tensor, self.t, _vllm_vocab(self.shape.vocab) // self.tp)
