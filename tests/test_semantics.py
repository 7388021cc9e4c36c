"""What every plan keeps: a check for each of the ten rules of docs/language.md, and mistakes that it must see.

Each check is run as it is, and once more for every mistake planted in the implementation: then it has to fail. What
models compute is not here (rules 1, 5 and 6 with real engines: `tests/distributed`, `tests/test_oracle.py`).
"""

from __future__ import annotations

import math
from typing import Any, Callable, Iterator

import numpy as np
import pytest
import torch

import compiler.emit
import compiler.passes.fuse
import runtime.executor.update
from compiler.compile import compile_program, lower_equations
from compiler.plan import Forward, Plan, TrainStep, UpdateLoop
from rlhf_dsl.frontend import loads
from rlhf_dsl.typed import Interner
from runtime.context import Context
from runtime.draws import Draws, uniform
from runtime.feeds.command import evaluated
from runtime.feeds.engine import FeedEngine
from runtime.feeds.feed import feed_of
from runtime.kernels import KERNELS
from tests.compiling import CLUSTER

HEAD = """
dim b  = 6
dim g  = 2
dim t <= 4
data q[b] = jsonl("q.jsonl", "prompt")
model actor  = policy("builtin:tiny") trained by adamw(lr=1e-3)
model ref    = policy("builtin:tiny")
model reward = scorer("builtin:tiny-reward")

rollout:
    y[b, g, t] = actor.generate(q, temperature=0.5)
    old        = actor.logprobs(y)
    r          = reward.score(y)
"""
LENGTHS = [[1, 2], [3, 4], [2, 2], [4, 1], [1, 1], [3, 2]]
SCORES = [[0.0, 1.0], [2.0, 2.5], [0.25, -1.0], [1.5, 0.5], [3.0, -2.0], [0.75, 1.25]]
LOGP = "actor.logprobs(y)"


def tokens(shift: float = 0.0) -> list:
    return [[[-0.1 * (i + 1) - 0.01 * j - 0.001 * k - shift for k in range(n)] for j, n in enumerate(row)]
            for i, row in enumerate(LENGTHS)]


def answer(body: str, shards: int = 1, rows: int = 0, shuffle=False, update=None, **responses) -> dict[str, Any]:
    """Of a program with the given lines below the head's rollout."""
    feed = {"responses": {"y": {"lengths": LENGTHS} | responses},
            "calls": {"rollout": {LOGP: tokens(), "ref.logprobs(y)": tokens(0.5), "reward.score(y)": SCORES},
                      "update": {LOGP: tokens(0.2) if update is None else update}}}
    return evaluated(loads(HEAD + body), feed_of("feed", feed), shards, rows, shuffle=shuffle)


def plan(body: str) -> Plan:
    return compile_program(loads(HEAD + body), CLUSTER, 2)


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from flat(item)
    else:
        yield value


def close(left: Any, right: Any) -> bool:
    left, right = list(flat(left)), list(flat(right))
    return len(left) == len(right) and all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in zip(left, right))


# ---- 1 to 10 -----------------------------------------------------------------------------------------------

PPO = """
    adv = r - mean[g](r)
    keep if std[g](r) > 0.6
update(epochs=2, minibatches=2):
    ratio = exp(actor.logprobs(y) - old)
    train actor to maximize mean(min(ratio * adv, clip(ratio, 0.8, 1.2) * adv)) - mean(mean[t](ratio))
"""


def plan_never_changes_the_result():
    whole, split = answer(PPO, shuffle=True), answer(PPO, 3, 1, shuffle=True)
    assert len(whole["train"]["actor"]) == 4
    for one, other in zip(whole["train"]["actor"], split["train"]["actor"]):
        assert close(one["objective"], other["objective"]) and close(one["grad"][LOGP], other["grad"][LOGP])


