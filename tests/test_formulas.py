"""Formulas of the literature, evaluated by hand-built expressions: values and gradients by numbers from plain loops."""

import pytest
import torch

from runtime.values import Frame
from tests.equations import Graph, frame, gradient, run

ROWS = frame(b=2, t=[3, 1])


def test_gae_of_rows_of_different_lengths():
    g = Graph()
    r, v = g.leaf("r", ("b", "t")), g.leaf("v", ("b", "t"))
    delta = g.sub(g.add(r, g.mul(1.0, g.next(v, over=("t",)))), v)
    a = g.togo(delta, g.mul(1.0, 0.95), over=("t",))
    feed = {r: [[0.0, 1.0], [0.5, -0.25, 2.0]], v: [[0.0, 0.0], [0.3, 0.1, -0.7]]}
    on = frame(b=2, t=[2, 3])
    found = run(a, on, feed)
    assert found[0] == pytest.approx([0.95, 1.0]) and found[1] == pytest.approx([1.73925, 1.515, 2.7])
    returns = run(g.add(a, v), on, feed)
    assert returns[1] == pytest.approx([2.03925, 1.615, 2.0])


def whiten(g, x):
    over = x.type.dims
    d, s = g.sub(x, g.mean(x, over=over)), g.std(x, over=over)
    return g.where(g.lt(g.count(d, over=over), 2.0), x, g.where(g.gt(s, 0.0), g.div(d, s), 0.0))


def test_whiten():
    g = Graph()
    x = g.leaf("x", ("b", "t"))
    found = run(whiten(g, x), ROWS, {x: [[1.0, 2.0, 4.0], [-1.0]]})
    assert found[0] == pytest.approx([-0.240192231, 0.240192231, 1.200961154])
    assert found[1] == pytest.approx([-1.200961154])
    assert run(whiten(g, x), frame(b=1, t=[1]), {x: [[-1.5]]}) == [[-1.5]]
    assert run(whiten(g, x), ROWS, {x: [[0.3, 0.3, 0.3], [0.3]]}, dtype=torch.float32) == [[0.0, 0.0, 0.0], [0.0]]


def test_masked_mean():
    g = Graph()
    x = g.leaf("x", ("b", "t"))
    on, feed = frame(b=2, t=[2, 1]), {x: [[-1.5, -0.5], [-2.5]]}
    assert run(g.mean(x, g.lt(x, -1.0), over=("b", "t")), on, feed) == -2.0
    assert run(g.mean(x, g.gt(x, 5.0), over=("b", "t")), on, feed) == 0.0


def test_score_at_the_end_of_own_tokens():
    g = Graph()
    score, logp = g.leaf("score", ("b",)), g.leaf("logp", ("b", "t"))
    on = frame(b=2, t=[2, 3])
    r = g.add(g.at_end(score, over=("t",), dims=("b", "t")), logp)
    feed = {score: [1.0, 2.0], logp: [[-1.0, -2.0], [-0.5, -0.5, -0.5]]}
    assert run(r, on, feed) == [[-1.0, -1.0], [-0.5, -0.5, 1.5]]
    assert run(g.sum(r, over=("t",)), on, feed) == [-2.0, 0.5]


def test_group_advantage_and_its_gradient_below_a_keep():
    """DAPO's dynamic sampling: the group that teaches nothing is dropped from every denominator (arXiv 2503.14476)."""
    g = Graph()
    r, old = g.leaf("r", ("b", "g")), g.leaf("old", ("b", "g", "t"))
    new = g.leaf("new", ("b", "g", "t"), grad=True)
    every = ("b", "g", "t")
    adv = g.div(g.sub(r, g.mean(r, over=("g",), keep=1)), g.add(g.std(r, over=("g",), keep=1), 1e-6))
    ratio = g.exp(g.sub(new, old))
    objective = g.mean(g.minimum(g.mul(ratio, adv), g.mul(g.clip(ratio, 0.8, 1.28), adv)), over=every, keep=1)
    on = frame(b=2, g=4, t=[[2, 1, 3, 2], [1, 2, 1, 4]])
    feeds = {
        r: [[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]],
        old: [[[-0.5261, -0.5378], [-1.439], [-0.5449, -0.6545, -0.1635], [-1.4553, -1.3388]],
              [[-1.73], [-1.9625, -1.0963], [-0.6439], [-1.3609, -1.6369, -1.5799, -1.5523]]],
    }
    at = [[[-0.6444, -0.764], [-1.2339], [-0.4034, -0.8299, -0.4593], [-1.6481, -1.0521]],
          [[-1.8954], [-1.8812, -1.093], [-0.5285], [-1.4696, -1.4533, -1.5187, -1.7405]]]
    keeps = {1: (("b",), [True, False])}
    assert run(objective, on, {**feeds, new: at}, keeps) == pytest.approx(0.012731084, abs=1e-8)
    found = gradient(objective, on, new, at, feeds, keeps)
    want = [[-0.096175146, 0.0], [0.132896545], [0.124707497, 0.090837389, 0.080533317], [-0.08927049, -0.144195637]]
    for row, wanted in zip(found[0], want):
        assert row == pytest.approx(wanted, abs=1e-8)
    assert found[1] == [[0.0], [0.0, 0.0], [0.0], [0.0] * 4]


def close(found, want, tolerance=1e-8):
    """Nested lists, compared number by number."""
    if isinstance(want, list):
        return len(found) == len(want) and all(close(f, w, tolerance) for f, w in zip(found, want))
    return abs(found - want) <= tolerance


