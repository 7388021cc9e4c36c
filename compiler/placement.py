"""Where models run: `plan:` constraints are kept, and what they leave open is data parallelism over all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Iterable, Mapping, Optional

from compiler.cluster import Cluster, default_ranks
from compiler.layout import ModelLayout
from compiler.plan import Alternative, GroupSpec, LayoutSpec
from compiler.shapes import ModelShape
from compiler.transitions import ENGINES
from compiler.weights import misfit
from rlhf_dsl.diagnostics import DiagnosticError, fault, listing
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Checked, Constraint

TRAIN, FORWARD, GENERATE = "train", "forward", "generate"
DEGREES = ("tp", "pp", "dp")
SAMPLES = 64  # in a micro-batch, where no constraint says


@dataclass(frozen=True)
class Stage:
    """What is asked of one stage of one model; 0 means open. `at` holds the constraint that said so, by item."""

    model: str
    stage: str
    items: Mapping[str, Any] = field(default_factory=dict)
    at: Mapping[str, Constraint] = field(default_factory=dict)

    @property
    def target(self) -> str:
        return f"{self.model}.{self.stage}"

    def degree(self, axis: str) -> int:
        return self.items.get(axis, 0)

    @property
    def written(self) -> str:
        """`parallel(tp=2, pp=1)`, as far as it is given."""
        return f"parallel({', '.join(f'{a}={self.items[a]}' for a in DEGREES if a in self.items)})"


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


def stages_of(checked: Checked) -> dict[str, tuple[str, ...]]:
    """By model, its stages: train or forward, and generate for a policy that samples."""
    statements = [*checked.rollout, *(s for e in checked.evals for s in e.body)]
    sampling = {_model_of(s) for s in statements}
    return {
        model.name: (TRAIN if model.optimizer else FORWARD, *((GENERATE,) if model.name in sampling else ()))
        for model in checked.models.values()
    }


def _model_of(statement) -> Optional[str]:
    expr = getattr(statement, "expr", None)
    return expr.attr("model") if expr is not None and expr.op == "generate" else None


def place(checked: Checked, shapes: Mapping[str, ModelShape], cluster: Cluster, ranks: Optional[int]) -> Placement:
    """Layouts of all models on `ranks` ranks, or on a number that the constraints allow. Raises DiagnosticError P01."""
    source = Source(checked.path, checked.text)
    stages = _gather(checked, source)
    world = _world(checked, stages, cluster, ranks, source)
    if not cluster.is_local and world > cluster.devices:
        raise fault("P0106", ranks=world, devices=cluster.devices)
    layouts: dict[str, LayoutSpec] = {}
    for stage in stages:
        layouts[stage.target] = _layout(stage, stages, world, source)
        _check_fit(stage, shapes[stage.model], layouts[stage.target], source)
    groups = (GroupSpec(tuple(checked.models), 0, world),)
    return Placement(world, layouts, {s.target: _batching(s) for s in stages}, groups)


# ---- gathering constraints -------------------------------------------------------------------------

def _gather(checked: Checked, source: Source) -> tuple[Stage, ...]:
    known = stages_of(checked)
    found = {(m, s): Stage(m, s) for m, stages in known.items() for s in stages}
    for constraint in checked.constraints:
        if not constraint.model:
            continue
        stage = _stage_meant(constraint, known[constraint.model], source)
        found[constraint.model, stage] = _merged(found[constraint.model, stage], constraint, source)
    return tuple(found.values())


def _stage_meant(constraint: Constraint, stages: tuple[str, ...], source: Source) -> str:
    """`critic: ...` means how it trains, or scores if frozen; `actor.forward` of a trained model is `actor.train`."""
    if constraint.stage in ("", FORWARD):
        return stages[0]
    if constraint.stage in stages:
        return constraint.stage
    raise fault("P0105", constraint.span, source=source, target=f"{constraint.model}.{constraint.stage}",
                model=constraint.model, stages=listing(stages))


def _merged(stage: Stage, constraint: Constraint, source: Source) -> Stage:
    for key, value in constraint.items:
        if stage.items.get(key, value) != value:
            what = f"`{key}` is {value} here and {stage.items[key]} there"
            other = _target(stage.at[key])
            raise fault("P0108", constraint.span, source=source, target=_target(constraint), other=other, what=what)
        if key == "engine" and value != ENGINES[stage.stage]:
            raise fault("P0104", constraint.span, source=source, target=stage.target, engine=value,
                        engines=listing([ENGINES[stage.stage]]))
    items = dict(constraint.items)
    return Stage(stage.model, stage.stage, {**stage.items, **items}, {**stage.at, **dict.fromkeys(items, constraint)})


def _target(constraint: Constraint) -> str:
    return ".".join(filter(None, (constraint.model, constraint.stage)))


# ---- ranks and layouts -----------------------------------------------------------------------------

def _world(checked: Checked, stages: Iterable[Stage], cluster: Cluster, ranks: Optional[int], source: Source) -> int:
    """The asked number, else the number that constraints fix, else a multiple of what they need near the default."""
    if ranks is not None:
        if ranks < 1:
            raise fault("P0109", ranks=ranks)
        return ranks
    fixed = [_fixed(s) for s in stages if _fixed(s)]
    if fixed:
        return fixed[0]
    roots = [d.size for d in checked.dims.values() if d.root]
    default = default_ranks(cluster, min(roots, default=1))
    step = math.lcm(1, *(max(s.degree("tp"), 1) * max(s.degree("pp"), 1) for s in stages))
    return max(default // step, 1) * step


def _fixed(stage: Stage) -> int:
    """The number of ranks that a stage's constraints amount to, 0 if they leave it open."""
    if "devices" in stage.items:
        return stage.items["devices"]
    if "dp" not in stage.items:
        return 0
    return math.prod(max(stage.degree(axis), 1) for axis in DEGREES)