def reductions_are_over_all_kept_rows():
    """A mean over tokens weights each alike, whatever its response, shard or micro-batch; dropped rows are gone."""
    body = """
    keep if max[g](r) > 1
    metric m = mean(r)
update:
    train actor to maximize mean(actor.logprobs(y))
"""
    kept = [i for i, row in enumerate(SCORES) if max(row) > 1]
    found = answer(body, 2, 1)
    count = sum(sum(LENGTHS[i]) for i in kept)
    wanted = [[[1 / count if i in kept else 0.0] * n for n in row] for i, row in enumerate(LENGTHS)]
    assert close(found["train"]["actor"][0]["grad"][LOGP], wanted)
    scores = [x for i in kept for x in SCORES[i]]
    assert close(found["metrics"]["m"], sum(scores) / len(scores))


MASK = 2 ** 64 - 1


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def _key(seed: int, name: str, *values: int) -> int:
    """As the documentation defines it, in plain integers."""
    fnv = 0xCBF29CE484222325
    for byte in name.encode():
        fnv = (fnv ^ byte) * 0x100000001B3 & MASK
    h = _mix(seed & MASK)
    for value in (fnv, *values):
        h = _mix(h ^ value & MASK)
    return h


def mini_batches_are_runs_of_a_permutation():
    body = """
    keep if max[g](r) > 0.9
update(epochs=2, minibatches=2):
    train actor to maximize mean(actor.logprobs(y))
run:
    seed = 5
"""
    kept = [i for i, row in enumerate(SCORES) if max(row) > 0.9]
    found = []
    for step in answer(body, 2, shuffle=True)["train"]["actor"]:
        found.append([i for i, row in enumerate(step["grad"][LOGP]) if any(flat(row))])
        assert all(all(flat(row)) for i, row in enumerate(step["grad"][LOGP]) if i in found[-1])  # groups stay whole
    wanted = []
    for epoch in range(2):
        order = [i for i in sorted(range(6), key=lambda i: _key(5, "b", 1, epoch, i)) if i in kept]
        half = (len(order) + 1) // 2
        wanted += [sorted(order[:half]), sorted(order[half:])]
    assert len(kept) == 5 and found == wanted


UPDATE = """
update:
    heat = ref.logprobs(y) - ref.logprobs(y, temperature=1.5)
    train actor to maximize mean(exp(actor.logprobs(y) - old) * r - heat)
"""


def one_temperature_everywhere():
    steps = plan(UPDATE).steps
    loop = next(s for s in steps if isinstance(s, UpdateLoop))
    forwards = [s for s in (*steps, *loop.before) if isinstance(s, Forward)]
    found = {(s.model, named.name): s.temperature for s in forwards for named in s.calls}
    assert found["actor", "old"] == 0.5 and found["ref", "update/ref.logprobs(y)"] == 0.5
    assert found["ref", "update/ref.logprobs(y, temperature=1.5)"] == 1.5


def the_ratio_starts_at_one():
    """Old and new are one call of one response, options and layout; of one value in the feed the ratio is exactly 1."""
    body = "\nupdate:\n    ratio = exp(actor.logprobs(y) - old)\n    train actor to maximize mean(ratio * r)\n"
    made = plan(body)
    loop = next(s for s in made.steps if isinstance(s, UpdateLoop))
    old = next(s for s in made.steps if isinstance(s, Forward) and s.model == "actor")
    new = next(s for s in loop.body if isinstance(s, TrainStep))
    first, second = made.exprs[old.calls[0].expr], made.exprs[new.calls[0].expr]
    assert (old.layout, old.response) == (new.layout, second.args[0])
    assert first.attrs | {"phase": ""} == second.attrs | {"phase": ""}
    found = answer(body, update=tokens())
    assert set(flat(found["update"]["ratio"])) == {1.0}


