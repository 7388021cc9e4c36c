"""Strategies over thousands of random models and layouts: all arrives once, at the formulas' bytes, in bounded rounds."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import Iterator, NamedTuple

import pytest

from compiler.layout import ModelLayout
from compiler.proof.arrival import faults_at
from compiler.resharding.gathers import (
    ALL_GATHER, MINIMAL, STRATEGIES, VANILLA, ZERO_REDUNDANCY, gathered_bytes, transfer_by,
)
from compiler.resharding.redistribute import WeightTransfer, volume
from compiler.resharding.rounds import AllGather, Broadcast, Copy, Exchange, rounds
from compiler.resharding.transitions import ORDERS
from compiler.shapes import ModelShape
from compiler.weights import WeightLayout, misfit

BATCHES, EACH = 24, 45  # of cases: each is planned by all strategies, and once between unlike sets of ranks
ENGINES = ("megatron", "torch", "disk")


class Case(NamedTuple):
    shape: ModelShape
    train: ModelLayout
    tp: int  # of generation

    def transfer(self, strategy: str, itemsize: int = 1) -> WeightTransfer:
        generate = ORDERS[strategy](self.train, self.tp)
        src = WeightLayout(self.shape, "policy", self.train, "megatron")
        return transfer_by(strategy, src, WeightLayout(self.shape, "policy", generate, "torch"), itemsize)

    @property
    def nests(self) -> bool:
        """Whether a generation shard can be made up of whole training shards."""
        tp, train, vocab = self.tp, self.train.tp, self.shape.vocab
        heights = -(-vocab // train) * (train // tp) == -(-vocab // tp)
        return train % tp == 0 and self.shape.kv_heads % tp == 0 and heights

    @property
    def is_even(self) -> bool:
        """Whether the formulas hold for the matrices of the layers."""
        divides = self.train.tp % self.tp == 0 and self.shape.kv_heads % self.tp == 0
        return divides and self.shape.layers % self.train.pp == 0


def any_shape(rng: random.Random) -> ModelShape:
    """Grouped queries, fused matrices, biases, norms of heads, tying, depth and vocabulary that divide, or not."""
    kv_heads = rng.choice((1, 2, 3, 4))
    return ModelShape(
        "qwen2", hidden=rng.randint(1, 4), layers=rng.randint(1, 3), heads=kv_heads * rng.choice((1, 2, 4)),
        kv_heads=kv_heads, head_dim=rng.choice((1, 2, 4)), ffn=rng.choice((4, 8, 12)), vocab=rng.randint(1, 17),
        tied=rng.random() < 0.5, qkv_bias=rng.random() < 0.5, qk_norm=rng.random() < 0.3,
    )


def any_layout(rng: random.Random, shape: ModelShape, engine: str) -> ModelLayout:
    """Over ranks in random order out of 0 .. 11."""
    fits = [
        (tp, pp, dp) for tp in (1, 2, 3, 4) for pp in (1, 2, 3, 4) for dp in (1, 2, 3)
        if tp * pp * dp <= 12 and not misfit(shape, ModelLayout(tuple(range(tp * pp)), tp, pp), engine)
    ]
    tp, pp, dp = rng.choice(fits)
    return ModelLayout(tuple(rng.sample(range(12), tp * pp * dp)), tp, pp, dp)


def any_case(rng: random.Random) -> Case:
    shape = any_shape(rng)
    train = any_layout(rng, shape, "megatron")
    world = len(train.ranks)
    degrees = [tp for tp in (1, 2, 3, 4, 6, 8) if world % tp == 0
               and not misfit(shape, ModelLayout(tuple(range(tp)), tp), "torch")]
    return Case(shape, train, rng.choice(degrees))


def lacking(transfer: WeightTransfer, rank: int) -> int:
    """Elements of the destination shard that the source shard has not, counted box by box."""
    here = transfer.src.pieces(rank)
    common = sum(
        _meet(a.start, a.stop, b.start, b.stop) for a in transfer.dst.pieces(rank) for b in here if a.tensor == b.tensor
    )
    return sum(piece.elements for piece in transfer.dst.pieces(rank)) - common


def _meet(start, stop, other_start, other_stop) -> int:
    sides = [min(b, d) - max(a, c) for a, b, c, d in zip(start, stop, other_start, other_stop)]
    return math.prod(sides) if min(sides) > 0 else 0


def received(transfer: WeightTransfer, rank: int, tensors=None) -> int:
    """Elements that come to a rank from others, by the lists of moves and shares."""
    boxes = [move for move in transfer.moves_to(rank) if not move.is_local]
    gather = transfer.gather(rank)
    if gather is not None:
        boxes += [share for share in gather.shares if gather.ranks[share.member] != rank]
    return sum(box.elements for box in boxes if tensors is None or box.tensor in tensors)


def check(transfer: WeightTransfer) -> None:
    """What holds of every transfer whatever."""
    for rank in transfer.dst.layout.ranks:
        assert list(faults_at(transfer.dst.pieces(rank), transfer.boxes_to(rank))) == []
    total = 0
    for rank in transfer.ranks:
        assert transfer.bytes_received(rank) == received(transfer, rank) >= lacking(transfer, rank)
        total += transfer.bytes_received(rank)
    least = sum(lacking(transfer, rank) for rank in transfer.dst.layout.ranks)
    assert transfer.lower_bound_bytes == least <= transfer.total_bytes == total
    assert sum(map(transfer.bytes_sent, transfer.ranks)) == total
    assert sum(transfer.bytes_crossing(3)) == total


def check_strategies(case: Case) -> None:
    plans = {strategy: case.transfer(strategy) for strategy in STRATEGIES}
    for plan in plans.values():
        check(plan)
    for strategy in (ZERO_REDUNDANCY, MINIMAL):
        assert plans[strategy].total_bytes == plans[strategy].lower_bound_bytes
    if case.nests:
        plan = plans[ZERO_REDUNDANCY]
        assert not any(map(plan.redundant_bytes, case.train.ranks))
        for rank in case.train.ranks:
            assert plan.peak_bytes(rank) == sum(piece.elements for piece in plan.dst.pieces(rank))
    if case.is_even:
        _check_formulas(plans, case)


def _check_formulas(plans: dict[str, WeightTransfer], case: Case) -> None:
    """HybridFlow's table 2, for the matrices of the layers, summed over all ranks."""
    sizes = plans[MINIMAL].src.tensors
    matrices = {name for name, size in sizes.items() if ".layers." in name and len(size) == 2}
    whole = sum(math.prod(sizes[name]) for name in matrices)
    for strategy, plan in plans.items():
        got = sum(received(plan, rank, matrices) for rank in case.train.ranks)
        if strategy == VANILLA and len(case.train.replica(0)) == 1:
            assert got == 0
            continue
        expected = len(case.train.ranks) * gathered_bytes(strategy, case.train, case.tp, whole)
        assert got == pytest.approx(expected, rel=1e-12), (strategy, case)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_all_arrives_once_at_the_bytes_of_the_formulas(batch):
    """BATCHES * EACH cases, of which each is five layouts' moves: 5,400 in all."""
    rng = random.Random(batch)
    for _ in range(EACH):
        check_strategies(any_case(rng))
        check(_between_sets(rng))


