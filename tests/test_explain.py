"""`rlflowc compile` and `rlflowc explain` as they are called, and what estimates must satisfy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from compiler.compile import compile_program
from compiler.cost import CostModel
from compiler.explain import explain_json, explain_text
from compiler.plan import Plan, UpdateLoop
from compiler.proof.verify import load_plan, walk
from compiler.reading.tables import told
from compiler.steps import Forward, Generate, TrainStep, Transfer
from rlhf_dsl.cli import main
from tests.compiling import CLUSTER, GROUPS, PROGRAMS, compiled, model_folder, shipped

PPO = GROUPS.replace("dim g = 4\n", "") + '''
rollout:
    y[b, t]  = actor.generate(prompts)
    logp_old = actor.logprobs(y)
    kl       = logp_old - ref.logprobs(y)
    r        = at_end[t](reward.score(y)) - 0.05 * kl
    v_old    = critic.values(y)
    a, ret   = gae(r, v_old, 1.0, 0.95)
    metric kl = mean(kl)
update(epochs=2, minibatches=2):
    train actor to maximize mean(exp(actor.logprobs(y) - logp_old) * whiten(a))
    train critic to minimize value_loss(critic.values(y), v_old, ret, 0.2)
plan:
    actor.train: parallel(tp=2, pp=2)
    critic: parallel(pp=2)
'''
SECONDS = 0.5


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    return compiled(tmp_path_factory.mktemp("explain"), PPO, 4)


def test_every_step_is_shown_with_its_layout_and_ranks(plan):
    text = explain_text(plan, CLUSTER)
    lines = [line.strip() for line in text.splitlines()]
    for step in walk(plan):
        assert any(line.startswith(told(step)) for line in lines), step
    for layout in ("actor.train tp2 pp2 dp1", "actor.generate tp1 pp1 dp4", "critic.train tp1 pp2 dp2"):
        assert layout in text
    assert "0-3" in text and "2 epochs of 2 mini-batches" in text
    assert all(len(line) <= 120 for line in text.splitlines())
    for model in plan.models:
        assert f"\n  {model} " in text


def test_json_has_the_keys_that_scripts_read(plan):
    found = json.loads(json.dumps(explain_json(plan, CLUSTER, SECONDS)))
    assert found["estimate"]["iteration_s"] > 0
    assert found["groups"] == [{"models": ["actor", "ref", "critic", "reward"], "samplers": [], "devices": 4, "first": 0,
                                "pool": ""}]
    assert found["models"]["actor"]["train"] == {"tp": 2, "pp": 2, "dp": 1, "engine": "megatron"}
    assert found["models"]["actor"]["generate"] == {"tp": 1, "pp": 1, "dp": 4, "engine": "torch"}
    assert found["models"]["critic"]["forward"] == {"tp": 1, "pp": 2, "dp": 2, "engine": "megatron"}
    assert all(found["models"][m]["memory_bytes"] > 0 for m in plan.models)
    assert {"value", "model", "ranks", "estimate_s"} <= set(found["steps"][0])
    assert {"considered", "feasible", "seconds"} == set(found["search"]) and found["alternatives"] == []
    longest = max(s["estimate_s"] for s in found["steps"])  # rows travel while ranks compute
    assert longest < found["estimate"]["iteration_s"] <= sum(s["estimate_s"] for s in found["steps"])
    keys = {"value", "from", "to", "bytes_per_rank", "total_bytes", "lower_bound_bytes", "estimate_s"}
    for transfer in found["transfers"]:
        assert keys <= set(transfer)
        assert 0 <= transfer["lower_bound_bytes"] <= transfer["total_bytes"]
        assert transfer["bytes_per_rank"] <= transfer["total_bytes"] <= 4 * transfer["bytes_per_rank"] + 4


def test_bytes_of_a_reshard_are_those_of_the_transfer(plan):
    """Four ranks hold a quarter each and shall hold all: every rank lacks three quarters, norms aside."""
    transfers = explain_json(plan, CLUSTER, SECONDS)["transfers"]
    found = next(t for t in transfers if t["value"] == "weights of actor")
    model = CostModel(plan, CLUSTER).parameters["actor"] * 4
    assert found["total_bytes"] == found["lower_bound_bytes"]
    assert found["total_bytes"] == pytest.approx(3 * model, rel=0.02)


def test_estimates_count_floating_point_operations(plan):
    costs = CostModel(plan, CLUSTER)
    tokens = 8 * (64 + 16)
    forward = next(s for s in plan.steps if isinstance(s, Forward))
    layers = 2 * (costs.parameters["actor"] - 96 * 64) * tokens / (4 * 1e12)
    products = next(p for p in costs.estimate(forward).parts if "FLOP" in p.why)
    assert costs.seconds(forward) > products.seconds > layers
    loop = next(s for s in plan.steps if isinstance(s, UpdateLoop))
    train = next(s for s in loop.body if isinstance(s, TrainStep))
    assert costs.seconds(train, 0.5) >= 3 * costs.seconds(forward) / 2
    assert costs.seconds(loop) > 4 * costs.seconds(train, 0.5)
    generate = next(s for s in plan.steps if isinstance(s, Generate))
    assert costs.seconds(generate) > costs.seconds(forward)


def test_assumed_lengths_count(tmp_path, plan):
    longer = compiled(tmp_path, PPO + "    assume: prompt=640, response=8\n", 4)
    tokens = [next(s for s in p.steps if isinstance(s, Forward)).response for p in (plan, longer)]
    assert CostModel(plan, CLUSTER).tokens(tokens[0]) == 8 * 80
    assert CostModel(longer, CLUSTER).tokens(tokens[1]) == 8 * 648


def test_memory_counts_weights_gradients_and_moments(plan):
    costs = CostModel(plan, CLUSTER)
    actor, ref = costs.memory("actor"), costs.memory("ref")
    assert ref.weights == pytest.approx(costs.parameters["ref"] * 4, rel=0.01)
    assert ref.total == ref.weights + ref.activations
    assert actor.gradients == actor.weights and actor.optimizer == 2 * actor.weights
    assert actor.weights < ref.weights / 2 and actor.generation == pytest.approx(3 / 4 * ref.weights, rel=0.01)
    assert actor.cache == 2 * (64 + 16) * 4 * 4 * 2 * 2 * 16  # rows, tokens, bytes, layers, keys and values of 2 heads


def test_on_one_rank_nothing_moves(tmp_path):
    plan = compiled(tmp_path, PPO.split("plan:")[0], 1)
    assert all(CostModel(plan, CLUSTER).moved(s).total == 0 for s in walk(plan) if isinstance(s, Transfer))
    assert "tp1 pp1 dp1" in explain_text(plan, CLUSTER)


# ---- the command line ----------------------------------------------------------------------------

@pytest.fixture
def program(tmp_path, monkeypatch):
    model_folder(tmp_path / "model")
    (tmp_path / "p.rlflow").write_text(PPO.replace("MODEL", "model"))
    monkeypatch.chdir(tmp_path)
    return "p.rlflow"


def test_compile_writes_a_plan_that_loads(program, tmp_path, capsys):
    assert main(["compile", program, "--ranks", "4", "-o", "out.json"]) == 0
    assert load_plan(tmp_path / "out.json").world == 4
    assert main(["compile", program, "--ranks", "4"]) == 0
    assert capsys.readouterr().out == (tmp_path / "out.json").read_text()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_compile_shows_its_stages(program, capsys):
    shown = ["--stop-after", "fuse", "--print-after", "cse", "--time-passes"]
    assert main(["compile", program, "--ranks", "4", *shown]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("flow p\n") and "# after cse\nflow p" in err and "split_reductions" in err
    assert main(["compile", program, "--stop-after", "fusee"]) == 2
    assert "did you mean `fuse`?" in capsys.readouterr().err


def test_explain_takes_a_program_or_a_plan(program, capsys):
    assert main(["compile", program, "--ranks", "4", "-o", "out.json"]) == 0
    capsys.readouterr()
    assert main(["explain", program, "--ranks", "4"]) == 0
    text = capsys.readouterr().out
    assert main(["explain", "out.json"]) == 0
    assert capsys.readouterr().out == text
    assert main(["explain", "out.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "rlflow.explain/1"


@pytest.mark.parametrize("arguments, code, said", [
    (["compile", "none.rlflow"], 2, "none.rlflow"), (["explain", "none.json"], 2, "none.json"),
    (["compile", "p.rlflow", "--ranks", "3"], 3, "P0101"), (["compile", "p.rlflow", "-s", "base=nowhere"], 2, "R0130"),
    (["compile", "p.rlflow", "--cluster", "none.toml"], 2, "P0107"),
    (["compile", "p.rlflow", "-o", "no/such/x.json"], 2, "P0110"),
])
def test_faults_are_diagnostics_with_exit_codes(program, capsys, arguments, code, said):
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == "" and said in err and "Traceback" not in err


def test_compiling_needs_no_torch():
    code = "import compiler.commands, sys; sys.exit(any(m.split('.')[0] in ('torch', 'runtime') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROGRAMS.parent).returncode == 0


def test_shipped_programs_are_explained(tmp_path):
    for name in ("ppo", "grpo", "sft", "reward_model"):
        plan = compile_program(shipped(tmp_path, name), CLUSTER, 2)
        assert plan.program.name in explain_text(plan, CLUSTER)


def test_switches_are_told_as_a_program_has_them(program, tmp_path, capsys):
    both = "    actor.train: parallel(tp=2), sequence_parallel(true)\n    actor: sequence_parallel(false)\n"
    text = (tmp_path / program).read_text()
    (tmp_path / program).write_text(text.replace("    actor.train: parallel(tp=2, pp=2)\n", both))
    assert main(["compile", program, "--ranks", "4"]) == 3
    said = capsys.readouterr().err
    assert "`sequence_parallel` is false here and true there" in said and "True" not in said
