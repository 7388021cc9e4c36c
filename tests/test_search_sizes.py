"""What a search says of other numbers of devices equals a search that is bound to them."""

from __future__ import annotations

import pytest

from compiler.search.fronts import Fronts
from compiler.search.given import stages_of_groups
from compiler.search.placement import TIME, search
from compiler.search.sizes import bounds_of_sets
from compiler.search.space import device_counts
from compiler.search.thinning import EXACT
from tests.test_search import machine, seven_b


@pytest.mark.parametrize("nodes", [1, 2])
def test_other_numbers_are_those_of_the_best_layouts_there(nodes):
    workload, one = seven_b(), machine(nodes, 8, 85e9)
    fronts = Fronts(workload, (one,), EXACT)
    found = search(workload, (one,), fronts=fronts)
    counts = device_counts(one)
    for number, (group, bounds) in enumerate(zip(found.groups, bounds_of_sets(fronts, found, TIME))):
        names = [m.model for m in group.models]
        devices = {tuple(m.model for m in g.models): g.devices for g in found.groups}
        for other in bounds.others:
            assert abs(counts.index(other.devices) - counts.index(group.devices)) == 1
            changed = devices | {tuple(names): other.devices}
            if other.giver >= 0:
                assert other.giver != number and other.devices > group.devices
                continue
            stages = stages_of_groups(fronts, changed)
            assert (stages is None) == (not other.times)
            assert stages is None or sum(other.times) == pytest.approx(sum(stages))
            assert stages is None or sum(other.times) >= found.iteration_s * (1 - 1e-9)
        least = fronts.key([[m.name for m in workload.models].index(n) for n in names])
        fits = [n for n in counts if fronts.of_set(least, group.pool, n)]
        assert bounds.least == fits[0] <= group.devices
