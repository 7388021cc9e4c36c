"""The checker: what programs mean. What it says of those that mean nothing stands in `tests/language`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_dsl.builtins import BUILTINS, PRIMITIVES, call_text
from rlhf_dsl.check import prelude
from rlhf_dsl.codes import CODES
from rlhf_dsl.diagnostics import DiagnosticError, Diagnostics
from rlhf_dsl.frontend import diagnose, loads
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Checked, Expr, Type

FAMILIES = ("E01", "E02", "E03", "E04", "E05", "E06", "W01")
SHOWN = [code for code in CODES.values() if code.code.startswith(FAMILIES) and code.wrong]
CASES = sorted(Path(__file__).with_name("cases").glob("*.json"))

HEAD = """
dim b = 4
dim g = 2
dim t <= 8
param eps = 0.2 in (0, 1)
data prompts[b], answers[b] = jsonl("prompts.jsonl", "prompt", "answer")
model actor = policy("builtin:tiny") trained by adamw(lr=1e-4)
model critic = value("builtin:tiny") trained by adamw(lr=1e-4)
model ref = policy("builtin:tiny")
model reward = scorer("builtin:tiny-reward")
"""


def program(body: str, overrides=None) -> Checked:
    return loads(HEAD + body, overrides)


def values(checked: Checked) -> dict[str, Expr]:
    """What rollout and updates bind, by name; those of the second update as "1.name"."""
    found = {line.name: line.expr for line in checked.rollout if hasattr(line, "expr")}
    for update in checked.updates:
        prefix = f"{update.index}." if update.index else ""
        found.update({prefix + line.name: line.expr for line in update.body if hasattr(line, "name")})
    return found


def codes(text: str, overrides=None) -> list[str]:
    sink = Diagnostics(Source("x.rlflow", text))
    diagnose(sink.source, overrides or {}, sink)
    return [d.code for d in sink.sorted()]


def walk(expr: Expr) -> list[Expr]:
    return [expr, *(e for arg in expr.args for e in walk(arg))]


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
    ("max(mean(new), 0)", "E0409"), ("max(mean[t](new))", "E0409"), ("std(new)", "E0409"), ("mean(whiten(new))", "E0409"),
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


# ---- sections ------------------------------------------------------------------------------------------

TWO_ROOTS = HEAD + """
dim p = 6
dim u <= 8
data corpus[p, u] = jsonl("corpus.jsonl", "text")
rollout:
    y[b, t] = actor.generate(prompts)
    fluency = mean(ref.logprobs(corpus))
"""


def test_an_update_reads_the_roots_of_its_rows_only():
    line = "update(minibatches=2, epochs=3):\n    train actor to maximize mean(actor.logprobs(y) * {})\n"
    alone = loads(TWO_ROOTS + line.format("fluency")).updates[0]
    both = loads(TWO_ROOTS + line.format("fluency").rstrip() + " + mean(actor.logprobs(corpus))\n").updates[0]
    assert (alone.roots, alone.minibatches, alone.epochs) == (("b",), 2, 3)
    assert both.roots == ("b", "p")
    assert "E0406" not in codes(TWO_ROOTS + line.format("fluency").replace("=2", "=4"))
    assert "E0406" in codes(TWO_ROOTS + line.format("mean(ref.logprobs(corpus))").replace("=2", "=4"))


def test_an_evaluation_alone_is_a_program():
    checked = loads("""
dim e = 16
dim t <= 8
model actor = policy("builtin:tiny")
eval(every=20):
    data held[e] = jsonl("held.jsonl", "prompt")
    y[e, t] = actor.generate(held, temperature=0)
    metric tokens = mean(length[t](y))
    metric logp = mean(actor.logprobs(y))
""")
    (evaluation,) = checked.evals
    assert evaluation.every == 20 and evaluation.roots == ("e",)
    assert evaluation.body[2].expr.args[0].attr("phase") == "eval0"
    assert checked.data[0].columns[0].name == "held"


def test_temperature_is_the_responses_unless_given():
    found = values(program("""
rollout:
    y[b, t] = actor.generate(prompts, temperature=0.7, top_k=5, stop=["\\n"])
    a = actor.logprobs(y)
    c = actor.logprobs(y, temperature=1)
    d = actor.entropy(y, temperature=1)
