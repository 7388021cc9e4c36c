"""The checker: sections, settings, data, and how its diagnostics arrive."""

from __future__ import annotations

import json
import time

import pytest
from checking import HEAD, codes, program, values

from rlhf_dsl.builtins import call_text
from rlhf_dsl.diagnostics import DiagnosticError, Diagnostics
from rlhf_dsl.frontend import diagnose, loads
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Type

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
    actions = [(a.every, a.kind, a.args) for a in run.actions]
    assert actions == [(5, "save", ("actor",)), (5, "ema", ("actor", "ref", 0.9))]
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
    lines = "    x = nope\n    z = actor.logprob(y)\n    w = x + z\n"
    with pytest.raises(DiagnosticError) as caught:
        program("rollout:\n    y[b, t] = actor.generate(prompts)\n" + lines)
    assert [d.code for d in caught.value.diagnostics] == ["E0101", "E0302"]
    assert caught.value.exit_code == 1


def test_two_thousand_lines_check_quickly():
    lines = "\n".join(f"    x{i} = x{i - 1} * 2 - mean[g](x{i - 1})" for i in range(1, 2000))
    start = time.process_time()
    head = "rollout:\n    y[b, g, t] = actor.generate(prompts)\n    x0 = reward.score(y)\n"
    program(f"{head}{lines}\n    metric m = mean(x1999)\n")
    assert time.process_time() - start < 3
