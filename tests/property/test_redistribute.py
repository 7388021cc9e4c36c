"""Moving weights between any two layouts, carried out on arrays: everything arrives, once, at the fewest bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_cases import box, local_arrays, model_layouts, numbered, shapes

from compiler.layout import ModelLayout, generation_layout, vanilla_generation_layout
from compiler.proof.arrival import arrival_faults
from compiler.resharding.redistribute import WeightTransfer, redistribute, zero_redundancy_bytes
from compiler.shapes import ModelShape
from compiler.weights import WeightLayout, misfit

SHAPE = ModelShape("llama", hidden=8, layers=4, heads=8, kv_heads=4, head_dim=2, ffn=16, vocab=16)


def _region(weights: WeightLayout, rank: int, move) -> tuple[str, tuple[slice, ...]]:
    for piece in weights.pieces(rank):
        below = all(a <= b for a, b in zip(piece.start, move.start))
        if piece.tensor == move.tensor and below and all(a >= b for a, b in zip(piece.stop, move.stop)):
            start = [o + m - p for o, m, p in zip(piece.offset, move.start, piece.start)]
            return piece.local, box(start, [a + m - n for a, m, n in zip(start, move.stop, move.start)])
    raise AssertionError(f"rank {rank} does not hold {move}")


def _carry_out(transfer: WeightTransfer) -> None:
    """Follows the moves on numbered weights and compares what every destination rank then holds."""
    src, dst = transfer.src, transfer.dst
    whole = numbered(src)
    source = {rank: local_arrays(src, rank, whole) for rank in src.layout.ranks}
    made = {r: {n: np.full(size, -1) for n, size in dst.local_tensors(r).items()} for r in dst.layout.ranks}
    for move in transfer.moves:
        here, taken = _region(src, move.src_rank, move)
        there, put = _region(dst, move.dst_rank, move)
        assert (made[move.dst_rank][there][put] == -1).all(), "an element arrives twice"
        made[move.dst_rank][there][put] = source[move.src_rank][here][taken]
    for rank in dst.layout.ranks:
        for name, array in local_arrays(dst, rank, whole).items():
            np.testing.assert_array_equal(made[rank][name], array, err_msg=f"rank {rank}, {name}")


def _elements(weights: WeightLayout, rank: int, whole: dict[str, np.ndarray]) -> set[int]:
    held = local_arrays(weights, rank, whole) if rank in weights.layout else {}
    return {int(x) for array in held.values() for x in array.ravel()} - {-1}


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_any_layout_to_any_other(data):
    shape, role = data.draw(shapes()), data.draw(st.sampled_from(["policy", "value"]))
    engines = [data.draw(st.sampled_from(["megatron", "torch", "vllm", "disk"])) for _ in range(2)]
    src, dst = (WeightLayout(shape, role, data.draw(model_layouts(shape, engine)), engine) for engine in engines)
    transfer = redistribute(src, dst, itemsize=2)
    _carry_out(transfer)
    whole = numbered(src)
    for rank in transfer.ranks:
        before, after = _elements(src, rank, whole), _elements(dst, rank, whole)
        assert transfer.bytes_received(rank) == 2 * len(after - before)
        assert transfer.redundant_bytes(rank) == 2 * len(before - after)
        assert transfer.peak_bytes(rank) == 2 * len(before | after)
    assert transfer.total_bytes == transfer.lower_bound_bytes == sum(map(transfer.bytes_sent, transfer.ranks))
    assert redistribute(src, dst, itemsize=2).moves == transfer.moves


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_training_to_generation_has_no_redundancy(data):
    """Where degrees and sizes divide, each training shard is part of its rank's generation shard."""
    shape = replace(data.draw(shapes()), vocab=24)
    train = data.draw(model_layouts(shape, "megatron"))
    degrees = [n for n in range(1, train.tp + 1) if train.tp % n == 0 and shape.kv_heads % n == 0]
    generate = generation_layout(train, data.draw(st.sampled_from(degrees)))
    src, dst = WeightLayout(shape, "policy", train, "megatron"), WeightLayout(shape, "policy", generate, "torch")
    transfer = redistribute(src, dst)
    for rank in train.ranks:
        assert transfer.redundant_bytes(rank) == 0
        for move in transfer.moves:
            assert train.coordinates(move.src_rank).dp == train.coordinates(move.dst_rank).dp


@pytest.mark.parametrize("tp, pp, dp", [(1, 1, 2), (2, 1, 1), (4, 1, 2), (2, 2, 2), (4, 2, 1), (4, 4, 1), (1, 4, 2)])
def test_bytes_are_those_of_the_formula(tp, pp, dp):
    """(d_g - 1) / (t p) M over the layers' matrices, which tp and pp cut evenly."""
    train = ModelLayout(tuple(range(tp * pp * dp)), tp, pp, dp)
    src = WeightLayout(SHAPE, "policy", train, "megatron")
    matrices = [name for name, size in src.tensors.items() if ".layers." in name and len(size) == 2]
    model_bytes = 4 * sum(math.prod(src.tensors[name]) for name in matrices)
    for degree in (n for n in (1, 2, 4) if tp % n == 0):
        dst = WeightLayout(SHAPE, "policy", generation_layout(train, degree), "torch")
        transfer = redistribute(src, dst)
        for rank in train.ranks:
            got = sum(
                4 * move.elements for move in transfer.moves
                if move.dst_rank == rank and not move.is_local and move.tensor in matrices
            )
            assert got == zero_redundancy_bytes(train, degree, model_bytes)


