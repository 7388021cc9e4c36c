"""A found placement for people and for programs."""

from __future__ import annotations

from typing import Any, Iterator, Optional, Sequence

from compiler.cost import generation
from compiler.cost.layouts import Degrees
from compiler.cost.sizes import sizes_of
from compiler.cost.workload import FORWARD, GENERATE, TRAIN, Workload
from compiler.machine import Machine
from compiler.search.placement import Found, Group, ModelPlacement


def placement_text(program: str, cluster: str, workload: Workload, machines: Sequence[Machine], found: Found) -> str:
    return "\n".join(_lines(program, cluster, workload, machines, found)) + "\n"


def _lines(program, cluster, workload: Workload, machines: Sequence[Machine], found: Found) -> Iterator[str]:
    total = sum(machine.devices for machine in machines)
    where = f"{found.devices} of the {total} devices of {cluster}"
    yield f"{program} on {where}: about {found.iteration_s:.2f} s an iteration"
    yield ""
    for group in found.groups:
        yield from _group(machines, group)
    yield ""
    yield f"{'stage':20}{'estimate':>10}{'share':>8}  decided by"
    for i, (stage, seconds) in enumerate(zip(workload.stages, found.stages)):
        slowest = max(found.groups, key=lambda g: g.times[i])
        names = ", ".join(m.model for m in slowest.models if m.option.times[i])
        yield f"  {stage.name:18}{seconds:8.2f} s{seconds / found.iteration_s:8.1%}  {names}"
    yield ""
    yield f"searched {found.partitions} divisions of the models, {found.considered} allocations, {found.search_s:.2f} s"
    for other in found.alternatives:
        words = " | ".join(f"{', '.join(m.model for m in g.models)}: {g.devices}" for g in other.groups)
        yield f"  {other.iteration_s / found.iteration_s - 1:+7.1%}  {words}"
    calls = {(c.prompt, c.response) for stage in workload.stages for c in stage.calls}
    lengths = "; ".join(f"prompts of {p:g} and responses of {r:g} tokens" for p, r in sorted(calls))
    yield f"estimated with {lengths}; `assume:` changes it"


def _group(machines: Sequence[Machine], group: Group) -> Iterator[str]:
    machine = machines[group.pool]
    yield (f"{group.devices} devices of {machine.name}, {group.peak / 1e9:.1f} of {machine.usable / 1e9:.1f} GB "
           "on the fullest")
    for one in group.models:
        choice = one.choice
        words = [f"{choice.layout}"]
        if choice.micro:
            again = ", recomputing layers" if choice.micro.recompute else ""
            words.append(f"micro-batch {choice.micro.samples}{again}")
        if choice.generate:
            words.append(f"generates in tp{choice.generate.tp} dp{choice.generate.dp}, {choice.sequences} rows at once")
        if choice.offload:
            words.append("idle in host memory")
        yield f"  {one.model:12}{'; '.join(words)}"


# ---- JSON ----------------------------------------------------------------------------------------

def placement_json(program: str, workload: Workload, found: Found) -> dict[str, Any]:
    """With the keys of `rlflow.explain/1`, as far as a placement without a plan has them."""
    placed = {one.model: (group, one) for group in found.groups for one in group.models}
    return {
        "format": "rlflow.explain/1", "program": program,
        "estimate": {"iteration_s": found.iteration_s},
        "groups": [_group_json(group) for group in found.groups],
        "models": {m.name: _model_json(workload, *placed[m.name]) for m in workload.models},
        "steps": [{"value": stage.name, "model": call.model, "op": call.kind, "ranks": placed[call.model][0].devices,
                   "estimate_s": placed[call.model][1].option.times[i]}
                  for i, stage in enumerate(workload.stages) for call in stage.calls],
        "transfers": [t for m in workload.models if (t := _transition(workload, m.name, placed[m.name][1]))],
        "search": {"considered": found.considered, "feasible": found.partitions, "seconds": found.search_s},
        "alternatives": [{"iteration_s": other.iteration_s, "groups": [_group_json(g) for g in other.groups]}
                         for other in found.alternatives],
    }


def _group_json(group: Group) -> dict[str, Any]:
    return {"models": [m.model for m in group.models], "devices": group.devices, "pool": group.pool,
            "peak_bytes": round(group.peak)}


def _model_json(workload: Workload, group: Group, one: ModelPlacement) -> dict[str, Any]:
    kinds = {call.kind for _, call in workload.calls(one.model)}
    memory = round(one.option.resident + one.option.work)
    found: dict[str, Any] = {"memory_bytes": memory, "offload": one.choice.offload}
    for kind in (TRAIN, FORWARD):
        if kind in kinds:
            found[kind] = one.choice.layout._asdict()
    if GENERATE in kinds:
        found[GENERATE] = one.choice.generate._asdict()
    found.setdefault(FORWARD, one.choice.layout._asdict())
    return found


def _transition(workload: Workload, name: str, one: ModelPlacement) -> Optional[dict[str, Any]]:
    generate: Optional[Degrees] = one.choice.generate
    if generate is None:
        return None
    model = next(m for m in workload.models if m.name == name)
    each = generation.transition_bytes(sizes_of(model.shape, model.role), one.choice.layout, generate)
    total = round(each * generate.devices)
    return {"value": f"weights of {name}", "from": f"{name}.train", "to": f"{name}.generate",
            "bytes_per_rank": round(each), "total_bytes": total, "lower_bound_bytes": total}
