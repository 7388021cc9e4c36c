"""Layouts of a model over ranks: how tensor, pipeline and data parallelism cut them, for training and generation.

Axes: tp cuts tensors, pp cuts the stack of layers into stages, dp repeats the model over shards of the batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Mapping


@dataclass(frozen=True)
class Coordinates:
    """The place of a rank on each axis."""

    tp: int
    pp: int
    dp: int


@dataclass(frozen=True)
class ModelLayout:
    """tp * pp * dp ranks; the one at (d, p, t) is `ranks[t + tp * (d + dp * p)]`, Megatron's order tp-dp-pp.

    `ranks` are global ranks in any order, without repeats; the order says who holds what.
    chunks: how many runs of layers a stage has; they are dealt to the stages in turn (arXiv 2104.04473, section 2.2)
    Raises ValueError when the degrees and the number of ranks disagree, or chunks have no pipeline.
    """

    ranks: tuple[int, ...]
    tp: int = 1
    pp: int = 1
    dp: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp) < 1 or self.tp * self.pp * self.dp != len(self.ranks):
            raise ValueError(f"tp {self.tp}, pp {self.pp}, dp {self.dp} do not make {len(self.ranks)} ranks")
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError("a rank stands twice in a layout")
        if self.chunks < 1 or self.chunks > 1 and self.pp == 1:
            raise ValueError(f"chunks {self.chunks} of a pipeline of {self.pp}")

    def __contains__(self, rank: int) -> bool:
        return rank in self._places

    def rank(self, d: int, p: int, t: int) -> int:
        """The rank at data shard d, pipeline stage p, tensor shard t."""
        return self.ranks[t + self.tp * (d + self.dp * p)]

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands; KeyError if it is not in the layout."""
        place = self._places[rank]
        return Coordinates(place % self.tp, place // (self.tp * self.dp), place // self.tp % self.dp)

    def tp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that share one pipeline stage of one replica, in order of t."""
        return tuple(tuple(self.rank(d, p, t) for t in range(self.tp)) for p in range(self.pp) for d in range(self.dp))

    def pp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that form a pipeline, first stage first."""
        return tuple(tuple(self.rank(d, p, t) for p in range(self.pp)) for d in range(self.dp) for t in range(self.tp))

    def dp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the same weights, in order of d."""
        return tuple(tuple(self.rank(d, p, t) for d in range(self.dp)) for p in range(self.pp) for t in range(self.tp))

    def replica(self, d: int) -> tuple[int, ...]:
        """The ranks that together hold the weights once and compute data shard d."""
        return tuple(self.rank(d, p, t) for p in range(self.pp) for t in range(self.tp))

    def layers(self, count: int, p: int) -> tuple[range, ...]:
        """Which of `count` layers stage p has, by chunk."""
        runs = stage_layers(count, self.pp * self.chunks)
        return tuple(range(*runs[p + self.pp * chunk]) for chunk in range(self.chunks))

    def outputs(self) -> tuple[int, ...]:
        """By data shard, the rank from which results leave: last stage, t = 0."""
        return tuple(self.rank(d, self.pp - 1, 0) for d in range(self.dp))

    @functools.cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    def to_json(self) -> dict[str, Any]:
        return {"ranks": list(self.ranks), "tp": self.tp, "pp": self.pp, "dp": self.dp, "chunks": self.chunks}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "ModelLayout":
        return ModelLayout(tuple(value["ranks"]), value["tp"], value["pp"], value["dp"], value["chunks"])


def stage_layers(layers: int, pp: int) -> tuple[tuple[int, int], ...]:
    """By stage of `pp`, the half-open range of its layers; where pp does not divide, the first stages have one more.

    Megatron-core 0.16.1 takes such a split as `pipeline_model_parallel_layout` (see `megatron_stages`); its other
    options, `num_layers_in_first_pipeline_stage` and `..._last_...`, cannot express it for every depth.
    """
    base, extra = divmod(layers, pp)
    starts = [p * base + min(p, extra) for p in range(pp + 1)]
    return tuple(zip(starts, starts[1:]))


def megatron_stages(layers: int, pp: int) -> list[list[str]] | None:
    """Megatron's `pipeline_model_parallel_layout` for `stage_layers`, or None where pp divides the layers."""
    if layers % pp == 0:
        return None
    stages = [["decoder"] * (stop - start) for start, stop in stage_layers(layers, pp)]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


def generation_layout(train: ModelLayout, tp: int) -> ModelLayout:
    """The training ranks as replicas of `tp` ranks for generation, weights kept in place where degrees allow.

    HybridFlow's grouping (arXiv 2409.19256, section 5.3) with one pipeline stage: a replica takes ranks of all tensor
    coordinates of training at equal intervals, and where it takes several of one coordinate, those are neighbours, so
    that a replica lies in a node if training's tensor groups do. If `tp` divides train.tp (and the vocabulary and
    key/value heads), every training shard is part of its rank's generation shard: no redundancy. If train.tp divides
    `tp`, each rank keeps what it can, train.tp / tp of it.
    Replicas are numbered by their lowest place in `train.ranks`, so that rows of a batch stay near.
    Raises ValueError unless `tp` divides the number of ranks.
    """
    world = len(train.ranks)
    if tp < 1 or world % tp:
        raise ValueError(f"generation over tp {tp} does not divide {world} ranks")
    by_shard = [train.rank(d, p, t) for t in range(train.tp) for p in range(train.pp) for d in range(train.dp)]
    near = tp // train.tp if tp % train.tp == 0 else 1  # ranks of one coordinate in a replica
    count, apart = world // tp, world // tp * near
    place = {rank: i for i, rank in enumerate(train.ranks)}
    replicas = [tuple(by_shard[i * near + g % near + g // near * apart] for g in range(tp)) for i in range(count)]
    replicas.sort(key=lambda ranks: min(place[r] for r in ranks))
    return ModelLayout(tuple(r for ranks in replicas for r in ranks), tp, 1, count)


def in_rank_order(layout: ModelLayout) -> ModelLayout:
    """The same replicas, the shards of each in the order of its ranks: for engines that know no other (pp = 1)."""
    replicas = (sorted(layout.replica(d)) for d in range(layout.dp))
    return ModelLayout(tuple(rank for ranks in replicas for rank in ranks), layout.tp, 1, layout.dp)


def vanilla_generation_layout(train: ModelLayout, tp: int) -> ModelLayout:
    """The comparison: replicas are runs of `tp` consecutive ranks, whatever these hold in training."""
    if tp < 1 or len(train.ranks) % tp:
        raise ValueError(f"generation over tp {tp} does not divide {len(train.ranks)} ranks")
    return ModelLayout(train.ranks, tp, 1, len(train.ranks) // tp)
