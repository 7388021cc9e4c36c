"""The checker: what programs mean. What it says of those that mean nothing stands in `tests/language`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checking import HEAD, codes, program, values, walk

from rlhf_dsl.builtins import BUILTINS, PRIMITIVES
from rlhf_dsl.check import prelude
from rlhf_dsl.codes import CODES
from rlhf_dsl.frontend import loads
from rlhf_dsl.typed import Type

FAMILIES = ("E01", "E02", "E03", "E04", "E05", "E06", "W01")
SHOWN = [code for code in CODES.values() if code.code.startswith(FAMILIES) and code.wrong]
CASES = sorted(Path(__file__).with_name("cases").glob("*.json"))

# ---- the table of codes, the numeric cases --------------------------------------------------------------

@pytest.mark.parametrize("code", SHOWN, ids=lambda c: c.code)
def test_the_wrong_program_of_the_table_earns_its_code_alone(code):
    said = [c for c in codes(code.wrong + "\n") if c.startswith("E") or c == code.code]
    assert said == [code.code]


@pytest.mark.parametrize("code", [c for c in SHOWN if c.right], ids=lambda c: c.code)
def test_the_right_program_of_the_table_is_free_of_errors(code):
    said = codes(code.right + "\n")
    assert code.code not in said and not [c for c in said if c.startswith("E")]


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_programs_of_the_numeric_cases_check(path):
    lines = json.loads(path.read_text(encoding="utf-8"))["program"]
    checked = loads("\n".join(lines) + "\n", path=f"{path.stem}.rlflow")
    assert checked.updates[0].trains


def test_every_expression_is_one_of_the_primitives():
    for path in CASES:
        checked = loads("\n".join(json.loads(path.read_text(encoding="utf-8"))["program"]) + "\n")
        for line in (*checked.rollout, *(s for u in checked.updates for s in u.body)):
            root = getattr(line, "expr", None) or getattr(line, "objective", None) or line.condition
            assert {e.op for e in walk(root)} <= PRIMITIVES.keys()


def test_the_prelude_checks_and_every_function_says_what_it_is():
    assert {"gae", "value_loss", "k1", "k2", "k3", "whiten"} <= prelude().keys()
    assert all(fn.doc for fn in prelude().values())
    assert not prelude().keys() & BUILTINS.keys()


# ---- identity ------------------------------------------------------------------------------------------

ROLL = """
rollout:
    y[b, g, t] = actor.generate(prompts)
    logp       = actor.logprobs(y)
    again      = actor.logprobs(y)
    base       = ref.logprobs(y)
    v          = critic.values(y)
    r          = reward.score(y)
    mean_r     = mean(r)
    centred    = r - mean[g](r)
"""


def test_equal_expressions_are_one_and_samples_never_are():
    found = values(program(ROLL + "    z[b, g, s] = actor.generate(prompts)\ndim s <= 8\n"))
    assert found["logp"] is found["again"]
    assert found["y"] is not found["z"]


def test_calls_of_an_update_have_its_weights_unless_nothing_has_changed_them():
    found = values(program(ROLL + """
update:
    new  = actor.logprobs(y)
    same = ref.logprobs(y)
    old  = critic.values(y)
    train actor to maximize mean(new * v)

update:
    new2 = actor.logprobs(y)
    new3 = critic.values(y)
    train critic to minimize mean((critic.values(y) - v) ** 2)
"""))
    assert found["new"].attr("phase") == "update0" and found["new"].grad == {"actor"}
    assert found["same"] is found["base"] and not found["same"].grad
    assert found["old"] is found["v"]  # the critic is trained by the second update only
    assert found["1.new2"].attr("phase") == "update1" and not found["1.new2"].grad
    assert found["1.new3"].grad == {"critic"}


def test_a_call_first_made_in_an_update_of_a_frozen_model_is_shared_by_the_next():
    found = values(program("""
rollout:
    y[b, t] = actor.generate(prompts)
