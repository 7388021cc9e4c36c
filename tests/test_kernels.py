"""Facts of single kernels: edges, ties, gradients, exactness, and small formulas of the literature by their numbers."""

import math

import pytest
import torch

from runtime.evaluator import Evaluator
from runtime.kernels import KERNELS
from runtime.reducers import SoloReducer
from runtime.sequences import Sequences
from runtime.values import Frame, Value, from_lists, to_lists
from rlhf_dsl.builtins import PRIMITIVES
from tests.equations import Graph, frame, gradient, run

ROWS = frame(b=2, t=[3, 1])
GROUP = frame(b=1, g=4, t=[[1, 2, 1, 1]])


def test_every_primitive_but_leaves_has_a_kernel():
    leaves = {name for name, p in PRIMITIVES.items() if p.kind in ("leaf", "model", "response")}
    assert set(KERNELS) == set(PRIMITIVES) - leaves


# ---- broadcasting ------------------------------------------------------------------------------------

def test_broadcast_is_by_name():
    g = Graph()
    x, w, s = g.leaf("x", ("b", "g", "t")), g.leaf("w", ("b", "g")), g.leaf("s", ("g",))
    on = frame(b=2, g=2, t=[[1, 2], [3, 1]])
    xs = [[[1.0], [2.0, 3.0]], [[4.0, 5.0, 6.0], [7.0]]]
    product = run(g.mul(x, w), on, {x: xs, w: [[1, 10], [100, 1000]]})
    assert product == [[[1.0], [20.0, 30.0]], [[400.0, 500.0, 600.0], [7000.0]]]
    assert run(g.add(s, w), on, {s: [1.0, 2.0], w: [[10, 20], [30, 40]]}) == [[11.0, 22.0], [31.0, 42.0]]
    total = run(g.add(x, s), on, {x: xs, s: [100.0, 200.0]})
    assert total == [[[101.0], [202.0, 203.0]], [[104.0, 105.0, 106.0], [207.0]]]


def test_a_response_of_the_row_broadcasts_over_its_group():
    g = Graph()
    on = Frame({"b": torch.arange(2)}, {"g": 2}, {"t": torch.tensor([2, 1])}, {"t": ("b",)}, {"b": 2})
    x, w = g.leaf("x", ("b", "t")), g.leaf("w", ("b", "g", "t"))
    ones = [[[1.0, 1.0], [2.0, 2.0]], [[3.0], [4.0]]]
    product = run(g.mul(x, w), on, {x: [[1.0, 10.0], [100.0]], w: ones})
    assert product == [[[1.0, 10.0], [2.0, 20.0]], [[300.0], [400.0]]]


def test_booleans_count_as_numbers_and_division_is_real():
    g = Graph()
    c = g.leaf("c", ("b",), "bool")
    assert run(g.add(c, 1), ROWS, {c: [True, False]}) == [2.0, 1.0]
    assert run(g.mean(c, over=("b",)), ROWS, {c: [True, False]}) == 0.5
    assert run(g.div(7, 2), ROWS, {}) == 3.5


def test_text_compares():
    g = Graph()
    a = g.leaf("a", ("b",), "text")
    assert run(g.eq(a, "x"), ROWS, {a: ["x", "y"]}) == [True, False]
    assert run(g.ne(a, "x"), ROWS, {a: ["x", "y"]}) == [False, True]


# ---- reductions --------------------------------------------------------------------------------------

def test_equal_values_are_exact_in_32_bit():
    g = Graph()
    x = g.leaf("x", ("b", "g"))
    for n in (3, 7, 8, 13):
        on = frame(b=3, g=n)
        for value in (0.95, 0.1, 1e-7, -3.3):
            feed = {x: [[value] * n] * 3}
            exact = torch.tensor(value, dtype=torch.float32).item()
            for dtype, want in ((torch.float32, exact), (torch.float64, value)):
                assert run(g.mean(x, over=("g",)), on, feed, dtype=dtype) == [want] * 3
                assert run(g.mean(x, over=("b", "g")), on, feed, dtype=dtype) == want
                assert run(g.std(x, over=("g",)), on, feed, dtype=dtype) == [0.0] * 3
                assert run(g.std(x, over=("b", "g")), on, feed, dtype=dtype) == 0.0


def test_std_is_unbiased_unless_said():
    g = Graph()
    x = g.leaf("x", ("b", "g"))
    on = frame(b=1, g=4)
    feed = {x: [[1.0, 2.0, 4.0, 5.0]]}
    assert run(g.std(x, over=("g",)), on, feed) == pytest.approx([math.sqrt(10 / 3)])
    assert run(g.std(x, over=("g",), unbiased=False), on, feed) == pytest.approx([math.sqrt(10 / 4)])
    assert run(g.std(x, over=("g",)), frame(b=2, g=1), {x: [[3.0], [4.0]]}) == [0.0, 0.0]


