"""The counter-based generator against plain Python integers."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import draws

M = 2 ** 64


def mix(z):
    z = (z + 0x9E3779B97F4A7C15) % M
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % M
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % M
    return z ^ (z >> 31)


def key(seed, name, *values):
    text = 0xCBF29CE484222325
    for byte in name.encode():
        text = (text ^ byte) * 0x100000001B3 % M
    h = mix(seed % M)
    for value in (text, *values):
        h = mix(h ^ (value % M))
    return h


INT = st.integers(-2 ** 63, 2 ** 63 - 1)


def test_known_values():
    assert draws.fnv1a64("") == 0xCBF29CE484222325
    assert draws.fnv1a64("a") == 0xAF63DC4C8601EC8C  # published test vector
    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 from seed 0
    assert draws.key(0, "y").tolist() == [key(0, "y")]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2 ** 70), st.text(max_size=8), INT, st.lists(st.tuples(INT, INT, INT), min_size=1, max_size=5))
def test_uniform_equals_plain_integers(seed, name, iteration, places):
    rows, samples, positions = (np.array(x, dtype=np.int64) for x in zip(*places))
    want = [(key(seed, name, iteration, *place) >> 11) * 2.0 ** -53 for place in places]
    assert draws.uniform(seed, name, iteration, rows, samples, positions).tolist() == want
    made = draws.Draws(seed, name, iteration, rows, samples)
    assert made.at(np.arange(len(places)), positions).tolist() == want
    assert made.at(np.array([0]), positions[:1]).tolist() == want[:1]


def test_uniform_is_uniform_and_every_name_counts():
    base = dict(seed=1, name="y", iteration=2, rows=np.arange(20000), samples=0, positions=0)
    u = draws.uniform(**base)
    assert 0 <= u.min() and u.max() < 1 and abs(u.mean() - 0.5) < 0.01 and abs(u.std() - 12 ** -0.5) < 0.01
    for change in (dict(seed=2), dict(name="z"), dict(iteration=3), dict(samples=1), dict(positions=1)):
        v = draws.uniform(**{**base, **change})
        assert not np.any(u == v) and abs(np.corrcoef(u, v)[0, 1]) < 0.03


def test_permutation():
    first = draws.permutation(1000, 0, "b", 0)
    assert sorted(first.tolist()) == list(range(1000))
    assert first.tolist() == sorted(range(1000), key=lambda i: key(0, "b", 0, i))
    assert first.tolist() != draws.permutation(1000, 0, "b", 1).tolist()
    assert draws.permutation(0, 0, "b").tolist() == []