"""))
    assert found["y"].attr("temperature") == 0.7 and found["y"].attr("stop") == ("\n",)
    assert found["a"].attr("temperature") is None and found["c"].attr("temperature") == 1.0
    assert [call_text(found[n]) for n in "acd"] == [
        "actor.logprobs(y)", "actor.logprobs(y, temperature=1)", "actor.entropy(y, temperature=1)"]


def test_run_and_overrides():
    text = "run:\n    epochs = 2\n    seed = 1\n    every 5: save(actor), ema(actor, ref, 0.9)\n"
    run = program(text).run
    assert (run.steps, run.epochs, run.seed) == (0, 2, 1)
    assert [(a.every, a.kind, a.args) for a in run.actions] == [(5, "save", ("actor",)), (5, "ema", ("actor", "ref", 0.9))]
    over = program(text, {"run.steps": "3", "run.seed": "7"}).run
    assert (over.steps, over.epochs, over.seed) == (3, 0, 7)
    assert loads(HEAD, {"run.steps": "3"}).run.steps == 3


def test_optimizers_and_schedules():
    checked = loads("""
param rate = 0.001
model a = policy("x") trained by adamw(lr=cosine(rate, warmup=10, steps=100, low=1e-5), betas=[0.9, 0.95], eps=1e-6)
model c = policy("x") trained by adamw(lr=rate / 10, weight_decay=0.1, max_grad_norm=0.5)
""", {"rate": "0"})
    schedule = checked.models["a"].optimizer.lr
    assert (schedule.kind, schedule.lr, schedule.warmup, schedule.steps, schedule.low) == ("cosine", 0.0, 10, 100, 1e-5)
    assert checked.models["a"].optimizer.betas == (0.9, 0.95)
    assert checked.models["c"].optimizer.weight_decay == 0.1


def test_preferences_from_data():
    checked = loads("""
param base = "builtin:tiny"
dim b = 4
dim t <= 8
dim s <= 8
data q[b], good[b, t], bad[b, s], sure[b]: f32 after q = jsonl("pairs.jsonl", "prompt", "chosen", "rejected", "sure")
model actor = policy(base) trained by adamw(lr=1e-4)
model judge = scorer(base)
update:
    margin = sum[t](actor.logprobs(good)) - sum[s](actor.logprobs(bad))
    train actor to maximize mean(log_sigmoid(0.1 * margin) * sure) + 0 * mean(judge.score(bad))
""", {"base": "some/folder"})
    columns = {c.name: c for c in checked.data[0].columns}
    assert columns["good"].response and columns["good"].after == "q" and columns["good"].field == "chosen"
    assert columns["bad"].policy == "actor" and columns["sure"].type == Type("f32", ("b",))
    assert checked.models["actor"].source == "some/folder"
    assert checked.updates[0].roots == ("b",)


def test_tokenizers_that_are_known_to_differ(tmp_path):
    for name, vocabulary in (("one", {"a": 0}), ("two", {"c": 0}), ("same", {"a": 0})):
        (tmp_path / name).mkdir()
        content = {"model": {"vocab": vocabulary}, "added_tokens": []}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(content))
    text = """
dim b = 4
dim t <= 8
data q[b] = jsonl("q.jsonl", "prompt")
model actor = policy("one")
model other = {}("{}")
rollout:
    y[b, t] = actor.generate(q)
    metric m = mean(other.{}(y))
"""

    def said(role: str, folder: str, operation: str) -> list[str]:
        source = Source(str(tmp_path / "x.rlflow"), text.format(role, folder, operation))
        sink = Diagnostics(source)
        diagnose(source, {}, sink)
        return [d.code for d in sink.items]

    assert said("policy", "two", "logprobs") == ["E0306"]
    assert said("value", "two", "values") == ["E0306"]
    assert said("scorer", "two", "score") == []  # a scorer gets the text
    assert said("policy", "same", "logprobs") == []
    assert said("policy", "absent", "logprobs") == []


def test_an_error_comes_as_one_exception_with_all_diagnostics():
    with pytest.raises(DiagnosticError) as caught:
        program("rollout:\n    y[b, t] = actor.generate(prompts)\n    x = nope\n    z = actor.logprob(y)\n    w = x + z\n")
    assert [d.code for d in caught.value.diagnostics] == ["E0101", "E0302"]
    assert caught.value.exit_code == 1


def test_two_thousand_lines_check_quickly():
    import time

    lines = "\n".join(f"    x{i} = x{i - 1} * 2 - mean[g](x{i - 1})" for i in range(1, 2000))
    start = time.perf_counter()
    program(f"rollout:\n    y[b, g, t] = actor.generate(prompts)\n    x0 = reward.score(y)\n{lines}\n    metric m = mean(x1999)\n")
    assert time.perf_counter() - start < 3