def test_of_nothing():
    g = Graph()
    x, m = g.leaf("x", ("b", "t")), g.leaf("m", ("b", "t"), "bool")
    feed = {x: [[1.0, math.inf, 2.0], [5.0]], m: [[False, False, False], [True]]}
    for op in ("sum", "mean", "max", "min"):
        assert run(g.make(op, x, m, over=("t",)), ROWS, feed) == [0.0, 5.0]
    assert run(g.std(x, m, over=("t",)), ROWS, feed) == [0.0, 0.0]
    assert run(g.count(x, m, over=("t",)), ROWS, feed) == [0.0, 1.0]
    assert run(g.quantile(x, 0.5, m, over=("t",)), ROWS, feed) == [0.0, 5.0]
    assert run(g.any(m, m, over=("t",)), ROWS, feed) == [False, True]
    assert run(g.all(m, m, over=("t",)), ROWS, feed) == [True, True]


def test_infinite_values_stay_infinite():
    g = Graph()
    x = g.leaf("x", ("b", "t"))
    feed = {x: [[1.0, -math.inf, 2.0], [-math.inf]]}
    assert run(g.mean(x, over=("t",)), ROWS, feed) == [-math.inf, -math.inf]


def test_rank_argmax_quantile():
    g = Graph()
    x = g.leaf("x", ("b", "g"))
    on = frame(b=1, g=5)
    feed = {x: [[2.0, 7.0, 2.0, 7.0, 1.0]]}
    assert run(g.rank(x, over=("g",)), on, feed) == [[1.0, 3.0, 1.0, 3.0, 0.0]]
    assert run(g.argmax(x, over=("g",)), on, feed) == [1.0]
    assert run(g.quantile(x, 0.25, over=("g",)), on, feed) == [2.0]
    assert run(g.quantile(x, 0.9, over=("g",)), on, feed) == [7.0]
    assert run(g.quantile(x, 0.6, over=("g",)), on, feed) == pytest.approx([4.0])
    rows = frame(b=3)
    y = g.leaf("y", ("b",))
    assert run(g.argmax(y, over=("b",)), rows, {y: [1.0, 3.0, 3.0]}) == 1.0


def test_where_may_have_more_dims_than_the_value():
    g = Graph()
    s, m = g.leaf("s", ("b",)), g.leaf("m", ("b", "t"), "bool")
    total = g.sum(s, m, over=("b", "t"))
    assert run(total, ROWS, {s: [2.0, 3.0], m: [[True, False, True], [True]]}) == 7.0


# ---- keep --------------------------------------------------------------------------------------------

def test_dropped_samples_take_no_part():
    g = Graph()
    r, x = g.leaf("r", ("b", "g")), g.leaf("x", ("b", "g", "t"))
    keeps = {1: (("b", "g"), [[True, False, True, True]])}
    rs, xs = {r: [[1.0, 9.0, 2.0, 3.0]]}, {x: [[[1.0], [5.0, 6.0], [2.0], [6.0]]]}
    assert run(g.mean(r, over=("g",)), GROUP, rs, keeps) == [3.75]
    assert run(g.mean(r, over=("g",), keep=1), GROUP, rs, keeps) == [2.0]
    assert run(g.count(r, over=("g",), keep=1), GROUP, rs, keeps) == [3.0]
    assert run(g.mean(x, over=("b", "g", "t"), keep=1), GROUP, xs, keeps) == 3.0


def test_a_row_without_samples_takes_no_part():
    g = Graph()
    v, r = g.leaf("v", ("b",)), g.leaf("r", ("b", "g"))
    on = frame(b=3, g=2)
    keeps = {1: (("b", "g"), [[True, False], [True, False], [True, True]]),
             2: (("b", "g"), [[False, True], [True, True], [True, True]])}
    values = {v: [1.0, 10.0, 100.0], r: [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]}
    assert run(g.sum(v, over=("b",), keep=1), on, values, keeps) == 111.0
    assert run(g.sum(v, over=("b",), keep=2), on, values, keeps) == 110.0
    assert run(g.mean(v, over=("b",), keep=2), on, values, keeps) == 55.0
    assert run(g.sum(r, over=("b", "g"), keep=2), on, values, keeps) == 14.0