def _layout(stage: Stage, stages: Iterable[Stage], world: int, source: Source) -> LayoutSpec:
    tp, pp, dp = (stage.degree(axis) for axis in DEGREES)
    tp, pp = tp or 1, pp or 1
    if "devices" in stage.items and stage.items["devices"] != world:
        raise fault("P0103", stage.at["devices"].span, source=source, target=stage.target, ranks=world,
                    devices=stage.items["devices"])
    needed = tp * pp * (dp or 1)
    if world % needed or dp and needed != world:
        raise _too_few(stage, needed, world, bool(dp), source)
    within = next((s.target for s in stages if s.model == stage.model and s.stage != GENERATE), "")
    return LayoutSpec(world, tp, pp, dp or world // needed, within=within if stage.stage == GENERATE else "")


def _too_few(stage: Stage, needed: int, world: int, exact: bool, source: Source) -> DiagnosticError:
    at = next(stage.at[axis] for axis in DEGREES if axis in stage.at)
    way = needed if exact or world < needed else world // needed * needed
    return fault("P0101", at.span, source=source, target=stage.target, constraint=stage.written, ranks=world, way=way,
                 needed=f"{needed}" if exact else f"a multiple of {needed}")


def _check_fit(stage: Stage, shape: ModelShape, spec: LayoutSpec, source: Source) -> None:
    layout = ModelLayout(tuple(range(spec.ranks)), spec.tp, spec.pp, spec.dp)
    reason = misfit(shape, layout, ENGINES[stage.stage])
    if reason:
        at = next((stage.at[axis] for axis in DEGREES if axis in stage.at), None)
        place = {"source": source} if at else {"place": source.path}
        words = {"target": stage.target, "tp": spec.tp, "pp": spec.pp, "reason": reason}
        raise fault("P0102", at.span if at else None, **place, **words)


def _batching(stage: Stage) -> Batching:
    tokens = stage.items.get("tokens", 0)
    return Batching(stage.items.get("micro_batch", 0 if tokens else SAMPLES), tokens)
