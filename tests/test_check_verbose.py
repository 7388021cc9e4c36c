"""`rlflowc check -v`: the type of every named value, and which models it differentiates into."""

import json

import pytest

from rlhf_dsl.cli import main

PROGRAM = """
dim b  = 4
dim g  = 2
dim t <= 8
dim e  = 3
dim s <= 8

data prompts[b], weight[b]: f32 = jsonl("p.jsonl", "prompt", "weight")
data held[e]                    = jsonl("h.jsonl", "prompt")

model actor  = policy("builtin:tiny") trained by adamw(lr=1e-4)
model critic = value("builtin:tiny") trained by adamw(lr=1e-4)
model ref    = policy("builtin:tiny")

state beta = 0.1 then beta * 2

rollout:
    y[b, g, t] = actor.generate(prompts)
    logp_old   = actor.logprobs(y)
    good       = mean[t](logp_old) > -2
    keep if any[g](good)

update(minibatches=2):
    logp    = actor.logprobs(y)
    ratio   = exp(logp - logp_old)
    v       = critic.values(y)
    both    = mean[g, t](ratio * v)
    advised = mean(ratio * stop(v))
    fixed   = stop(ratio)
    longer  = ratio > 1
    kl      = logp - ref.logprobs(y)
    train actor to maximize advised - beta * mean(kl) + 0 * mean(both * weight)
    train critic to minimize mean(v ** 2 * fixed * longer)

update:
    train actor to minimize mean(k3(actor.logprobs(y), logp_old))
    _again = critic.values(y)

eval:
    z[e, s] = actor.generate(held)
    metric length = mean(length[s](z))
"""
SHOWN = """\
{path}
  data
    prompts:  text[b]
    weight:   f32[b]
    held:     text[e]
  state
    beta:     f32
  rollout
    y:        tokens[b, g, t]
    logp_old: f32[b, g, t]
    good:     bool[b, g]
  update 1
    logp:     f32[b, g, t]     d/d actor
    ratio:    f32[b, g, t]     d/d actor
    v:        f32[b, g, t]     d/d critic
    both:     f32[b]           d/d actor  d/d critic
    advised:  f32              d/d actor
    fixed:    f32[b, g, t]
    longer:   bool[b, g, t]
    kl:       f32[b, g, t]     d/d actor
  update 2
    _again:   f32[b, g, t]
  eval
    z:        tokens[e, s]
"""


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "p.rlflow"
    found.write_text(PROGRAM)
    return str(found)


def test_the_page(path, capsys):
    assert main(["check", "-v", path]) == 0
    out, err = capsys.readouterr()
    assert out == SHOWN.format(path=path) and err == "1 program: no errors\n"


def test_the_same_as_data(path, capsys):
    assert main(["check", "-v", "--json", path]) == 0
    found = json.loads(capsys.readouterr().out)["files"][0]["values"]
    assert {"section": "update 1", "name": "both", "type": "f32[b]", "gradient": ["actor", "critic"]} in found
    assert [row["name"] for row in found][:5] == ["prompts", "weight", "held", "beta", "y"]


def test_only_where_it_is_asked_for(path, capsys):
    assert main(["check", "--json", path]) == 0
    assert "values" not in json.loads(capsys.readouterr().out)["files"][0]
    assert main(["check", path]) == 0
    assert capsys.readouterr().out == ""


def test_a_program_with_errors_has_no_table(path, tmp_path, capsys):
    bad = tmp_path / "bad.rlflow"
    bad.write_text("rollout:\n    a = 1 ^ 2\n")
    assert main(["check", "-v", str(bad), path]) == 1
    out, err = capsys.readouterr()
    assert out == SHOWN.format(path=path) and "error[E0012]" in err
