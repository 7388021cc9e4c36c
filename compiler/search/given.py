"""Placements of which a part is given: to compare with, and to measure the cost model by."""

from __future__ import annotations

import itertools
from typing import Mapping, Optional, Sequence

from compiler.cost.layouts import Degrees
from compiler.cost.workload import Workload
from compiler.machine import Machine
from compiler.search.fronts import Fronts, bound_front
from compiler.search.options import symmetric_options
from compiler.search.thinning import EXACT


def stages_of_groups(fronts: Fronts, groups: Mapping[Sequence[str], int]) -> Optional[tuple[float, ...]]:
    """Seconds by stage with these sets of models on these numbers of devices and the best layouts; None if none fit."""
    names = [model.name for model in fronts.workload.models]
    sets = [fronts.of_set(fronts.key([names.index(n) for n in group]), 0, count) for group, count in groups.items()]
    stages = (tuple(map(max, zip(*(point.times for point in points)))) for points in itertools.product(*sets))
    return min(stages, key=sum, default=None)


def symmetric(workload: Workload, machine: Machine, tp: int) -> Optional[tuple[Degrees, tuple[float, ...]]]:
    """(degrees, seconds by stage) of all models on all devices in one layout: this tp, the least pp that fits, the
    rest dp. It is what a cautious person would write. None if no pp fits."""
    for pp in (n for n in range(1, machine.devices // tp + 1) if machine.devices % (tp * n) == 0):
        if any(model.shape.layers % pp for model in workload.models):
            continue
        degrees = Degrees(tp, pp, machine.devices // (tp * pp))
        lists = [symmetric_options(machine, workload, model, degrees) for model in workload.models]
        points = bound_front(lists, machine.usable, EXACT)
        if points:
            return degrees, min((point.times for point in points), key=sum)
    return None