def test_vanilla_grouping_moves_more_and_keeps_both():
    train = ModelLayout(tuple(range(8)), tp=4, pp=1, dp=2)
    src = WeightLayout(SHAPE, "policy", train, "megatron")
    plans = [
        redistribute(src, WeightLayout(SHAPE, "policy", group(train, 2), "torch"))
        for group in (generation_layout, vanilla_generation_layout)
    ]
    assert plans[0].total_bytes < plans[1].total_bytes
    assert max(map(plans[0].redundant_bytes, train.ranks)) == 0 < max(map(plans[1].redundant_bytes, train.ranks))
    for plan in plans:
        _carry_out(plan)


def test_equal_layouts_move_nothing():
    layout = WeightLayout(SHAPE, "policy", ModelLayout(tuple(range(4)), tp=2, dp=2), "megatron")
    assert redistribute(layout, layout).total_bytes == 0


def test_holders_share_the_load():
    """Four replicas feed four ranks outside the layout: each sends one fourth, to within the largest tensor."""
    src = WeightLayout(SHAPE, "policy", ModelLayout((0, 1, 2, 3), dp=4), "torch")
    dst = WeightLayout(SHAPE, "policy", ModelLayout((4, 5, 6, 7), dp=4), "torch")
    transfer = redistribute(src, dst, itemsize=1)
    sent = [transfer.bytes_sent(rank) for rank in range(4)]
    assert sum(sent) == transfer.total_bytes
    assert max(sent) - min(sent) <= max(math.prod(size) for size in src.tensors.values())


def test_different_models_do_not_mix():
    layout = ModelLayout((0,))
    with pytest.raises(ValueError, match="different models"):
        redistribute(WeightLayout(SHAPE, "policy", layout, "disk"), WeightLayout(SHAPE, "value", layout, "disk"))


def test_a_large_model_plans_quickly():
    """70 B over 64 ranks: the plan is made of the layers' pieces, not of elements."""
    shape = ModelShape("llama", hidden=8192, layers=80, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=128256)
    train = ModelLayout(tuple(range(64)), tp=8, pp=4, dp=2)
    generate = generation_layout(train, 4)
    assert not misfit(shape, train, "megatron") and not misfit(shape, generate, "torch")
    src, dst = WeightLayout(shape, "policy", train, "megatron"), WeightLayout(shape, "policy", generate, "torch")
    transfer = redistribute(src, dst, itemsize=2)
    assert transfer.total_bytes == transfer.lower_bound_bytes
    assert max(map(transfer.redundant_bytes, train.ranks)) == 0


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_told_by_shards_is_what_all_moves_add_up_to(data):
    """Numbers that replicas share, and moves found from either end, against the list of all moves."""
    shape = data.draw(shapes())
    engines = [data.draw(st.sampled_from(["megatron", "torch", "vllm", "disk"])) for _ in range(2)]
    src, dst = (WeightLayout(shape, "policy", data.draw(model_layouts(shape, engine)), engine) for engine in engines)
    transfer = redistribute(src, dst, itemsize=1)
    for rank in transfer.ranks:
        given_away = [m for m in transfer.moves if m.src_rank == rank]
        taken = [m for m in transfer.moves if m.dst_rank == rank]
        assert sorted(transfer.moves_from(rank), key=str) == sorted(given_away, key=str)
        assert sorted(transfer.moves_to(rank), key=str) == sorted(taken, key=str)
        assert transfer.bytes_sent(rank) == sum(m.elements for m in given_away if not m.is_local)
        assert transfer.bytes_received(rank) == sum(m.elements for m in taken if not m.is_local)


def test_a_thousand_ranks_look_at_no_more_shards_than_a_replica(monkeypatch):
    """70 B over 1,024 ranks: what compiling asks for is worked out for the 64 shards of one replica."""
    shape = ModelShape("llama", hidden=8192, layers=80, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=32000)
    looked_at = []
    held = WeightLayout.pieces
    monkeypatch.setattr(WeightLayout, "pieces", lambda self, rank: looked_at.append(rank) or held(self, rank))
    train = ModelLayout(tuple(range(1024)), tp=8, pp=8, dp=16)
    dst = WeightLayout(shape, "policy", generation_layout(train, 8), "torch")
    transfer = redistribute(WeightLayout(shape, "policy", train, "megatron"), dst, itemsize=2)
    assert transfer.total_bytes > 0 == max(map(transfer.redundant_bytes, train.ranks))
    assert list(arrival_faults(transfer)) == []
    assert len(looked_at) <= 3 * (64 + 8)
