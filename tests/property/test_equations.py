"""Every kernel against plain loops on random ragged rows; nothing depends on shards, row order, or micro-batches."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.evaluator import Evaluator
from runtime.reducers import SoloReducer
from runtime.values import Frame, Value
from tests.equations import Graph, frame, sharded

SETTINGS = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
NUMBERS = st.integers(-192, 192).map(lambda n: n / 64) | st.integers(-2, 2).map(float)  # often equal
DIMS = [(), ("g",), ("b",), ("b", "g"), ("b", "g", "t")]
REDUCTIONS = ("sum", "mean", "std", "max", "min", "argmax", "rank", "quantile", "count", "any", "all")


@st.composite
def frames(draw, rows=st.integers(1, 5)):
    b, g = draw(rows), draw(st.integers(1, 3))
    return frame(b=b, g=g, t=[[draw(st.integers(1, 4)) for _ in range(g)] for _ in range(b)])


def coordinates(on: Frame, dims):
    """All coordinates of `dims`, row-major: plain loops over what the frame says."""
    lengths = on.lengths["t"].tolist()
    if dims and dims[-1] == "t":
        return [(*c, k) for i, c in enumerate(coordinates(on, dims[:-1])) for k in range(lengths[i])]
    return list(itertools.product(*(range(on.size(d)) for d in dims)))


@st.composite
def values(draw, on, dims, elements=NUMBERS):
    return [draw(elements) for _ in coordinates(on, dims)]


def value(dims, flat, dtype=torch.float64):
    return Value(dims, torch.tensor(flat, dtype=torch.bool if flat and isinstance(flat[0], bool) else dtype))


def table(on, dims, flat):
    return dict(zip(coordinates(on, dims), flat))


def project(coordinate, dims, onto):
    return tuple(c for c, d in zip(coordinate, dims) if d in onto)


def kept(on, dims, masks):
    """Whether each coordinate of `dims` is left by all masks, a list of (dims, table): a sample of its row must be."""
    grid = ("b", "g")
    left = {c for c in coordinates(on, grid) if all(m[project(c, grid, d)] for d, m in masks)}
    known = tuple(d for d in dims if d in grid)
    alive = {project(c, grid, known) for c in left}
    return {c: "b" not in dims or project(c, dims, known) in alive for c in coordinates(on, dims)}


def reduce_plainly(op, xs, q, unbiased):
    """A reduction of a list of (place, number)."""
    numbers = [x for _, x in xs]
    n = len(numbers)
    if op == "count":
        return n
    if not n:
        return op == "all" if op in ("any", "all") else 0.0
    mean = sum(numbers) / n
    if op == "std":
        return math.sqrt(sum((x - mean) ** 2 for x in numbers) / max(n - 1 if unbiased else n, 1))
    if op == "quantile":
        ordered, at = sorted(numbers), q * (n - 1)
        low = ordered[math.floor(at)]
        return low + (ordered[math.ceil(at)] - low) * (at - math.floor(at))
    if op == "argmax":
        return next(place for place, x in xs if x == max(numbers))
    return {"sum": sum(numbers), "mean": mean, "max": max(numbers), "min": min(numbers),
            "any": any(numbers), "all": all(numbers)}[op]


@st.composite
def reductions(draw, op):
    """A reduction with everything it may have: where, keeps, and up to four shards of the rows in any order."""
    on = draw(frames(st.integers(1, 6)))
    dims = draw(st.sampled_from([("b", "g", "t"), ("b", "g"), ("b",), ("g",)]))
    over = draw(st.sampled_from([dims, *[dims[i:] for i in range(len(dims))], *[("b",)] * (dims == ("b", "g"))]))
    elements = st.booleans() if op in ("any", "all") else NUMBERS
    x = draw(values(on, dims, elements))
    where_dims = draw(st.sampled_from([None, *[d for d in DIMS if set(d) <= set(dims)]]))
    where = None if where_dims is None else (where_dims, draw(values(on, where_dims, st.booleans())))
    mask_dims = draw(st.lists(st.sampled_from([("b",), ("b", "g")]), max_size=2))
    masks = [(d, draw(values(on, d, st.booleans()))) for d in mask_dims]
    order = draw(st.permutations(range(on.size("b"))))
    owner = draw(st.lists(st.integers(0, 3), min_size=len(order), max_size=len(order)))
    shards = [[r for r in order if owner[r] == shard] for shard in range(max(owner) + 1)]
    return on, dims, over, x, where, masks, draw(st.floats(0, 1)), draw(st.booleans()), shards


@pytest.mark.parametrize("op", REDUCTIONS)
@settings(SETTINGS, max_examples=40)
@given(data=st.data())
def test_reductions_equal_plain_loops(op, data):
    on, dims, over, x, where, masks, q, unbiased, shards = data.draw(reductions(op))
    g = Graph()
    leaf = g.leaf("x", dims, "bool" if op in ("any", "all") else "f32")
    env, part = {leaf: value(dims, x)}, kept(on, dims, [(d, table(on, d, m)) for d, m in masks])
    args = [leaf, q] if op == "quantile" else [leaf]
    if where is not None:
        args.append(g.leaf("m", where[0], "bool"))
        env[args[-1]] = value(*where)
        chosen = table(on, *where)
        part = {c: k and chosen[project(c, dims, where[0])] for c, k in part.items()}
    attrs = {"unbiased": unbiased} if op == "std" else {}
    expr = g.make(op, *args, over=over, keep=len(masks), **attrs)
    keeps = {i + 1: value(*mask) for i, mask in enumerate(masks)}

    rest = tuple(d for d in dims if d not in over)
    groups = {c: [] for c in coordinates(on, rest)}
    everyone = {c: [] for c in groups}
    for c, number in table(on, dims, x).items():
        key = project(c, dims, rest)
        everyone[key].append(c)
        if part[c]:
            groups[key].append((len(everyone[key]) - 1, number))
    if op == "rank":
        want = {c: sum(y < number for _, y in groups[project(c, dims, rest)])
                for c, number in table(on, dims, x).items()}
    else:
        want = {c: reduce_plainly(op, xs, q, unbiased) for c, xs in groups.items()}
    compare(on, sharded(expr, on, env, keeps, shards), want)


def compare(on, found, want):
    """Each shard's value against the expected ones at the coordinates of its rows."""
    seen = set()
    for local, result in found:
        rows = local.rows["b"].tolist()
        for c, number in zip(coordinates(local, result.dims), result.data.tolist()):
            at = tuple(rows[i] if d == "b" else i for d, i in zip(result.dims, c))
            assert number == pytest.approx(want[at], rel=1e-9, abs=1e-9), at
            seen.add(at)
    assert seen == set(want)