def test_a_keep_of_another_root_has_no_say():
    g = Graph()
    on = Frame({"b": torch.arange(2), "p": torch.arange(2)}, {}, {}, {}, {"b": 2, "p": 2})
    v = g.leaf("v", ("b",))
    assert run(g.sum(v, over=("b",), keep=1), on, {v: [1.0, 2.0]}, {1: (("p",), [False, True])}) == 3.0


# ---- along tokens ------------------------------------------------------------------------------------

def test_rows_end_where_they_end():
    g = Graph()
    x, s = g.leaf("x", ("b", "t")), g.leaf("s", ("b",))
    xs = [[1.0, 2.0, 4.0], [8.0]]
    assert run(g.next(x, over=("t",)), ROWS, {x: xs}) == [[2.0, 4.0, 0.0], [0.0]]
    assert run(g.at_end(s, over=("t",), dims=("b", "t")), ROWS, {s: [5.0, 6.0]}) == [[0.0, 0.0, 5.0], [6.0]]
    assert run(g.togo(x, 0.5, over=("t",)), ROWS, {x: xs}) == [[3.0, 4.0, 4.0], [8.0]]
    d = g.leaf("d", ("b", "t"))
    assert run(g.togo(x, d, over=("t",)), ROWS, {x: xs, d: [[2.0, 3.0, 9.0], [9.0]]}) == [[29.0, 14.0, 4.0], [8.0]]
    assert run(g.togo(x, s, over=("t",)), ROWS, {x: xs, s: [1.0, 7.0]}) == [[7.0, 6.0, 4.0], [8.0]]


def test_togo_does_not_leak_into_other_rows():
    g = Graph()
    x = g.leaf("x", ("b", "t"))
    on = frame(b=3, t=[2, 2, 1])
    found = run(g.togo(x, 1.0, over=("t",)), on, {x: [[1.0, 2.0], [math.nan, math.inf], [3.0]]})
    assert found[0] == [3.0, 2.0] and found[2] == [3.0]


def test_length_counts_own_tokens():
    g = Graph()
    y = g.leaf("y", ("b", "t"), "tokens")
    sequences = Sequences(torch.arange(9), torch.tensor([1, 1]), torch.tensor([4, 3]))
    env = {y: Value(("b", "t"), sequences)}
    length = Evaluator(ROWS, SoloReducer()).evaluate(g.length(y, over=("t",)), env)
    assert to_lists(length, ROWS) == [3.0, 1.0]


# ---- gradients ---------------------------------------------------------------------------------------

def test_ties_of_extremes_share_equally():
    g = Graph()
    on = frame(b=2, t=[2, 2])
    x = g.leaf("x", ("b", "t"), grad=True)
    objective = g.add(g.sum(g.minimum(x, -1.0), over=("b", "t")), g.sum(g.clip(x, -2.0, -1.0), over=("b", "t")))
    at = [[-1.0, -0.5], [-2.0, -3.0]]
    assert run(objective, on, {x: at}) == -13.0
    assert gradient(objective, on, x, at) == [[1.5, 0.0], [2.0, 1.0]]
    three = g.sum(g.maximum(x, g.neg(x), g.mul(x, 1.0)), over=("b", "t"))
    for row in gradient(three, on, x, [[0.0, 1.0], [0.0, 2.0]]):
        assert row == pytest.approx([1 / 3, 1.0])
    for dims in (("b", "t"), ("t",)):
        top = g.max(x, over=dims)
        total = top if len(dims) == 2 else g.sum(top, over=("b",))
        want = [[0.5, 0.5], [0.0, 0.0]] if len(dims) == 2 else [[0.5, 0.5], [1.0, 0.0]]
        assert gradient(total, on, x, [[3.0, 3.0], [2.0, 1.0]]) == want


