"""Moves of weights by collectives: groups of ranks gather what they hold, and each keeps what it needs.

| strategy | groups | what is gathered |
| --- | --- | --- |
| zero-redundancy | ranks of a training replica with the same generation shard | that shard |
| vanilla | a training replica | the model |
| all-gather | all ranks | the model |

They are HybridFlow's engine, HybridFlow-V and the way of DeepSpeed-Chat (arXiv 2409.19256, section 5.4 and table 2). A
box that several ranks of a group hold is cut by rows, and each gives its run. Zero redundancy gathers only what one
rank of the group holds and the others lack. The rest, norms for the most part, moves point to point, as all does by the
strategy `minimal`: so both receive no more than what is lacking.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import Callable, Iterable, Iterator, NamedTuple, Optional, Sequence

from compiler.layout import ModelLayout
from compiler.resharding.redistribute import Box, Part, Point, WeightTransfer, redistribute, volume, zero_redundancy_bytes
from compiler.weights import Piece, WeightLayout

ZERO_REDUNDANCY, VANILLA, ALL_GATHER, MINIMAL = STRATEGIES = ("zero-redundancy", "vanilla", "all-gather", "minimal")


@dataclass(frozen=True)
class Share:
    """The box [start, stop) of canonical `tensor`, the `number`-th, that a group's rank `member` gives to all of it."""

    member: int
    tensor: str
    number: int
    start: Point
    stop: Point

    @property
    def elements(self) -> int:
        return volume(self.start, self.stop)


@dataclass(frozen=True)
class Gather:
    """`ranks`, ascending, of which each gets the shares of all. given: elements that each gives."""

    ranks: tuple[int, ...]
    shares: tuple[Share, ...]
    given: tuple[int, ...]

    @property
    def elements(self) -> int:
        return sum(self.given)

    def received(self, rank: int) -> int:
        """Elements that `rank` gets of others."""
        return self.elements - self.given[self.ranks.index(rank)]


@dataclass(frozen=True)
class GatheredTransfer(WeightTransfer):
    """A transfer by one of the strategies that gather. Both layouts have the same ranks.

    `moves` and the like say what is left for point to point, local copies among it.
    """

    strategy: str = ZERO_REDUNDANCY

    # ---- groups

    def group(self, rank: int) -> "Group":
        """The ranks that `rank` gathers with, itself among them."""
        return self._groups[rank]

    def gather(self, rank: int) -> Optional[Gather]:
        """The collective that `rank` takes part in, None if nothing of it is gathered."""
        if rank not in self.src.layout:
            return None
        plan = self._plan(rank)
        return Gather(self.group(rank).ranks, plan.shares, plan.given) if plan.shares else None

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """All groups that gather, in the order of their first ranks: the same on every rank."""
        return tuple(dict.fromkeys(self.group(rank).ranks for rank in self.ranks if self._plan(rank).shares))

    @functools.cached_property
    def _groups(self) -> dict[int, "Group"]:
        found: dict[int, Group] = {}
        for ranks in self._sets():
            group = Group(tuple(sorted(ranks)), tuple(self._src_shard(rank) for rank in sorted(ranks)))
            found |= dict.fromkeys(ranks, group)
        return found

    def _sets(self) -> Iterator[Sequence[int]]:
        src = self.src.layout
        replicas = [src.replica(d) for d in range(src.dp)]
        if self.strategy == ALL_GATHER:
            yield src.ranks
        elif self.strategy == VANILLA:
            yield from replicas
        else:
            for replica in replicas:
                alike: dict[int, list[int]] = defaultdict(list)
                for rank in replica:
                    alike[self._dst_shard(rank)].append(rank)
                yield from alike.values()

    def arriving(self, rank: int) -> Iterator[tuple[Share, Piece, Point, Point]]:
        """(share, destination piece that it meets, start and stop of where they meet), share after share."""
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in self.dst.pieces(rank):
            pieces[piece.tensor].append(piece)
        for share in (gather.shares if (gather := self.gather(rank)) else ()):
            for piece in pieces[share.tensor]:
                low, high = tuple(map(max, piece.start, share.start)), tuple(map(min, piece.stop, share.stop))
                if all(a < b for a, b in zip(low, high)):
                    yield share, piece, low, high

    def boxes_to(self, rank: int) -> Iterator[Box]:
        yield from super().boxes_to(rank)
        yield from ((share.tensor, start, stop) for share, _, start, stop in self.arriving(rank))

    def one_of_each_kind(self) -> tuple[int, ...]:
        kinds = {(self._dst_shard(rank), self.group(rank).shards): rank for rank in reversed(self.dst.layout.ranks)}
        return tuple(sorted(kinds.values()))

    def is_gathered(self, part: Part, rank: int) -> bool:
        plan = self._plan(rank)
        return bool(plan.shares) and (plan.boxes is None or (part.tensor, part.start, part.stop) in plan.boxes)

    # ---- bytes

    def bytes_received(self, rank: int) -> int:
        gather = self.gather(rank)
        if gather is None or self.strategy == ZERO_REDUNDANCY:
            return super().bytes_received(rank)
        return gather.received(rank) * self.itemsize

    def bytes_sent(self, rank: int) -> int:
        """What is gathered counts once for each other rank of the group."""
        gather = self.gather(rank)
        if gather is None:
            return super().bytes_sent(rank)
        given = gather.given[gather.ranks.index(rank)] * (len(gather.ranks) - 1)
        return super().bytes_sent(rank) + given * self.itemsize

    def flows(self) -> Iterator[tuple[int, int, int]]:
        """A group is a ring in the order of its ranks: each gets all from the one before it."""
        yield from super().flows()
        for group in self.groups:
            gather = self.gather(group[0])
            for before, rank, given in zip((group[-1], *group), group, gather.given):
                yield before, rank, (gather.elements - given) * self.itemsize

    # ---- shares

    def _plan(self, rank: int) -> "_Plan":
        return self._plans(self.group(rank).shards, self._dst_shard(rank) if self.strategy == ZERO_REDUNDANCY else None)

    @functools.cached_property
    def _plans(self) -> Callable[[tuple[int, ...], Optional[int]], "_Plan"]:
        """By source shards of a group's ranks, and the destination shard that all want: the same in all replicas."""
        return functools.cache(self._plan_of)

    def _plan_of(self, shards: tuple[int, ...], wanted: Optional[int]) -> "_Plan":
        if wanted is None:
            shares = _shared(self.source_boxes(), shards) if len(shards) > 1 else ()
            return _Plan(shares, _given(shares, len(shards)), None)
        held = set(shards)
        boxes = [p for p in self.parts(wanted) if len(held.intersection(p.holders)) == 1 < len(shards)]
        shares = _shared(boxes, shards)
        return _Plan(shares, _given(shares, len(shards)), frozenset((p.tensor, p.start, p.stop) for p in boxes))

    def _kind(self, rank: int) -> tuple:
        return (*super()._kind(rank), self.group(rank).shards)


