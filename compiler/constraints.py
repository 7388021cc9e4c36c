"""What `plan:` asks for: of each stage of a model, and which models share ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Mapping, Optional

from compiler.resharding.transitions import ENGINES
from rlhf_dsl.diagnostics import Label, fault, listing
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Checked, Constraint

TRAIN, FORWARD, GENERATE = "train", "forward", "generate"
DEGREES = ("tp", "pp", "dp")
STAGES_OF = {  # items that some stages have no use for
    "recompute": (TRAIN,), "optimizer": (TRAIN,), "sequence_parallel": (TRAIN, FORWARD), "chunks": (TRAIN, FORWARD),
}
OF_A_SET = ("devices", "colocate")  # items that mean the model, whatever stage they are written at


@dataclass(frozen=True)
class Stage:
    """What is asked of one stage of one model; what is not there is open. at: the constraint that said so, by item."""

    model: str
    stage: str
    items: Mapping[str, Any] = field(default_factory=dict)
    at: Mapping[str, Constraint] = field(default_factory=dict)

    @property
    def target(self) -> str:
        return f"{self.model}.{self.stage}"

    def degree(self, axis: str) -> int:
        """0 means open."""
        return self.items.get(axis, 0)

    @property
    def engine(self) -> str:
        """As `LayoutSpec.engine`."""
        asked = self.items.get("engine", "")
        return "" if asked == ENGINES[self.stage][0] else asked

    @property
    def written(self) -> str:
        """`parallel(tp=2, pp=1)`, as far as it is given."""
        return f"parallel({', '.join(f'{a}={self.items[a]}' for a in DEGREES if a in self.items)})"


@dataclass(frozen=True)
class ModelSet:
    """Models that `colocate` ties together, in order of declaration.

    devices: the ranks that they get for themselves, said by the constraint `at`; 0: nothing is said
    """

    models: tuple[str, ...]
    devices: int = 0
    at: Optional[Constraint] = None

    @property
    def target(self) -> str:
        return target(self.at) if self.at else self.models[0]


def stages_of(checked: Checked) -> dict[str, tuple[str, ...]]:
    """By model, its stages: train or forward, and generate for a policy that samples."""
    statements = [*checked.rollout, *(s for e in checked.evals for s in e.body)]
    sampling = {_sampler(s) for s in statements}
    return {
        model.name: (TRAIN if model.optimizer else FORWARD, *((GENERATE,) if model.name in sampling else ()))
        for model in checked.models.values()
    }


def _sampler(statement) -> Optional[str]:
    expr = getattr(statement, "expr", None)
    return expr.attr("model") if expr is not None and expr.op == "generate" else None


def target(constraint: Constraint) -> str:
    """As the program has it: `actor` or `actor.train`."""
    return ".".join(filter(None, (constraint.model, constraint.stage)))


# ---- stages --------------------------------------------------------------------------------------

def asked_of_stages(checked: Checked) -> tuple[Stage, ...]:
    """Every stage with what `plan:` says of it. Raises DiagnosticError P0104, P0105, P0108, P0117."""
    source, known = Source(checked.path, checked.text), stages_of(checked)
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
    raise fault("P0105", constraint.span, source=source, target=target(constraint), model=constraint.model,
                stages=listing(stages))


def _merged(stage: Stage, constraint: Constraint, source: Source) -> Stage:
    items = {key: value for key, value in constraint.items if key not in OF_A_SET}
    for key, value in items.items():
        if stage.items.get(key, value) != value:
            raise _disagrees(key, value, constraint, stage.items[key], stage.at[key], source)
        if key == "engine" and value not in ENGINES[stage.stage]:
            raise fault("P0104", constraint.span, source=source, target=stage.target, engine=value,
                        engines=listing(ENGINES[stage.stage]))
        if stage.stage not in STAGES_OF.get(key, (stage.stage,)):
            raise fault("P0117", constraint.span, source=source, target=stage.target, item=key,
                        stages=listing(STAGES_OF[key]))
    return Stage(stage.model, stage.stage, {**stage.items, **items}, {**stage.at, **dict.fromkeys(items, constraint)})


def _disagrees(key: str, value: Any, here: Constraint, other: Any, there: Constraint, source: Source):
    value, other = (str(one).lower() if isinstance(one, bool) else one for one in (value, other))
    what = f"`{key}` is {value} here and {other} there"
    return fault("P0108", here.span, source=source, labels=[Label(there.span, f"{other} here")], target=target(here),
                 other=target(there), what=what)


# ---- sets ----------------------------------------------------------------------------------------

def asked_sets(checked: Checked) -> tuple[ModelSet, ...]:
    """The connected components of `colocate`, in order of declaration. Raises DiagnosticError P0108."""
    of = {name: ModelSet((name,)) for name in checked.models}
    source = Source(checked.path, checked.text)
    for constraint in checked.constraints:
        items = dict(constraint.items)
        if "devices" in items:
            mine = of.setdefault(_asking(constraint, checked.run.lag), ModelSet((target(constraint),)))
            _put(of, _joined(mine, ModelSet(mine.models, items["devices"], constraint), source))
        for other in items.get("colocate", ()):
            _put(of, _joined(of[constraint.model], of[other], source))
    order = {name: i for i, name in enumerate((*checked.models, *of))}
    ordered = (dataclasses.replace(s, models=tuple(sorted(s.models, key=order.__getitem__))) for s in of.values())
    return tuple(dict.fromkeys(ordered))


def _asking(constraint: Constraint, lag: int) -> str:
    """Whose ranks `devices` speaks of: with `lag = 1` sampling may have its own, beside all models."""
    return target(constraint) if lag and constraint.stage == GENERATE else constraint.model


def _put(of: dict[str, ModelSet], joined: ModelSet) -> None:
    of.update(dict.fromkeys(joined.models, joined))


def _joined(one: ModelSet, other: ModelSet, source: Source) -> ModelSet:
    if one.devices and other.devices and one.devices != other.devices:
        first, second = sorted((one, other), key=lambda s: s.at.span.start)
        raise _disagrees("devices", second.devices, second.at, first.devices, first.at, source)
    said = one if one.devices else other
    return ModelSet(tuple(dict.fromkeys((*one.models, *other.models))), said.devices, said.at)
