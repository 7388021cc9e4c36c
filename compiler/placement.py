"""Where models run without a search: as `plan:` says, and data parallel over the ranks at hand where it is silent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable, Mapping, Optional, Sequence

from compiler.cluster import Cluster, default_ranks
from compiler.constraints import DEGREES, GENERATE, ModelSet, Stage, asked_of_stages, asked_sets
from compiler.execution import executed
from compiler.layout import ModelLayout
from compiler.plan import Alternative, GroupSpec, LayoutSpec, SearchSpec
from compiler.resharding.gathers import MINIMAL
from compiler.resharding.transitions import engine_of
from compiler.shapes import ModelShape
from compiler.weights import misfit
from rlhf_dsl.diagnostics import DiagnosticError, fault, listing
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Checked

SAMPLES = 64  # in a micro-batch, where no constraint says


@dataclass(frozen=True)
class Batching:
    """Samples and tokens that a micro-batch may hold at most; 0: no limit. recompute: as in `steps.TrainStep`."""

    micro_batch: int = SAMPLES
    tokens: int = 0
    recompute: bool = False


@dataclass(frozen=True)
class Placement:
    """layouts: by name, `actor.train`; batching: by the same names; offload: the models of `ModelSpec.offload`."""

    world: int
    layouts: dict[str, LayoutSpec]
    batching: dict[str, Batching]
    groups: tuple[GroupSpec, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    offload: frozenset[str] = frozenset()
    search: Optional[SearchSpec] = None


def place(checked: Checked, shapes: Mapping[str, ModelShape], cluster: Cluster, ranks: Optional[int]) -> Placement:
    """Layouts of all models on `ranks` ranks, or on a number that the constraints allow. Raises DiagnosticError P01.

    Sets of models with `devices(n)` get n ranks for themselves, in order of declaration. The models of all other sets
    share the ranks that are left. With `lag = 1` sampling may have ranks for itself, too, as a group of its own.
    """
    source = Source(checked.path, checked.text)
    stages, sets = asked_of_stages(checked), asked_sets(checked)
    world = _world(checked, stages, sets, cluster, ranks)
    if not cluster.is_local and world > cluster.devices:
        raise fault("P0106", ranks=world, devices=cluster.devices)
    groups = _groups(checked, sets, stages, world)
    layouts: dict[str, LayoutSpec] = {}
    for stage in stages:
        name = stage.target if any(stage.target in g.samplers for g in groups) else stage.model
        group = next(g for g in groups if name in g.members)
        own = any(name in s.models and s.devices for s in sets)
        layouts[stage.target] = _layout(stage, stages, group, own, source)
        _check_fit(stage, shapes[stage.model], layouts[stage.target], source)
    return Placement(world, layouts, {s.target: _batching(s) for s in stages}, groups)


# ---- ranks ---------------------------------------------------------------------------------------

def _world(checked: Checked, stages: Iterable[Stage], sets: Iterable[ModelSet], cluster: Cluster,
           ranks: Optional[int]) -> int:
    """The asked number, else what sets have for themselves, and what the others fix or need near the default."""
    if ranks is not None:
        if ranks < 1:
            raise fault("P0109", ranks=ranks)
        return ranks
    own, sharing = _own_ranks(sets), _sharing(stages, sets)
    if not sharing:
        return own or 1
    fixed = [_fixed(s) for s in sharing if _fixed(s)]
    if fixed:
        return own + fixed[0]
    roots = [d.size for d in checked.dims.values() if d.root]
    default, step = default_ranks(cluster, min(roots, default=1)), _step(sharing)
    return own + max((default - own) // step, 1) * step


def _own_ranks(sets: Iterable[ModelSet]) -> int:
    return sum(s.devices for s in sets)


def _sharing(stages: Iterable[Stage], sets: Iterable[ModelSet]) -> tuple[Stage, ...]:
    """The stages of models without ranks for themselves."""
    models = {model for s in sets if not s.devices for model in s.models}
    own = {name for s in sets if s.devices for name in s.models}
    return tuple(stage for stage in stages if stage.model in models and stage.target not in own)


def _step(stages: Iterable[Stage]) -> int:
    """The number of ranks that stages together need is a multiple of it."""
    return math.lcm(1, *(max(s.degree("tp"), 1) * max(s.degree("pp"), 1) for s in stages))


def _fixed(stage: Stage) -> int:
    """The number of ranks that a stage's degrees amount to, 0 if they leave it open."""
    if not stage.degree("dp"):
        return 0
    return math.prod(max(stage.degree(axis), 1) for axis in DEGREES)


