"""HybridFlow's transfer protocols (arXiv 2409.19256, table 3) as what they are: pairs of layouts.

What a call takes lies in a layout, and what it makes: some axes cut it over the ranks, over the others it is repeated.
Which ranks get the same, and which ranks give something that no other gives, is all that a protocol says.
"""

from __future__ import annotations

from typing import Mapping, NamedTuple, Sequence

from compiler.layout import ModelLayout, generation_layout

AXES = ("pp", "dp", "tp")
Ranks = tuple[int, ...]


class Cut(NamedTuple):
    """Ranks that hold the same part of a value, part after part. The first of each set gives it."""

    parts: tuple[Ranks, ...]

    @property
    def givers(self) -> Ranks:
        return tuple(part[0] for part in self.parts)


def cut(layout: ModelLayout, axes: Sequence[str], stage: int | None = None) -> Cut:
    """A value that `axes` cut over `layout`; stage: it exists on that pipeline stage alone."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in layout.ranks:
        at = layout.coordinates(rank)
        if stage is None or at.pp == stage:
            found.setdefault(tuple(getattr(at, axis) for axis in axes), []).append(rank)
    return Cut(tuple(tuple(found[key]) for key in sorted(found)))


def protocol(layout: ModelLayout, takes: Cut, gives: Cut, within: ModelLayout | None = None) -> str:
    """The name of HybridFlow's protocol for a call on `layout`, "" if it has none.

    within: the training layout whose ranks a generation layout takes
    """
    everyone, alone = len(layout.ranks), all(len(part) == 1 for part in takes.parts)
    if len(takes.parts) == 1 < everyone:
        by_stage = gives == cut(layout, ("pp",)) and layout.pp > 1
        return "3D_PP_ONLY" if by_stage else "ONE_TO_ALL" if len(gives.parts) == everyone else ""
    if alone and len(gives.parts) == everyone:
        return "DP_PROTO" if layout.dp == everyone else "ALL_TO_ALL"
    if takes.parts != cut(layout, ("dp",)).parts or gives != cut(layout, ("dp",), layout.pp - 1):
        return ""
    return "3D_ALL_MICRO_DP" if within is not None and layout.dp > within.dp else "3D_PROTO"


def examples() -> Mapping[str, tuple[ModelLayout, Cut, Cut, ModelLayout | None, str, str]]:
    """By protocol: layout, what it takes and gives, the training layout around it; how it distributes and collects."""
    train = ModelLayout(tuple(range(8)), tp=2, pp=2, dp=2)
    pairs = generation_layout(train, 2)
    data = ModelLayout(tuple(range(8)), dp=8)
    rows, own = ("dp",), AXES
    return {
        "ONE_TO_ALL": (train, cut(train, ()), cut(train, own), None, "everything to every rank", "from every rank"),
        "3D_PROTO": (train, cut(train, rows), cut(train, rows, 1), None,
                     "rows over dp, each to all ranks of a replica",
                     "from the last stage, tensor shard 0, of each replica"),
        "3D_ALL_MICRO_DP": (pairs, cut(pairs, rows), cut(pairs, rows, 0), train,
                            "rows over the generation replicas, each to all of its ranks",
                            "from the first rank of each generation replica"),
        "3D_PP_ONLY": (train, cut(train, ()), cut(train, ("pp",)), None,
                       "everything to every rank", "from one rank of each stage"),
        "DP_PROTO": (data, cut(data, rows), cut(data, rows), None, "rows over all ranks", "from every rank"),
        "ALL_TO_ALL": (train, cut(train, own), cut(train, own), None, "each rank its own", "from every rank"),
    }