update:
    x = ref.logprobs(y)
    train actor to maximize mean(actor.logprobs(y) * x)
update:
    x = ref.logprobs(y)
    train critic to minimize mean((critic.values(y) - x) ** 2)
"""))
    assert found["x"] is found["1.x"] and found["x"].attr("phase") == "update0"


def test_statistics_over_rows_belong_to_their_section_and_those_of_a_group_to_none():
    found = values(program(ROLL + """
update(minibatches=2):
    here   = mean(r)
    within = r - mean[g](r)
    train actor to maximize mean(actor.logprobs(y) * here)
"""))
    assert found["mean_r"].attr("phase") == "rollout" and found["here"].attr("phase") == "update0"
    assert found["within"] is found["centred"]


def test_keep_divides_equal_expressions():
    checked = program("""
state seen = 0.0 then seen + mean(reward.score(y))
rollout:
    y[b, g, t] = actor.generate(prompts)
    r      = reward.score(y)
    before = mean[g](r)
    keep if 0 < before
    after  = mean[g](r)
    keep if not y.truncated, refill=3
    last   = actor.logprobs(y)
update:
    x = mean(r)
    train actor to maximize mean(actor.logprobs(y) * x)
""")
    found = values(checked)
    keeps = [line for line in checked.rollout if hasattr(line, "refill")]
    assert [(k.index, k.refill, k.condition.type.dims) for k in keeps] == [(1, 0, ("b",)), (2, 3, ("b", "g"))]
    assert [found[n].attr("keep") for n in ("y", "before", "after", "last", "x")] == [0, 0, 1, 2, 2]
    following = checked.states["seen"].next
    assert {e.attr("keep") for e in walk(following) if e.op in ("mean", "call")} == {2}


# ---- types ---------------------------------------------------------------------------------------------

def test_types_have_the_root_dim_first_and_the_ragged_dim_last():
    checked = loads("""
dim t <= 8
dim g = 2
dim b = 4
data prompts[b] = jsonl("prompts.jsonl", "prompt")
model actor = policy("builtin:tiny")
rollout:
    y[t, g, b] = actor.generate(prompts)
    n          = length[t](y)
""")
    found = values(checked)
    assert found["y"].type == Type("tokens", ("b", "g", "t"))
    assert found["n"].type == Type("f32", ("b", "g"))
    assert checked.dims["t"].lead == ("b", "g") and checked.dims["t"].response == "y"
    assert checked.dims["b"].root and not checked.dims["g"].root


def test_reductions_fields_and_walks_have_their_types():
    found = values(program(ROLL + """
    a = sum[t](logp)
    c = at_end[t](r)
    d = togo[t](c, 0.5)
    e = argmax[g](r)
    f = rank[g](r)
    h = any[t](logp > -1)
    i = quantile[g](r, 0.8)
    j = y.truncated
    k = y.text
    l = max(r)
    m = max(r, logp)
    n = 0 < r < 1
"""))
    token, row = ("b", "g", "t"), ("b", "g")
    wanted = {
        "a": Type("f32", row), "c": Type("f32", token), "d": Type("f32", token), "e": Type("f32", ("b",)),
        "f": Type("f32", row), "h": Type("bool", row), "i": Type("f32", ("b",)), "j": Type("bool", row),
        "k": Type("text", row), "l": Type("f32"), "m": Type("f32", token), "n": Type("bool", row),
    }
    assert {name: found[name].type for name in wanted} == wanted
    assert found["l"].op == "max" and found["m"].op == "maximum" and found["n"].op == "and"


def test_params_and_dims_are_constants_that_nothing_folds():
    found = values(program(ROLL + "    x = r / (g - 1) * eps\n", {"g": "5", "eps": "0.5"}))
    constants = [e.attr("value") for e in walk(found["x"]) if e.op == "const"]
    assert constants == [5, 1, 0.5]


def test_functions_expand_with_their_dims_and_keywords():
    text = """
fn spread(x[t], k):
    m = mean[t](x)
    return x - m, k * t