ELEMENTWISE = {  # None: not defined there
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y if y else None, "pow": lambda x, y: x ** y if x > 0 else None,
    "minimum": lambda x, y: min(x, y), "maximum": lambda x, y, z: max(x, y, z), "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y, "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y, "neg": lambda x: -x, "exp": lambda x: math.exp(x),
    "log": lambda x: math.log(x) if x > 0 else None,
    "sqrt": lambda x: math.sqrt(x) if x >= 0 else None, "abs": lambda x: abs(x), "sign": lambda x: (x > 0) - (x < 0),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)), "log_sigmoid": lambda x: -math.log(1 + math.exp(-x)),
    "stop": lambda x: x,
    "clip": lambda x, low, high: max(low, min(x, high)) if low <= high else None,
    "where": lambda c, x, y: x if c else y, "and": lambda x, y: x and y, "or": lambda x, y: x or y,
    "not": lambda x: not x,
}
BOOLEAN_ARGS = {"and": (0, 1), "or": (0, 1), "not": (0,), "where": (0,)}


@SETTINGS
@given(st.data())
def test_elementwise_equals_plain_loops(data):
    on, g = data.draw(frames()), Graph()
    dims = data.draw(st.sampled_from(DIMS))
    for op, plain in ELEMENTWISE.items():
        leaves, env = [], {}
        for i in range(plain.__code__.co_argcount):
            own = data.draw(st.sampled_from([d for d in DIMS if set(d) <= set(dims)])) if i else dims
            boolean = i in BOOLEAN_ARGS.get(op, ())
            leaves.append(g.leaf(f"{op}{i}", own, "bool" if boolean else "f32"))
            env[leaves[-1]] = value(own, data.draw(values(on, own, st.booleans() if boolean else NUMBERS)))
        tables = [table(on, leaf.type.dims, env[leaf].data.tolist()) for leaf in leaves]
        found = Evaluator(on, SoloReducer()).evaluate(g.make(op, *leaves), env)
        for c, number in zip(coordinates(on, dims), found.data.tolist()):
            want = plain(*(t[project(c, dims, leaf.type.dims)] for t, leaf in zip(tables, leaves)))
            assert want is None or number == pytest.approx(want, rel=1e-9, abs=1e-9), op


@SETTINGS
@given(st.data())
def test_walks_along_tokens_equal_plain_loops(data):
    on, g, dims = data.draw(frames()), Graph(), ("b", "g", "t")
    d_dims = data.draw(st.sampled_from(DIMS))
    x, d, s = g.leaf("x", dims), g.leaf("d", d_dims), g.leaf("s", ("b", "g"))
    env = {leaf: value(leaf.type.dims, data.draw(values(on, leaf.type.dims))) for leaf in (x, d, s)}
    xs, ds, ss = (table(on, leaf.type.dims, env[leaf].data.tolist()) for leaf in (x, d, s))
    togo, following, at_end = {}, {}, {}
    for *row, k in reversed(coordinates(on, dims)):
        c, after = (*row, k), (*row, k + 1)
        following[c] = xs.get(after, 0.0)
        at_end[c] = 0.0 if after in xs else ss[tuple(row)]
        togo[c] = xs[c] + (ds[project(c, dims, d_dims)] * togo[after] if after in togo else 0.0)
    whole_and_nothing = [list(range(on.size("b"))), []]
    for expr, want in ((g.togo(x, d, over=("t",)), togo), (g.next(x, over=("t",)), following),
                       (g.at_end(s, over=("t",), dims=dims), at_end)):
        compare(on, sharded(expr, on, env, {}, whole_and_nothing), want)