class Group(NamedTuple):
    """Ranks that gather together, ascending, and the source shard of each."""

    ranks: tuple[int, ...]
    shards: tuple[int, ...]


class _Plan(NamedTuple):
    """What a group gathers. given: elements that each member gives; boxes: what the shares make up, None for all."""

    shares: tuple[Share, ...]
    given: tuple[int, ...]
    boxes: Optional[frozenset]


def _shared(boxes: Iterable[Part], shards: Sequence[int]) -> tuple[Share, ...]:
    """Each box cut by rows over the members that hold it, tensor after tensor."""
    members: dict[int, list[int]] = defaultdict(list)
    for member, shard in enumerate(shards):
        members[shard].append(member)
    return tuple(share for box in boxes for share in _cut(box, [m for s in box.holders for m in members[s]]))


def _given(shares: Iterable[Share], members: int) -> tuple[int, ...]:
    found = [0] * members
    for share in shares:
        found[share.member] += share.elements
    return tuple(found)


def _cut(box: Part, holders: Sequence[int]) -> Iterator[Share]:
    first, rows, rest = box.start[0], box.stop[0] - box.start[0], (box.start[1:], box.stop[1:])
    for i, member in enumerate(holders):
        low, high = first + i * rows // len(holders), first + (i + 1) * rows // len(holders)
        if low < high:
            yield Share(member, box.tensor, box.number, (low, *rest[0]), (high, *rest[1]))


def transfer_by(strategy: str, src: WeightLayout, dst: WeightLayout, itemsize: int = 4) -> WeightTransfer:
    """Raises ValueError for unknown strategies, layouts of different models, and layouts of different ranks."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy `{strategy}` is none of {', '.join(STRATEGIES)}")
    minimal = redistribute(src, dst, itemsize)
    if strategy == MINIMAL:
        return minimal
    if set(dst.layout.ranks) != set(src.layout.ranks):
        raise ValueError(f"strategy `{strategy}` gathers among the ranks of both layouts, which are not the same")
    return GatheredTransfer(src, dst, itemsize, strategy)


def gathered_bytes(strategy: str, train: ModelLayout, tp: int, model_bytes: int) -> float:
    """Bytes that each rank receives for tensors cut evenly over tp and pp, in HybridFlow's table 2 (arXiv 2409.19256).

    M = `model_bytes`, t p ranks in a training replica, d of them, generation over `tp` = t_g:
    all-gather (t p d - 1) / (t p d) M; vanilla (t p - 1) / (t p) M; zero-redundancy (t p - t_g) / (t_g t p) M, where
    t_g divides t.
    """
    shards, everyone = train.tp * train.pp, len(train.ranks)
    if strategy == ALL_GATHER:
        return (everyone - 1) / everyone * model_bytes
    if strategy == VANILLA:
        return (shards - 1) / shards * model_bytes
    return zero_redundancy_bytes(train, tp, model_bytes)