rollout:
    y[b, s] = actor.generate(prompts)
    a, n    = spread(actor.logprobs(y), k=2)
dim s <= 16
"""
    found = values(program(text))
    assert found["a"].args[1].attr("over") == ("s",)
    assert [e.attr("value") for e in walk(found["n"]) if e.op == "const"] == [2, 16]


def test_names_of_a_prelude_function_are_its_own():
    """The program's `a`, `delta` and `d` are not those inside `gae` and `whiten`, and its `k1` is not theirs."""
    found = values(program("""
rollout:
    y[b, t]  = actor.generate(prompts)
    d        = actor.logprobs(y)
    delta    = whiten(d)
    a, ret   = gae(delta, d, 1, 0.5)
"""))
    assert found["a"].op == "togo" and found["ret"].args[0] is found["a"] and found["ret"].args[1] is found["d"]


# ---- gradients -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("expression, grad", [
    ("new * 2", {"actor"}), ("stop(new)", set()), ("sign(new)", set()), ("where(new > 0, r, 0)", set()),
    ("where(r > 0, new, 0)", {"actor"}), ("sum[t](new)", {"actor"}), ("count(new)", set()), ("rank[t](new)", set()),
    ("argmax[t](new)", set()), ("clip(new, 0, 1)", {"actor"}), ("std[t](new)", {"actor"}), ("next[t](new)", {"actor"}),
    ("new * critic.values(y)", {"actor", "critic"}), ("length[t](y)", set()), ("quantile[t](new, 0.5)", {"actor"}),
])
def test_what_a_value_differentiates_into(expression, grad):
    found = values(program(ROLL + f"""
update:
    new = actor.logprobs(y)
    x   = {expression}
    train actor to maximize mean(new)
    train critic to minimize mean(critic.values(y))
"""))
    assert found["x"].grad == grad


@pytest.mark.parametrize("objective, code", [
    ("mean(new)", ""), ("mean(new) / mean(r) + sum(new)", ""), ("mean(exp(new - mean(r)))", ""),
    ("mean(new * whiten(r))", ""), ("-mean(new) * (1 + mean(stop(new)))", ""), ("where(mean(r) > 0, mean(new), 1)", ""),
    ("mean(mean[g](mean[t](new)) ** 2)", ""), ("mean(new, where=new > -1)", ""), ("mean(log(mean[t](exp(new))))", ""),
    ("mean(new) * mean(critic.values(y))", ""),  # the critic's outputs are constants of the actor's objective
    ("log(mean(new))", "E0409"), ("mean(new) * mean(new)", "E0409"), ("1 / mean(new)", "E0409"),
    ("max(mean(new), 0)", "E0409"), ("max(mean[t](new))", "E0409"), ("std(new)", "E0409"),
    ("mean(whiten(new))", "E0409"),
    ("mean(new) ** 2", "E0409"), ("abs(sum(new))", "E0409"),
])
def test_separable_objectives(objective, code):
    text = ROLL + f"""
update:
    new = actor.logprobs(y)
    train actor to maximize {objective}
    train critic to minimize mean(critic.values(y))
"""
    errors = [c for c in codes(HEAD + text) if c.startswith("E")]
    assert errors == ([code] if code else [])


@pytest.mark.parametrize("value", ["10 ** 10 ** 10", "99999 ** 99999", "9223372036854775807 * 2"])
def test_numbers_without_end_are_reported(value):
    assert "E0504" in codes(f"param k = {value}\n")


def test_functions_that_call_each_other_twice_take_no_exponential_time():
    lines = ["fn f0(x):\n    return x + 1\n"]
    lines += [f"fn f{i}(x):\n    return f{i - 1}(x) * f{i - 1}(x)\n" for i in range(1, 40)]
    body = "rollout:\n    y[b, t] = actor.generate(prompts)\n    metric m = mean(f39(actor.logprobs(y)))\n"
    assert not [code for code in codes(HEAD + "".join(lines) + body) if code.startswith("E")]
