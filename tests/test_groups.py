"""Groups of models: where they lie on a cluster, and what a plan's proof finds of them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.cluster_file import read_cluster
from compiler.groups import group_faults, groups_of
from compiler.layout import ModelLayout, generation_layout
from compiler.plan import GroupSpec, LayoutSpec
from compiler.proof.verify import faults
from compiler.search.placed import packed
from tests.compiling import PROGRAMS, compiled
from tests.test_explain import PPO

ACTOR = GroupSpec(("actor", "ref"), 0, 4)
A100 = read_cluster(PROGRAMS / "clusters" / "a100-16x8.toml").machines[0]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """actor and ref on ranks 0 to 3, critic and reward on 4 and 5."""
    text = PPO[:PPO.index("plan:")] + "plan:\n    actor: devices(4), colocate(ref)\n    critic: parallel(pp=2)\n"
    return compiled(tmp_path_factory.mktemp("groups"), text, 6)


def test_sound_groups_have_no_faults(plan):
    assert plan.groups == (ACTOR, GroupSpec(("critic", "reward"), 4, 2))
    assert list(faults(plan)) == []


def test_a_plan_without_groups_has_one_of_all(plan):
    assert groups_of(dataclasses.replace(plan, groups=())) == (GroupSpec(tuple(plan.models), 0, 6),)


DAMAGE = [
    ((ACTOR,), "model `critic` is not in one group"),
    ((ACTOR, GroupSpec(("critic", "reward", "ref"), 4, 2)), "model `ref` is not in one group"),
    ((ACTOR, GroupSpec(("critic", "reward"), 4, 3)), "ranks outside the world of 6"),
    ((ACTOR, GroupSpec(("critic", "reward"), 3, 2)), "share ranks"),
    ((ACTOR, GroupSpec(("critic", "reward"), 4, 1)), "does not have the ranks of its group"),
    ((ACTOR, GroupSpec(("critic", "reward", "no"), 4, 2)), "models that the plan does not have"),
    ((), "does not have the ranks of its group"),
]


@pytest.mark.parametrize("groups, reason", DAMAGE, ids=[reason for _, reason in DAMAGE])
def test_damaged_groups_are_found(plan, groups, reason):
    damaged = dataclasses.replace(plan, groups=groups)
    assert any(reason in found for found in group_faults(damaged)) and list(faults(damaged))


def test_a_layout_outside_its_group_is_found(plan):
    layouts = plan.layouts | {"reward.forward": LayoutSpec(2, dp=2, first=2)}
    assert list(group_faults(dataclasses.replace(plan, layouts=layouts)))


# ---- ranks of found groups -------------------------------------------------------------------------

@given(st.lists(st.sampled_from((1, 2, 4, 8, 16, 24)), min_size=1, max_size=6))
def test_no_part_of_a_node_crosses_two(sizes):
    starts = packed(A100, sizes)
    taken = sorted((start, start + size) for start, size in zip(starts, sizes))
    assert all(stop <= start for (_, stop), (start, _) in zip(taken, taken[1:]))
    for start, size in zip(starts, sizes):
        assert start % 8 == 0 if size % 8 == 0 else start // 8 == (start + size - 1) // 8
    assert taken[-1][1] <= -(-sum(sizes) // 8) * 8  # no more nodes than needed


POWERS = st.sampled_from((1, 2, 4, 8))


@given(POWERS, st.sampled_from((1, 2, 3)), POWERS, POWERS)
def test_replicas_of_generation_lie_in_nodes(tp, pp, dp, generate):
    """Where training's tensor groups do, and the ranks of one coordinate are enough."""
    train = ModelLayout(tuple(range(tp * pp * dp)), tp, pp, dp)
    if len(train.ranks) % generate or generate > tp * dp:
        return
    layout = generation_layout(train, generate)
    for replica in map(layout.replica, range(layout.dp)):
        assert len({rank // 8 for rank in replica}) == 1


def test_what_cannot_be_packed_crosses_nodes():
    """Two nodes of six devices have room for three sets of four, but only across nodes."""
    assert packed(dataclasses.replace(A100, nodes=2, devices_per_node=6), [4, 4, 4]) == [0, 4, 8]