def values_stand_where_they_are_said_to():
    """Own tokens alone are walked over: others stand between them, before and behind."""
    own = [[[0, 1, 0] if n == 1 else [1, 0] + [1] * (n - 1) + [0] for n in row] for row in LENGTHS]
    body = """
    last  = at_end[t](r)
    after = next[t](old)
    whole = togo[t](old, 0.5)
"""
    found = answer(body, own=own)["rollout"]
    for i, row in enumerate(LENGTHS):
        for j, n in enumerate(row):
            old = tokens()[i][j]
            assert found["last"][i][j] == [0.0] * (n - 1) + [SCORES[i][j]]
            assert found["after"][i][j] == old[1:] + [0.0]
            backwards = 0.0
            for k in reversed(range(n)):
                backwards = old[k] + 0.5 * backwards
                assert math.isclose(found["whole"][i][j][k], backwards)


def groups_go_by_the_row():
    """All prompts are one text: each row still has a baseline of its own."""
    body = "\n    base = mean[g](r)\n"
    for shards in (1, 4):
        assert close(answer(body, shards)["rollout"]["base"], [sum(row) / 2 for row in SCORES])


def sizes_of_the_algorithm_are_global():
    body = """
    size = b * g
update(minibatches=3):
    rows = sum[b](1 + 0 * mean[g](r))
    train actor to maximize sum(actor.logprobs(y)) / b
"""
    for shards in (1, 2, 5):
        found = answer(body, shards, 1)
        assert found["rollout"]["size"] == 12 and found["update"]["rows"] == [2, 2, 2]
        assert {x for step in found["train"]["actor"] for x in flat(step["grad"][LOGP])} == {0.0, 1 / 6}


def draws_have_names():
    """Each number by the definition in the documentation, whatever is drawn beside it."""
    def wanted(row: int, sample: int, position: int) -> float:
        return (_key(7, "y", 3, row, sample, position) >> 11) * 2.0 ** -53

    for row, sample, position in ((0, 0, 0), (11, 1, 4), (10 ** 6, 3, 63)):
        assert float(uniform(7, "y", 3, row, sample, position)[0]) == wanted(row, sample, position)
    for rows in ([4, 9], [9, 4, 2]):
        draws = Draws(7, "y", 3, np.array(rows), np.array([1] * len(rows)))
        got = draws.at(np.arange(len(rows)), np.array([2] * len(rows)))
        assert list(got) == [wanted(row, 1, 2) for row in rows]


def equal_expressions_are_evaluated_once():
    body = """
    a = exp(ref.logprobs(y)) - old
    c = exp(ref.logprobs(y)) - old
    z[b, g, s] = actor.generate(q, temperature=0.5)
    metric m = mean(a) + mean(c) + mean(length[s](z))
update:
    train actor to maximize mean(actor.logprobs(y) * ref.logprobs(y))
"""
    stages = {}
    checked = loads((HEAD + body).replace("dim t", "dim s <= 4\ndim t", 1))
    lower_equations(checked, lambda name, graph, _: stages.setdefault(name, graph))
    ops = stages["cse"].ops
    kinds = [(op.kind, op.model) for op in ops]
    assert kinds.count(("forward", "ref")) == 1  # a frozen model gives in the update what it gave before
    assert kinds.count(("forward", "actor")) == 2  # one that is trained is asked again
    assert kinds.count(("generate", "actor")) == 2
    assert sum(op.kind == "equation" for op in ops) == 1


# ---- mistakes ----------------------------------------------------------------------------------------------

def _averaged_micro_batches(patch):
    train = FeedEngine.train

    def wrong(self, micro_batches, objective, *options):
        return train(self, micro_batches, lambda i, outputs: objective(i, outputs) / len(micro_batches), *options)

    patch.setattr(FeedEngine, "train", wrong)


def _local_denominators(patch):
    """Each micro-batch divides by its own count: a mean of means."""
    train = FeedEngine.train

    def wrong(self, micro_batches, objective, *options):
        sizes = [sum(int(c.batch.lengths.sum()) for c in calls.values()) for calls in micro_batches]
        shares = [sum(sizes) / (size * len(sizes)) for size in sizes]
        return train(self, micro_batches, lambda i, out: objective(i, out) * shares[i], *options)

    patch.setattr(FeedEngine, "train", wrong)


def _dropped_rows_count(patch):
    patch.setattr(Context, "kept", lambda self, keep, dims: None)