def smooth_objective(g: Graph, x, old, a, keep: int = 0, mean=None):
    """A clipped objective, and reductions over tokens, togo and a statistic of constants between it and the outputs."""
    every = ("b", "g", "t")
    mean = mean or (lambda e: g.mean(e, over=e.type.dims, keep=keep))
    adv = g.div(g.sub(a, g.mean(a, over=("g",), keep=keep)), g.add(g.std(a, over=("b", "g"), keep=keep), 0.1))
    ratio = g.exp(g.sub(x, old))
    token = g.minimum(g.mul(ratio, adv), g.mul(g.clip(ratio, 0.8, 1.3), adv))
    sequence = g.mul(g.std(g.togo(x, 0.9, over=("t",)), over=("t",)), g.max(x, over=("t",)))
    spread = g.where(g.gt(adv, 0.0), g.log_sigmoid(g.mul(adv, g.quantile(x, 0.4, over=("t",)))), adv)
    assert ratio.type.dims == every
    return g.add(mean(token), g.add(mean(sequence), mean(spread)))


def case(data):
    on, g = data.draw(frames()), Graph()
    x, old, a = g.leaf("x", ("b", "g", "t"), grad=True), g.leaf("old", ("b", "g", "t")), g.leaf("a", ("b", "g"))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    env = {leaf: Value(leaf.type.dims, torch.randn(on.numel(leaf.type.dims), generator=generator, dtype=torch.float64))
           for leaf in (x, old, a)}
    keep = {1: value(("b", "g"), data.draw(values(on, ("b", "g"), st.booleans())))} if data.draw(st.booleans()) else {}
    return on, g, x, old, a, env, keep


@settings(SETTINGS, max_examples=25)
@given(st.data())
def test_gradients_equal_finite_differences(data):
    on, g, x, old, a, env, keeps = case(data)
    objective = smooth_objective(g, x, old, a, len(keeps))
    at = env[x].data.clone().requires_grad_()

    def f(v):
        return Evaluator(on, SoloReducer(), keeps=keeps).evaluate(objective, {**env, x: Value(x.type.dims, v)}).data

    f(at).backward()
    for i in range(at.numel()):
        step = torch.zeros_like(at.data)
        step[i] = 1e-6
        assert at.grad[i].item() == pytest.approx((f(at.data + step) - f(at.data - step)).item() / 2e-6, abs=2e-5)


@settings(SETTINGS, max_examples=40)
@given(st.data())
def test_micro_batches_sum_to_the_gradient_of_the_whole(data):
    on, g, x, old, a, env, keeps = case(data)
    keep = len(keeps)
    at = env[x].data.clone().requires_grad_()
    objective = smooth_objective(g, x, old, a, keep)
    whole = Evaluator(on, SoloReducer(), keeps=keeps).evaluate(objective, {**env, x: Value(x.type.dims, at)}).data
    whole.backward()

    partial, statistics = split(g, x, old, a, keep)
    before = Evaluator(on, SoloReducer(), keeps=keeps)
    again = env[x].data.clone().requires_grad_()
    known = {**env, **{e: before.evaluate(e, dict(env)) for e in statistics}, x: Value(x.type.dims, again)}
    total = 0.0
    for part in micro_batches(data, on):
        masks = {i: part.value(m) for i, m in keeps.items()}
        evaluator = Evaluator(part.frame, SoloReducer(), keeps=masks, partial=True)
        value_here = evaluator.evaluate(partial, {e: part.value(v) for e, v in known.items()}).data
        value_here.backward()
        total += value_here.item()
    assert total == pytest.approx(whole.item(), rel=1e-9, abs=1e-12)
    assert torch.allclose(again.grad, at.grad, rtol=1e-9, atol=1e-12)


def split(g: Graph, x, old, a, keep):
    """As the compiler does: means become local sums over counts; counts and group statistics are known before."""
    counts = {}

    def mean(e):
        count = counts.setdefault(e.type.dims, g.count(g.stop(e), over=e.type.dims, keep=keep))
        return g.div(g.sum(e, over=e.type.dims, keep=keep), g.maximum(count, 1.0))

    partial = smooth_objective(g, x, old, a, keep, mean)
    return partial, [*counts.values(), g.mean(a, over=("g",), keep=keep), g.std(a, over=("b", "g"), keep=keep)]


def micro_batches(data, on):
    """The rows, or the samples, in any order, a few at a time."""
    samples = data.draw(st.booleans())
    units = on.numel(("b", "g")) if samples else on.size("b")
    order = torch.tensor(data.draw(st.permutations(range(units))))
    for chosen in order.split(data.draw(st.integers(1, 3))):
        yield on.select_units(("b", "g"), chosen) if samples else on.select("b", chosen)
