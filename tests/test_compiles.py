"""What `check` takes is compiled and proved: small programs that once were refused as a bug of the compiler.

Each says something that a user may say in more than one order or place; `tests/whole.py` looks for more of them.
"""

from __future__ import annotations

import pytest

from compiler.plan import Plan
from compiler.steps import UpdateLoop
from tests.compiling import compiled

HEAD = '''
dim b = 4
dim g = 2
dim n = 4
dim t <= 5
dim u <= 5
dim v <= 5
dim w <= 5
data prompts[b], answer[b] = jsonl("rows.jsonl", "prompt", "answer")
data q[n], first[n, u], second[n, v] after q = jsonl("pairs.jsonl", "prompt", "chosen", "rejected")
model actor = policy("MODEL") trained by adamw(lr=1e-4)
model critic = value("MODEL") trained by adamw(lr=1e-4)
model ref = policy("MODEL")
'''
SAMPLED = HEAD + '''
rollout:
    y[b, g, t] = actor.generate(prompts)
'''
RIGHT = {
    "a part of the rollout's equations is a value of the update": SAMPLED + '''
    kl = y.logprobs - ref.logprobs(y)
update:
    train actor to maximize mean(y.logprobs * actor.logprobs(y)) - mean(kl * actor.logprobs(y))
''',
    "a line binds what is a part of a line above": SAMPLED + '''
    total = sum(whiten(y.logprobs))
    a     = whiten(y.logprobs)
update:
    train actor to maximize total * mean(actor.logprobs(y) * sum[t](a))
''',
    "a line of an update binds what is a part of a line above": SAMPLED + '''
update:
    metric spread = std(exp(actor.logprobs(y)))
    p = exp(actor.logprobs(y))
    train actor to maximize mean(p)
''',
    "the new value of a state weighs an objective": '''
state s = 0.5 then 0.9 * s
''' + SAMPLED + '''
update:
    train actor to maximize next(s) * mean(actor.logprobs(y)) + mean(max(actor.logprobs(y), next(s)))
''',
    "a statistic of the mini-batch has a name, and another value is made of it": SAMPLED + '''
update:
    best = sum[b, t](y.logprobs)
    train actor to maximize mean(min(actor.logprobs(y), argmax[g](best)))
''',
    "what is made of a statistic of the mini-batch is no constant of the update": SAMPLED + '''
update:
    some = any[b, g](length[t](y) > 2)
    a, r = gae(y.logprobs, y.logprobs, 0.9, sigmoid(some))
    train actor to maximize mean(a * actor.logprobs(y))
''',
    "a response is read by a call that nothing needs": SAMPLED + '''
    z[b, g, w] = reply(y.text, y.text)
update:
    unused = ref.entropy(z)
    train actor to maximize mean(actor.logprobs(y) * length[w](z))
''',
    "what a Python op is given is a constant of the objective": HEAD + '''
from compiles_op import high
rollout:
    long = high(length[u](first))
update:
    now = high(length[u](first))
    train actor to maximize mean(actor.logprobs(first) * (now + long)) - mean(length[u](first) * actor.logprobs(first))
''',
    "the elements of two terms are as many": HEAD + '''
update:
    train critic to minimize mean(critic.last_value(second) + whiten(length[u](first))) + mean(critic.last_value(first))
''',
    "no model reads a response of data": HEAD + '''
rollout:
    metric tokens = mean(length[u](first))
''',
}
ACTIONS = SAMPLED + '''
update:
    train actor to maximize mean(actor.logprobs(y))
run:
    steps = 4
    every 1: ema(actor, ref, 0.9)
    every 2: save(ref)
'''


def steps_of(plan: Plan) -> list:
    return [inner for step in plan.steps for inner in (
        (*step.before, *step.body) if isinstance(step, UpdateLoop) else (step,))]


OPS = '''
from rlhf_dsl import op

@op
def high(x: float) -> bool:
    return x > 2
'''


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiles(tmp_path, name, ranks):
    (tmp_path / "compiles_op.py").write_text(OPS)
    plan = compiled(tmp_path, RIGHT[name], ranks)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_model_that_only_actions_name_has_weights(tmp_path):
    plan = compiled(tmp_path, ACTIONS, 2)
    assert set(plan.models) == {"actor", "ref"} and "ref.forward" in plan.layouts


def test_a_model_that_only_gives_its_tokenizer_has_none(tmp_path):
    plan = compiled(tmp_path, RIGHT["a response is read by a call that nothing needs"], 2)
    assert "ref" in plan.models and not any(name.startswith("ref.") for name in plan.layouts)
    assert [s.policy for s in steps_of(plan) if s.op == "reply"] == ["ref"]


def test_a_model_without_weights_has_no_optimizer_whose_states_would_be_saved(tmp_path):
    plan = compiled(tmp_path, HEAD + '''
rollout:
    metric tokens = mean(length[u](first))
    unused = critic.values(first)
''')
    assert {name: spec.optimizer for name, spec in plan.models.items()} == {"critic": None} and plan.layouts == {}


@pytest.mark.parametrize("group, unit", [("h", ("b",)), ("g", ("b", "g"))])
def test_a_training_makes_the_outputs_of_all_responses_that_its_mini_batch_reads(tmp_path, group, unit):
    """Rows stay whole where the groups of two responses differ, in an objective or beside it."""
    text = "dim h = 3\n" + SAMPLED + f'''
    z[b, {group}, w] = actor.generate(prompts)
update:
    train actor to maximize mean(actor.logprobs(y))
    metric other = mean(actor.logprobs(z))
'''
    assert [step.unit for step in steps_of(compiled(tmp_path, text)) if step.op == "train"] == [unit]


def test_what_stands_at_the_end_of_a_response_needs_the_response(tmp_path):
    plan = compiled(tmp_path, SAMPLED + '''
    metric m = mean(at_end[t](0.5)) + mean(at_end[v](1))
''')
    made = [step.op for step in steps_of(plan)]
    assert "generate" in made and {c for s in steps_of(plan) if s.op == "load" for c in s.columns} == {"prompts", "second"}


def test_a_weight_for_each_place_of_a_group_keeps_groups_whole(tmp_path):
    plan = compiled(tmp_path, SAMPLED + '''
update:
    train actor to maximize mean(actor.logprobs(y) * mean[b](length[t](y)))
''')
    assert [step.unit for step in steps_of(plan) if step.op == "train"] == [("b",)]


def test_an_update_runs_over_the_rows_that_something_reads(tmp_path):
    plan = compiled(tmp_path, SAMPLED + '''
update:
    unused = length[u](first)
    train actor to maximize mean(actor.logprobs(y))
''')
    assert [step.roots for step in plan.steps if step.op == "update"] == [("b",)]