def _rows_in_order(patch):
    patch.setattr(runtime.executor.update, "permutation", lambda seed, dim, iteration, epoch, n: tuple(range(n)))


def _same_in_every_epoch(patch):
    right = runtime.executor.update.permutation
    patch.setattr(runtime.executor.update, "permutation", lambda seed, dim, i, epoch, n: right(seed, dim, i, 0, n))


def _dealt_rows(patch):
    def dealt(order, n):
        return tuple(tuple(order[k::n]) for k in range(n))

    patch.setattr(runtime.executor.update, "minibatch_rows", dealt)


def _temperature_of_one(patch):
    for module in (compiler.emit, compiler.passes.fuse):
        patch.setattr(module, "call_temperature", lambda call: float(call.attr("temperature") or 1.0))


def _other_options_in_the_update(patch):
    """New log-probabilities are taken at temperature 1, old ones as sampled."""
    expr = Interner.expr

    def wrong(self, op, args=(), *rest, **attrs):
        if op == "call" and attrs.get("phase", "").startswith("update"):
            attrs["temperature"] = 1.0
        return expr(self, op, args, *rest, **attrs)

    patch.setattr(Interner, "expr", wrong)


def _score_on_the_first_token(patch):
    right = KERNELS["at_end"]

    def wrong(context, expr, values):
        data = right(context, expr, values)
        lengths = context.frame.row_lengths(expr.type.dims).tolist()
        return torch.cat([part.flip(0) for part in data.split(lengths)])

    patch.setitem(KERNELS, "at_end", wrong)


def _values_of_this_token_for_the_next(patch):
    patch.setitem(KERNELS, "next", lambda context, expr, values: values[0].data)


def _one_baseline_for_equal_prompts(patch):
    right = KERNELS["mean"]

    def wrong(context, expr, values):
        data = right(context, expr, values)
        return data.mean().expand_as(data) if expr.attr("over") == ("g",) else data

    patch.setitem(KERNELS, "mean", wrong)


def _mini_batches_of_a_shard(patch):
    right = runtime.executor.update.minibatch_rows
    patch.setattr(runtime.executor.update, "minibatch_rows", lambda order, n: right(order, 2 * n)[:n])


def _draws_by_place_in_the_batch(patch):
    right = Draws.at
    patch.setattr(Draws, "at", lambda self, which, positions: right(self, which * 0, positions))


def _nothing_is_shared(patch):
    expr = Interner.expr

    def wrong(self, op, *args, **attrs):
        if op == "call":
            self._known = {}
        return expr(self, op, *args, **attrs)

    patch.setattr(Interner, "expr", wrong)


RULES: dict[Callable[[], None], tuple[Callable, ...]] = {
    plan_never_changes_the_result: (_averaged_micro_batches, _local_denominators),
    reductions_are_over_all_kept_rows: (_averaged_micro_batches, _local_denominators, _dropped_rows_count),
    mini_batches_are_runs_of_a_permutation: (
        _rows_in_order, _same_in_every_epoch, _dealt_rows, _mini_batches_of_a_shard),
    one_temperature_everywhere: (_temperature_of_one,),
    the_ratio_starts_at_one: (_other_options_in_the_update,),
    values_stand_where_they_are_said_to: (_score_on_the_first_token, _values_of_this_token_for_the_next),
    groups_go_by_the_row: (_one_baseline_for_equal_prompts,),
    sizes_of_the_algorithm_are_global: (_averaged_micro_batches, _mini_batches_of_a_shard),
    draws_have_names: (_draws_by_place_in_the_batch,),
    equal_expressions_are_evaluated_once: (_nothing_is_shared,),
}
PLANTED = [pytest.param(rule, plant, id=f"{rule.__name__}-{plant.__name__.lstrip('_')}")
           for rule, plants in RULES.items() for plant in plants]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule):
    rule()


@pytest.mark.parametrize("rule, plant", PLANTED)
def test_a_mistake_is_seen(rule, plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        rule()