def test_clipped_objective_of_ppo():
    """arXiv 1707.06347, eq. 7, the mean over all tokens of the mini-batch."""
    g = Graph()
    adv, old, new = g.leaf("adv", ("b",)), g.leaf("old", ("b", "t")), g.leaf("new", ("b", "t"), grad=True)
    ratio = g.exp(g.sub(new, old))
    objective = g.mean(g.minimum(g.mul(ratio, adv), g.mul(g.clip(ratio, 0.8, 1.2), adv)), over=("b", "t"))
    on = frame(b=2, t=[10, 6])
    feeds = {adv: [1.3, -0.7], old: [
        [-1.9532, -0.6561, -1.6857, -0.076, -1.2104, -0.5614, -0.34, -1.6113, -1.9468, -1.0349],
        [-1.8937, -1.2438, -0.9691, -0.428, -0.7171, -1.1498]]}
    at = [[-2.4485, -0.5922, -1.4022, 0.3526, -1.1016, -1.0554, -0.3481, -1.72, -2.4239, -1.0979],
          [-1.4034, -1.7431, -0.9778, -0.3784, -0.6474, -1.0478]]
    assert run(objective, on, {**feeds, new: at}) == pytest.approx(0.460340007, abs=1e-9)
    assert close(gradient(objective, on, new, at, feeds), [
        [0.04951278, 0.086611346, 0.0, 0.0, 0.090588821,
         0.049577189, 0.080594533, 0.072881208, 0.050422163, 0.076289157],
        [-0.071435262, 0.0, -0.043371026, -0.045974717, -0.046908158, -0.048448027]])


def test_sequence_ratio_of_gspo():
    """arXiv 2507.18071: the mean over a response's tokens stands inside the exponential."""
    g = Graph()
    adv, old = g.leaf("adv", ("b", "g")), g.leaf("old", ("b", "g", "t"))
    new = g.leaf("new", ("b", "g", "t"), grad=True)
    ratio = g.exp(g.mean(g.sub(new, old), over=("t",)))
    objective = g.mean(g.minimum(g.mul(ratio, adv), g.mul(g.clip(ratio, 0.9, 1.1), adv)), over=("b", "g"))
    on = frame(b=1, g=2, t=[[2, 4]])
    feeds = {adv: [[0.8, -0.6]], old: [[[-0.6239, -0.3847], [-0.7096, -0.1475, -0.5691, -0.7163]]]}
    at = [[[-0.4796, -0.411], [-0.4774, -0.2743, -0.1817, -0.664]]]
    assert run(objective, on, {**feeds, new: at}) == pytest.approx(0.080510996, abs=1e-9)
    assert close(gradient(objective, on, new, at, feeds), [[[0.212155048] * 2, [-0.085949775] * 4]])


def test_k3_estimator():
    g = Graph()
    ref, new = g.leaf("ref", ("b", "t")), g.leaf("new", ("b", "t"), grad=True)
    d = g.sub(ref, new)
    loss = g.mean(g.sub(g.sub(g.exp(d), 1.0), d), over=("b", "t"))
    on, feeds = frame(b=2, t=[3, 2]), {ref: [[-1.6274, -0.6916, -0.7758], [-1.1505, -1.3939]]}
    at = [[-1.2243, -1.1381, -0.5546], [-1.2718, -1.799]]
    assert run(loss, on, {**feeds, new: at}) == pytest.approx(0.06249006, abs=1e-8)
    want = [[0.066350946, -0.112566538, 0.039688729], [-0.02579271, -0.099890488]]
    assert close(gradient(loss, on, new, at, feeds), want)


def test_mean_of_means_weighs_rows_equally():
    g = Graph()
    x = g.leaf("x", ("b", "t"), grad=True)
    on, at = frame(b=2, t=[4, 1]), [[-0.2633, -0.5141, -1.4661, -1.3928], [-1.3584]]
    rows = g.mean(g.mean(x, over=("t",)), over=("b",))
    assert run(g.mean(x, over=("b", "t")), on, {x: at}) == pytest.approx(-0.99894)
    assert run(rows, on, {x: at}) == pytest.approx(-1.1337375)
    assert gradient(rows, on, x, at) == [[0.125] * 4, [0.5]]


def test_two_root_dims_have_a_denominator_each():
    g = Graph()
    adv, y = g.leaf("adv", ("b",)), g.leaf("y", ("b", "t"), grad=True)
    corpus = g.leaf("corpus", ("p", "u"), grad=True)
    objective = g.add(g.mean(g.mul(y, adv), over=("b", "t")), g.mul(2.0, g.mean(corpus, over=("p", "u"))))
    lengths = {"t": torch.tensor([2, 1]), "u": torch.tensor([3, 1, 2])}
    on = Frame({"b": torch.arange(2), "p": torch.arange(3)}, {}, lengths, {"t": ("b",), "u": ("p",)}, {"b": 2, "p": 3})
    ys, texts = [[-1.1095, -0.8613], [-1.0321]], [[-0.1379, -0.5161, -0.0198], [-0.5586], [-0.8513, -1.1141]]
    assert run(objective, on, {adv: [1.0, -1.0], y: ys, corpus: texts}) == pytest.approx(-1.378833333)
    third = 1 / 3
    assert close(gradient(objective, on, y, ys, {adv: [1.0, -1.0], corpus: texts}), [[third, third], [-third]])
    assert close(gradient(objective, on, corpus, texts, {adv: [1.0, -1.0], y: ys}), [[third] * 3, [third], [third] * 2])


def test_leave_one_out_baseline():
    g = Graph()
    r = g.leaf("r", ("b", "g"))
    adv = g.sub(r, g.div(g.sub(g.sum(r, over=("g",)), r), g.sub(3.0, 1.0)))
    assert run(adv, frame(b=1, g=3), {r: [[1.0, 2.0, 3.0]]}) == [[-1.5, 0.0, 1.5]]
