"""How much memory a plan leaves for the keys and values of generation, on a described cluster."""

from __future__ import annotations

import dataclasses

from compiler.cluster import Cluster
from compiler.cost.memory import room
from compiler.cost.setting import Setting
from compiler.plan import Plan


def with_caches(plan: Plan, cluster: Cluster) -> Plan:
    """Each layout of generation has what nothing else takes of its devices' memory; where that is nothing, no plan fits."""
    setting, rooms = Setting(plan, cluster), {}
    for model in plan.models:
        for step, _ in setting.steps(model, "generate"):
            rooms[step.layout] = max(0, int(room(setting, step)))
    layouts = {name: dataclasses.replace(spec, cache_bytes=rooms.get(name, 0)) for name, spec in plan.layouts.items()}
    return dataclasses.replace(plan, layouts=layouts)
