"""HybridFlow's transfer protocols come out of layouts: their names follow from who gets and who gives."""

from __future__ import annotations

import itertools

from compiler.layout import ModelLayout, generation_layout
from compiler.resharding.protocols import AXES, cut, examples, protocol

DEGREES = [degrees for degrees in itertools.product((1, 2, 3), repeat=3)]


def test_the_examples_of_the_page_are_the_protocols_they_stand_for():
    assert {name: protocol(*example[:4]) for name, example in examples().items()} == {name: name for name in examples()}


def test_rows_to_a_model_are_scattered_or_3d():
    """As a plan moves them: a data shard's rows to all of its ranks, results from the last stage, tensor shard 0."""
    for tp, pp, dp in DEGREES:
        layout = ModelLayout(tuple(range(tp * pp * dp)), tp, pp, dp)
        takes, gives = cut(layout, ("dp",)), cut(layout, ("dp",), pp - 1)
        assert set(map(frozenset, takes.parts)) == {frozenset(layout.replica(d)) for d in range(dp)}
        assert gives.givers == layout.outputs()
        if len(takes.parts) > 1:
            assert protocol(layout, takes, gives) == ("DP_PROTO" if tp * pp == 1 else "3D_PROTO")


def test_rows_to_generation_follow_the_micro_replicas():
    for tp, pp, dp in DEGREES:
        train = ModelLayout(tuple(range(tp * pp * dp)), tp, pp, dp)
        for degree in (n for n in (1, 2, 3) if tp % n == 0):
            layout = generation_layout(train, degree)
            takes, gives = cut(layout, ("dp",)), cut(layout, ("dp",), 0)
            assert len(takes.parts) == tp * pp // degree * dp
            if degree > 1 and layout.dp > dp:
                assert protocol(layout, takes, gives, train) == "3D_ALL_MICRO_DP"


def test_what_no_protocol_says_has_no_name():
    layout = ModelLayout(tuple(range(8)), 2, 2, 2)
    assert protocol(layout, cut(layout, ("tp",)), cut(layout, AXES, 1)) == ""
    assert protocol(layout, cut(layout, ()), cut(layout, ("dp",))) == ""