def _between_sets(rng: random.Random) -> WeightTransfer:
    """Any layout to any other: of other ranks, of the same, of some of them."""
    shape = any_shape(rng)
    ends = []
    for _ in range(2):
        engine = rng.choice(ENGINES)
        ends.append(WeightLayout(shape, "policy", any_layout(rng, shape, engine), engine))
    return transfer_by(MINIMAL, *ends, itemsize=1)


@pytest.mark.parametrize("batch", range(8))
def test_rounds_are_bounded_and_meet(batch):
    """Every rank's rounds, put together: buffers within the bound, and each send meets its receive."""
    rng = random.Random(1000 + batch)
    for _ in range(40):
        transfer = rng.choice([lambda: any_case(rng).transfer(rng.choice(STRATEGIES)), lambda: _between_sets(rng)])()
        limit = rng.choice((1, 7, 40, 1000))
        by_rank = {rank: list(rounds(transfer, rank, limit)) for rank in transfer.ranks}
        _check_exchanges(by_rank, limit)
        _check_gathers(by_rank, limit)
        for rank, steps in by_rank.items():
            assert list(faults_at(transfer.dst.pieces(rank), _cut_to(transfer, rank, steps))) == []


def _check_exchanges(by_rank: dict, limit: int) -> None:
    exchanges = {rank: [s for s in steps if isinstance(s, Exchange)] for rank, steps in by_rank.items()}
    assert len({len(steps) for steps in exchanges.values()}) == 1
    for one in zip(*exchanges.values()):
        sent, arriving = [m for step in one for m in step.sent], [m for step in one for m in step.received]
        assert sorted(sent, key=str) == sorted(arriving, key=str)
        for step in one:
            assert all(_fits(moves, limit) for moves in (step.sent, step.received))


def _fits(boxes, limit: int) -> bool:
    """Within the bound, or nothing left to cut."""
    return sum(b.elements for b in boxes) <= limit or all(b.stop[0] - b.start[0] == 1 for b in boxes)


def _check_gathers(by_rank: dict, limit: int) -> None:
    """Members of a group walk the same list; what is gathered is even."""
    lists = defaultdict(list)
    for rank, steps in by_rank.items():
        gathers = [s for s in steps if isinstance(s, (AllGather, Broadcast))]
        if gathers:
            lists[gathers[0].ranks].append((rank, gathers))
    for ranks, members in lists.items():
        assert sorted(rank for rank, _ in members) == list(ranks)
        assert all(steps == members[0][1] for _, steps in members)
        for step in members[0][1]:
            if isinstance(step, AllGather):
                assert len({sum(s.elements for s in shares) for shares in step.shares}) == 1
                assert _fits([s for shares in step.shares[1:] for s in shares], limit)
            else:
                assert _fits(step.shares, limit)


def _cut_to(transfer: WeightTransfer, rank: int, steps) -> Iterator:
    """All boxes that rounds bring to a rank, as far as it wants them."""
    for step in steps:
        if isinstance(step, Copy):
            boxes = step.moves
        elif isinstance(step, Exchange):
            boxes = step.received
        else:
            boxes = [s for shares in step.shares for s in shares] if isinstance(step, AllGather) else step.shares
        for box in boxes:
            for piece in transfer.dst.pieces(rank):
                low, high = tuple(map(max, piece.start, box.start)), tuple(map(min, piece.stop, box.stop))
                if piece.tensor == box.tensor and all(a < b for a, b in zip(low, high)):
                    yield box.tensor, low, high


def test_an_unknown_strategy_and_unlike_ranks_are_refused():
    shape = any_shape(random.Random(1))
    one, other = (WeightLayout(shape, "policy", ModelLayout(ranks), "disk") for ranks in ((0,), (1,)))
    with pytest.raises(ValueError, match="strategy `broadcast` is none of zero-redundancy, vanilla"):
        transfer_by("broadcast", one, other)
    with pytest.raises(ValueError, match="not the same"):
        transfer_by(ALL_GATHER, one, other)
    assert transfer_by(MINIMAL, one, other).total_bytes == 4 * sum(map(math.prod, one.tensors.values()))


def test_volume_of_a_box():
    assert volume((0, 1), (2, 4)) == 6
