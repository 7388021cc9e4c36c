"""Parts and joins of values over the rows of a frame, and their nested lists."""

import pytest
import torch

from runtime.executor.scope import Dims, Rows
from runtime.sequences import Sequences
from runtime.values import Frame, Value, concat, from_lists, to_lists
from tests.equations import frame


def test_selections_of_rows_and_of_samples():
    on = frame(b=3, g=2, t=[[1, 2], [2, 1], [1, 1]])
    x = from_lists([[[1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0]], [[7.0], [8.0]]], ("b", "g", "t"), on)
    w = from_lists([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], ("b", "g"), on)
    a = from_lists(["p", "q", "r"], ("b",), on, "text")
    rows = on.select("b", torch.tensor([2, 0]))
    assert to_lists(rows.value(x), rows.frame) == [[[7.0], [8.0]], [[1.0], [2.0, 3.0]]]
    assert to_lists(rows.value(a), rows.frame) == ["r", "p"] and rows.frame.rows["b"].tolist() == [2, 0]
    units = on.select_units(("b", "g"), torch.tensor([1, 2, 3]))
    assert to_lists(units.value(x), units.frame) == [[[2.0, 3.0]], [[4.0, 5.0]], [[6.0]]]
    assert to_lists(units.value(w), units.frame) == [[2.0], [3.0], [4.0]]
    assert to_lists(units.value(a), units.frame) == ["p", "q", "q"]
    with pytest.raises(ValueError, match="without b"):
        units.value(Value(("g",), torch.ones(2)))
    sequences = Sequences(torch.arange(14), torch.ones(6, dtype=torch.int64), on.lengths["t"])
    chosen = units.value(Value(("b", "g", "t"), sequences)).data
    assert chosen.tokens.tolist() == [2, 3, 4, 5, 6, 7, 8, 9] and chosen.response_lengths.tolist() == [2, 2, 1]


def test_concat_restores_the_whole_whatever_the_order_of_dims():
    rows_first, groups_first = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
    for dims, shape in ((("b", "g"), rows_first), (("g", "b"), groups_first)):
        on = Frame({"b": torch.arange(3)}, {"g": 2}, {"t": torch.tensor([1, 2, 2, 1, 3, 1])}, {"t": dims}, {"b": 3})
        values = [from_lists(shape, dims, on), Value((*dims, "t"), torch.arange(10.0))]
        parts = [on.select("b", torch.tensor(rows, dtype=torch.int64)) for rows in ([0], [], [1, 2])]
        frames = [p.frame for p in parts]
        joined = Frame.concat(frames, "b")
        assert joined.rows["b"].tolist() == [0, 1, 2] and joined.lengths["t"].tolist() == on.lengths["t"].tolist()
        for value in values:
            assert concat([p.value(value) for p in parts], frames, "b").data.tolist() == value.data.tolist()


@pytest.mark.parametrize("lists, place", [
    ([[1.0, 2.0]], "value: expected 2 entries"),
    ([[1.0], [2.0]], r"\[0\]: expected 3"),
    ([[1.0, 2.0, 3.0], 4.0], r"\[1\]: expected a list"),
    ([[1.0, "x", 3.0], [1.0]], r"\[0\]\[1\]: expected f32"),
])
def test_lists_that_do_not_fit_are_placed(lists, place):
    with pytest.raises(ValueError, match=place):
        from_lists(lists, ("b", "t"), frame(b=2, t=[3, 1]))


def test_rows_by_units_of_which_a_group_is_cut():
    """Keeps over one group and units of another; tokens of responses with other groups are not in a frame of units."""
    dims = Dims(("b",), {"g": 2, "h": 3}, {"t": ("b", "h"), "u": ("b", "g", "h"), "v": ("b",)}, {})
    lengths = {"t": torch.arange(6), "u": torch.arange(12), "v": torch.tensor([7, 8])}
    kept = {1: torch.tensor([False, False, True, False])}
    rows = Rows(dims, {"b": 2}, lengths=lengths, kept=kept, keep_dims={1: ("b", "g")})
    assert rows.kept_units(("b",), 1).tolist() == [False, True]
    assert rows.kept_units(("b", "h"), 1).tolist() == [False] * 3 + [True] * 3
    assert rows.kept_units(("b", "g", "h"), 1).tolist() == [False] * 6 + [True] * 3 + [False] * 3
    assert rows.kept_units(("b", "g"), 1).tolist() == kept[1].tolist()
    cut = rows.frame(("b", "h"), torch.tensor([5, 0]))
    assert {t: found.tolist() for t, found in cut.lengths.items()} == {"t": [5, 0], "v": [8, 7]}
    whole = rows.frame(("b",), torch.tensor([1]))
    assert {t: found.tolist() for t, found in whole.lengths.items()} == {"t": [3, 4, 5], "u": [*range(6, 12)], "v": [8]}