def test_gradients_at_kinks_are_zero():
    g = Graph()
    on = frame(b=3)
    x = g.leaf("x", ("b",), grad=True)
    assert gradient(g.sum(g.abs(x), over=("b",)), on, x, [0.0, -2.0, 3.0]) == [0.0, -1.0, 1.0]
    assert gradient(g.sum(g.sqrt(x), over=("b",)), on, x, [0.0, 4.0, 1.0]) == [0.0, 0.25, 0.5]
    assert gradient(g.std(x, over=("b",)), on, x, [0.7, 0.7, 0.7]) == [0.0, 0.0, 0.0]
    assert gradient(g.sum(g.mul(x, g.stop(x)), over=("b",)), on, x, [1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("inner", ["log", "sqrt", "div", "pow", "chain"])
def test_where_ignores_the_branch_not_taken(inner):
    g = Graph()
    on = frame(b=3)
    x = g.leaf("x", ("b",), grad=True)
    branch = {
        "log": lambda: g.log(x), "sqrt": lambda: g.sqrt(g.mul(x, x)), "div": lambda: g.div(1.0, x),
        "pow": lambda: g.pow(x, -2.0), "chain": lambda: g.mul(g.exp(g.div(1.0, g.mul(x, x))), g.log(x)),
    }[inner]()
    safe = g.sum(g.where(g.ne(x, 0.0), branch, x), over=("b",))
    at, step = [0.0, 0.25, 0.5], 1e-6

    def value(h):
        return run(safe, on, {x: [at[0], at[1] + h, at[2]]})

    found = gradient(safe, on, x, at)
    assert found[0] == 1.0
    assert found[1] == pytest.approx((value(step) - value(-step)) / (2 * step), rel=1e-6)


def test_masked_elements_need_not_be_finite():
    g = Graph()
    on = frame(b=1, g=3)
    x, a, m = g.leaf("x", ("b", "g"), grad=True), g.leaf("a", ("b", "g")), g.leaf("m", ("b", "g"), "bool")
    feeds = {a: [[1.0, math.inf, 2.0]], m: [[True, False, True]]}
    total = g.sum(g.mul(x, a), m, over=("b", "g"))
    assert gradient(total, on, x, [[1.0, 1.0, 1.0]], feeds) == [[1.0, 0.0, 2.0]]
    kept = g.sum(g.mul(x, a), over=("b", "g"), keep=1)
    keeps = {1: (("b", "g"), [[True, False, True]])}
    assert gradient(kept, on, x, [[1.0, 1.0, 1.0]], {a: feeds[a]}, keeps) == [[1.0, 0.0, 2.0]]


def test_log_sigmoid_is_stable():
    g = Graph()
    on = frame(b=2)
    x = g.leaf("x", ("b",), grad=True)
    assert run(g.log_sigmoid(x), on, {x: [-1000.0, 1000.0]}) == [-1000.0, 0.0]
    assert gradient(g.sum(g.log_sigmoid(x), over=("b",)), on, x, [-1000.0, 1000.0]) == [1.0, 0.0]


# ---- the evaluator -----------------------------------------------------------------------------------

def test_deep_graphs_need_no_recursion():
    g = Graph()
    x = g.leaf("x", ("b",))
    total = x
    for i in range(5000):
        total = g.add(total, float(i % 3))
    assert run(total, frame(b=1), {x: [1.0]}) == [1.0 + sum(i % 3 for i in range(5000))]


def test_values_found_are_remembered():
    g = Graph()
    x = g.leaf("x", ("b",))
    square, env = g.mul(x, x), {x: Value(("b",), torch.ones(2, dtype=torch.float64))}
    first = Evaluator(frame(b=2), SoloReducer()).evaluate(g.add(square, 1.0), env)
    assert square in env and Evaluator(frame(b=2), SoloReducer()).evaluate(g.add(square, 1.0), env) is first


def test_a_missing_leaf_is_named():
    g = Graph()
    with pytest.raises(RuntimeError, match="call.*logp"):
        Evaluator(frame(b=1), SoloReducer()).evaluate(g.exp(g.leaf("logp", ("b",))), {})


def test_a_micro_batch_knows_only_sums():
    g = Graph()
    x = g.leaf("x", ("b",), grad=True)
    on = frame(b=2)
    partial = Evaluator(on, SoloReducer(), partial=True)
    env = {x: Value(("b",), torch.tensor([1.0, 2.0], dtype=torch.float64))}
    assert partial.evaluate(g.sum(x, over=("b",)), dict(env)).data.tolist() == [3.0]
    with pytest.raises(RuntimeError, match="mean"):
        partial.evaluate(g.mean(x, over=("b",)), dict(env))
    with pytest.raises(RuntimeError, match="sum"):
        partial.evaluate(g.sum(g.stop(x), over=("b",)), dict(env))


def test_not_finite_is_placed():
    on = frame(b=3, g=2, t=[[1, 2], [2, 1], [1, 1]], start=10)
    dims = ("b", "g", "t")
    value = from_lists([[[1.0], [2.0, 3.0]], [[4.0, math.nan], [5.0]], [[6.0], [math.inf]]], dims, on)
    keep = from_lists([[True, True], [False, True], [True, True]], ("b", "g"), on, "bool")
    evaluator = Evaluator(on, SoloReducer(), keeps={1: keep})
    assert evaluator.check_finite(value).place == {"b": 11, "g": 0, "t": 1}
    found = evaluator.check_finite(value, keep=1)
    assert found.place == {"b": 12, "g": 1, "t": 0} and found.number == math.inf
    assert evaluator.check_finite(Value(("b",), torch.ones(3))) is None