def _groups(checked: Checked, sets: Sequence[ModelSet], stages: Sequence[Stage], world: int) -> tuple[GroupSpec, ...]:
    """Ranks in order of declaration; the models that share what is left come last."""
    own = {model for s in sets if s.devices for model in s.models}
    sharing = tuple(model for model in checked.models if model not in own)
    groups: list[GroupSpec] = []
    first = 0
    for one in (s for s in sets if s.devices):
        if first + one.devices > world - bool(sharing):
            raise _too_many(one, sets, stages, world, first, Source(checked.path, checked.text))
        models = tuple(name for name in one.models if name in checked.models)
        samplers = tuple(name for name in one.models if name not in checked.models)
        groups.append(GroupSpec(models, first, one.devices, samplers=samplers))
        first += one.devices
    if sharing:
        groups.append(GroupSpec(sharing, first, world - first))
    return tuple(groups)


def _too_many(own: ModelSet, sets, stages, world: int, taken: int, source: Source) -> DiagnosticError:
    """taken: ranks of the sets before it"""
    left = [name for s in sets if not s.devices for name in s.models]
    reason = f"none is left for {listing(left)}"
    if taken + own.devices > world:
        reason = f"{taken} belong to others" if taken else "there are not as many"
    sharing = _sharing(stages, sets)
    way = _own_ranks(sets) + (max(map(_fixed, sharing)) or _step(sharing) if sharing else 0)
    share = ", or let models share ranks by `colocate`" if len(sets) > 1 else ""
    return fault("P0103", own.at.span, source=source, target=own.target, devices=own.devices, ranks=world,
                 reason=reason, help=f"start {way} ranks (`--ranks {way}`){share}")


# ---- layouts -------------------------------------------------------------------------------------

def _layout(stage: Stage, stages: Iterable[Stage], group: GroupSpec, own: bool, source: Source) -> LayoutSpec:
    """own: whether `devices` gives the group its ranks"""
    tp, pp, dp = (stage.degree(axis) for axis in DEGREES)
    tp, pp = tp or 1, pp or 1
    needed = tp * pp * (dp or 1)
    if group.ranks % needed or dp and needed != group.ranks:
        raise _misfits(stage, needed, group, own, source)
    within = next((s.target for s in stages if s.model == stage.model and s.stage != GENERATE), "")
    within = within if stage.stage == GENERATE and stage.target not in group.samplers else ""
    if not within and stage.items.get("reshard", MINIMAL) != MINIMAL:
        raise fault("P0119", stage.at["reshard"].span, source=source, target=stage.target,
                    strategy=stage.items["reshard"].replace("-", "_"))
    spec = LayoutSpec(group.ranks, tp, pp, dp or group.ranks // needed, group.first, within, stage.engine)
    return executed(spec, stage, stages)


def _misfits(stage: Stage, needed: int, group: GroupSpec, own: bool, source: Source) -> DiagnosticError:
    exact = bool(stage.degree("dp"))
    at = next(stage.at[axis] for axis in DEGREES if axis in stage.at)
    way = needed if exact or group.ranks < needed else group.ranks // needed * needed
    more = f"give it `devices({way})`" if own else f"start {group.first + way} ranks (`--ranks {group.first + way}`)"
    return fault("P0101", at.span, source=source, target=stage.target, constraint=stage.written, ranks=group.ranks,
                 needed=f"{needed}" if exact else f"a multiple of {needed}", help=f"{more}, or change the constraint")


def _check_fit(stage: Stage, shape: ModelShape, spec: LayoutSpec, source: Source) -> None:
    layout = ModelLayout(tuple(range(spec.ranks)), spec.tp, spec.pp, spec.dp, spec.chunks if spec.pp > 1 else 1)
    reason = misfit(shape, layout, engine_of({stage.target: spec}, stage.target))
    if spec.chunks > layout.chunks:
        reason = "chunks are parts of a pipeline's stages"
    if reason:
        at = next((stage.at[axis] for axis in DEGREES if axis in stage.at), None)
        place = {"source": source} if at else {"place": source.path}
        words = {"target": stage.target, "tp": spec.tp, "pp": spec.pp, "reason": reason}
        raise fault("P0102", at.span if at else None, **place, **words)


def _batching(stage: Stage) -> Batching:
    tokens = stage.items.get("tokens", 0)
    recompute = stage.items.get("recompute") == "full"
    return Batching(stage.items.get("micro_batch", 0 if tokens else SAMPLES), tokens, recompute)
