"""What `plan:` asks of models on a described cluster, and what of it cannot be."""

from __future__ import annotations

import math
from typing import Mapping, Optional

from compiler.cluster import Cluster
from compiler.constraints import DEGREES, GENERATE, ModelSet, Stage, asked_of_stages, asked_sets, target
from compiler.cost.workload import Asked
from compiler.layout import ModelLayout
from compiler.resharding.transitions import ENGINES
from compiler.search.space import device_counts
from compiler.shapes import ModelShape
from compiler.weights import misfit
from rlhf_dsl.diagnostics import DiagnosticError, Label, fault, listing
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Checked, Constraint

_KNOWN = (*DEGREES, "micro_batch", "tokens", "recompute", "precision", "optimizer", "sequence_parallel")


def asked_of_models(checked: Checked) -> dict[str, Asked]:
    """By model. Training and scoring have one layout; generation has one pipeline stage. Raises DiagnosticError P01."""
    devices = {model: s.devices for s in asked_sets(checked) for model in s.models}
    found = {model: {"devices": devices[model]} for model in checked.models}
    for stage in asked_of_stages(checked):
        if stage.stage == GENERATE:
            wanted = {"generate_tp": stage.degree("tp"), "generate_dp": stage.degree("dp"),
                      "generate_engine": stage.engine, "reshard": stage.items.get("reshard", "")}
        else:
            wanted = {key: stage.items[key] for key in _KNOWN if key in stage.items}
        found[stage.model] |= wanted
    return {model: Asked(**items) for model, items in found.items()}


def sets_alone(checked: Checked) -> tuple[tuple[str, ...], ...]:
    """The sets of models to which `devices` gives devices for themselves."""
    return tuple(s.models for s in asked_sets(checked) if s.devices)


def pairs_together(checked: Checked) -> tuple[tuple[str, str], ...]:
    """Pairs of models that must share their devices."""
    return tuple((s.models[0], other) for s in asked_sets(checked) for other in s.models[1:])


# ---- contradictions ------------------------------------------------------------------------------

def require_possible(checked: Checked, shapes: Mapping[str, ModelShape], cluster: Cluster) -> None:
    """Raises DiagnosticError P01 where constraints contradict each other, a model or the cluster."""
    source, stages, sets = Source(checked.path, checked.text), asked_of_stages(checked), asked_sets(checked)
    apart = next((s for s in sets if s.models[0] not in checked.models), None)
    if apart is not None:
        raise fault("P0111", apart.at.span, source=source, what=f"a search with `{apart.target}: devices(...)`",
                    help="leave the line out: the search puts sampling on the devices of training")
    for stage in stages:
        _require_cut(stage, shapes[stage.model], source)
    _require_room(sets, cluster, source)
    for one in sets:
        if one.devices:
            _require_count(one, cluster, source)
        _require_sizes(one, [s for s in stages if s.model in one.models], source)


def _require_cut(stage: Stage, shape: ModelShape, source: Source) -> None:
    tp, pp = stage.degree("tp") or 1, stage.degree("pp") or 1
    engine = stage.items.get("engine") or ENGINES[stage.stage][0]
    reason = misfit(shape, ModelLayout(tuple(range(tp * pp)), tp, pp), engine)
    if reason and (at := _at(stage)):
        raise fault("P0102", at.span, source=source, target=stage.target, tp=tp, pp=pp, reason=reason)


def _require_count(one: ModelSet, cluster: Cluster, source: Source) -> None:
    counts = sorted({n for machine in cluster.machines for n in device_counts(machine)})
    if one.devices not in counts:
        near = [n for n in counts if n < one.devices][-1:] + [n for n in counts if n > one.devices][:1]
        raise fault("P0118", one.at.span, source=source, target=one.target, devices=one.devices, cluster=cluster.name,
                    near=" or ".join(f"`devices({n})`" for n in near))


def _require_sizes(one: ModelSet, stages: list[Stage], source: Source) -> None:
    """Degrees of all stages of a set multiply to, or divide, one number of devices."""
    whole = [(math.prod(stage.degree(axis) or 1 for axis in DEGREES), stage) for stage in stages if _is_whole(stage)]
    for needed, stage in whole:
        if one.devices and needed != one.devices:
            raise _needs(stage, f"{needed}", one.devices, source)
        if needed != whole[0][0]:
            raise _disagree(stage, needed, whole[0][1], whole[0][0], source)
    devices = one.devices or (whole[0][0] if whole else 0)
    for stage in stages:
        needed = (stage.degree("tp") or 1) * (stage.degree("pp") or 1)
        if devices % needed:
            raise _needs(stage, f"a multiple of {needed}", devices, source)


def _is_whole(stage: Stage) -> bool:
    """Whether nothing is open: generation has one pipeline stage."""
    open_ = [axis for axis in DEGREES if not stage.degree(axis)]
    return not open_ or stage.stage == GENERATE and open_ == ["pp"]


def _needs(stage: Stage, needed: str, devices: int, source: Source) -> DiagnosticError:
    return fault("P0101", _at(stage).span, source=source, target=stage.target, constraint=stage.written, ranks=devices,
                 needed=needed, help="change the degrees, or `devices`")


def _disagree(stage: Stage, needed: int, other: Stage, others: int, source: Source) -> DiagnosticError:
    here, there = _at(stage), _at(other)
    return fault("P0108", here.span, source=source, labels=[Label(there.span, f"{others} ranks")], target=target(here),
                 other=target(there), what=f"their degrees make {needed} ranks here and {others} there")


def _require_room(sets: tuple[ModelSet, ...], cluster: Cluster, source: Source) -> None:
    """Sets with devices for themselves leave some for the other models."""
    left = [model for s in sets if not s.devices for model in s.models]
    taken = 0
    for one in (s for s in sets if s.devices):
        if taken + one.devices > cluster.devices - bool(left):
            reason = f"none is left for {listing(left)}"
            if taken + one.devices > cluster.devices:
                reason = f"{taken} belong to others" if taken else "there are not as many"
            raise fault("P0103", one.at.span, source=source, target=one.target, devices=one.devices,
                        ranks=cluster.devices, reason=reason, help="give fewer, or let models share them by `colocate`")
        taken += one.devices


def _at(stage: Stage) -> Optional[Constraint]:
    """The constraint that gives a degree."""
    return next((stage.at[axis] for axis in DEGREES if axis in stage.at), None)
