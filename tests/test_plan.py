"""Plans: what is written, that it comes back, and where models are placed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compiler.cluster_file import read_cluster
from compiler.compile import compile_program
from compiler.local import local_cluster
from compiler.passes import NAMES
from compiler.plan import LayoutSpec, Plan, UpdateLoop
from compiler.reading.units import degrees_text
from compiler.resharding.transitions import resolve
from compiler.sources import builtin_models, resolve_model
from compiler.steps import Generate, Reshard, TrainStep
from rlhf_dsl.diagnostics import DiagnosticError
from rlhf_dsl.frontend import load
from tests.compiling import CLUSTER, GROUPS, compiled, model_folder, shipped

GOLDEN = Path(__file__).parent / "golden"
UPDATE = os.environ.get("UPDATE_GOLDEN")  # set it to write what is, then read the difference


def loop_of(plan: Plan) -> UpdateLoop:
    return next(s for s in plan.steps if isinstance(s, UpdateLoop))


# ---- golden files ------------------------------------------------------------------------------

@pytest.mark.parametrize("name, ranks", [("ppo", 4), ("grpo", 2)])
def test_stages_are_as_written_down(name, ranks):
    path = GOLDEN / f"{name}.rlflow"
    graphs = {}

    def observe(stage, graph, seconds):
        graphs[stage] = str(graph)

    plan = compile_program(load(path), CLUSTER, ranks, observe)
    assert list(graphs) == ["graph", *NAMES]
    expect(GOLDEN / f"{name}.graph.txt", graphs["graph"])
    expect(GOLDEN / f"{name}.schedule.txt", graphs["schedule"])
    expect(GOLDEN / f"{name}.plan.json", plan.to_json().replace(str(GOLDEN), "FOLDER").replace(plan.digest, "DIGEST"))


def expect(path: Path, text: str) -> None:
    if UPDATE:
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; UPDATE_GOLDEN=1 writes it anew"


# ---- files -------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["ppo", "grpo", "sft", "reward_model"])
def test_a_plan_comes_back_from_its_file(tmp_path, name):
    plan = compile_program(shipped(tmp_path, name), CLUSTER, 2)
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.digest == plan.digest
    assert plan.to_json() == compile_program(shipped(tmp_path, name), CLUSTER, 2).to_json()


def test_a_plan_says_what_a_run_needs_without_the_source(tmp_path):
    plan = compile_program(shipped(tmp_path, "ppo"), CLUSTER, 2)
    value = json.loads(plan.to_json())
    assert value["format"] == "rlflow.plan/1"
    train = next(s for s in loop_of(plan).body if isinstance(s, TrainStep))
    assert plan.line_text(train.line).strip().startswith("train actor to maximize")
    assert plan.models["actor"].optimizer.lr.lr == plan.settings["lr"] and plan.models["ref"].optimizer is None
    assert [c.field for d in plan.data for c in d.columns] == ["prompt", "prompt", "answer"]
    assert plan.dims["t"].response == "y" and plan.dims["t"].lead == ("b",)
    assert Path(plan.ops["exact_match"].file).is_absolute()


def test_the_digest_follows_program_and_cluster(tmp_path):
    text = (GOLDEN / "ppo.rlflow").read_text().replace('"tiny"', '"MODEL"')
    plans = [compiled(tmp_path, given, 4) for given in (text, text, text.replace("0.05", "0.06"))]
    assert plans[0].digest == plans[1].digest != plans[2].digest
    assert plans[0].program.digest != plans[2].program.digest


def test_expressions_come_back_interned(tmp_path):
    plan = compile_program(shipped(tmp_path, "grpo"), CLUSTER, 2)
    table = plan.expr_table()
    assert len(set(map(id, table))) == len(plan.exprs)
    for row, expr in zip(plan.exprs, table):
        assert (row.op, row.args) == (expr.op, tuple(table.index(a) for a in expr.args))
        assert frozenset(row.grad) == expr.grad and row.attrs == dict(expr.attrs)


def test_a_plan_does_not_depend_on_the_order_of_hashes():
    code = ("from compiler.compile import compile_program as c; from rlhf_dsl.frontend import load; "
            f"from tests.compiling import CLUSTER; print(c(load({str(GOLDEN / 'grpo.rlflow')!r}), CLUSTER, 2).digest)")
    runs = [subprocess.run([sys.executable, "-c", code], cwd=GOLDEN.parent.parent, capture_output=True, text=True,
                           env=os.environ | {"PYTHONHASHSEED": seed}) for seed in ("1", "2")]
    assert runs[0].stdout == runs[1].stdout != "", runs[0].stderr


def test_constants_keep_their_kind(tmp_path):
    plan = Plan.from_json(compile_program(shipped(tmp_path, "grpo"), CLUSTER, 2).to_json())
    kinds = {type(e.attr("value")) for e in plan.expr_table() if e.op == "const"}
    assert kinds == {int, float}


# ---- placement ---------------------------------------------------------------------------------

TRAINED = GROUPS + '''
rollout:
    y[b, g, t] = actor.generate(prompts)
    kl = actor.logprobs(y) - ref.logprobs(y)
    metric reward = mean(reward.score(y)) + mean(critic.values(y))
update:
    train actor to maximize mean(actor.logprobs(y) * stop(kl))
    train critic to minimize mean(critic.values(y) ** 2)
plan:
'''


def without_caches(plan: Plan) -> dict[str, LayoutSpec]:
    """The layouts, whatever memory is left on the test's machine."""
    return {name: dataclasses.replace(spec, cache_bytes=0) for name, spec in plan.layouts.items()}



def test_without_constraints_every_model_is_data_parallel_on_all_ranks(tmp_path):
    plan = compiled(tmp_path, TRAINED.replace("plan:\n", ""), 3)
    assert without_caches(plan) == {
        "actor.train": LayoutSpec(3, dp=3), "actor.generate": LayoutSpec(3, dp=3, within="actor.train"),
        "ref.forward": LayoutSpec(3, dp=3), "critic.train": LayoutSpec(3, dp=3), "reward.forward": LayoutSpec(3, dp=3)}


def test_constraints_are_kept(tmp_path):
    plan = compiled(tmp_path, TRAINED + '''
    actor.train: parallel(tp=2, pp=2), micro_batch(4)
    actor.generate: parallel(tp=2)
    ref: parallel(pp=4), tokens(512)
    critic: colocate(reward)
    assume: prompt=100, response=10
''', 8)
    assert plan.layouts["actor.train"] == LayoutSpec(8, 2, 2, 2)
    assert without_caches(plan)["actor.generate"] == LayoutSpec(8, 2, 1, 4, within="actor.train")
    assert plan.layouts["ref.forward"] == LayoutSpec(8, 1, 4, 2)
    train = next(s for s in loop_of(plan).body if isinstance(s, TrainStep))
    assert (train.micro_batch, train.tokens) == (4, 0)
    forward = next(s for s in plan.steps if s.op == "forward" and s.model == "ref")
    assert (forward.micro_batch, forward.tokens) == (0, 512)
    assert plan.assume == {"prompt": 100, "response": 10}
    reshard = next(s for s in plan.steps if isinstance(s, Reshard))
    assert reshard.total_bytes > 0
    assert sorted(resolve(plan.layouts, "actor.generate").ranks) == list(range(8))


def test_how_engines_compute_is_kept_where_it_has_something_to_act_on(tmp_path):
    program = TRAINED + '''
    actor: parallel(tp=2, pp=2, chunks=2), sequence_parallel(true), recompute(full), precision(bf16)
    actor.generate: precision(fp32)
    critic: optimizer(sharded), sequence_parallel(true)
    ref: parallel(tp=2), sequence_parallel(true), precision(bf16)
'''
    plan = compiled(tmp_path, program, 4)
    assert plan.layouts["actor.train"] == LayoutSpec(4, 2, 2, chunks=2, sequence_parallel=True, precision="bf16")
    assert plan.layouts["critic.train"] == LayoutSpec(4, dp=4, sharded_optimizer=True)
    assert plan.layouts["ref.forward"] == LayoutSpec(4, 2, dp=2, sequence_parallel=True, precision="bf16")
    assert [s.recompute for s in loop_of(plan).body if isinstance(s, TrainStep)] == [True, False]
    narrow = compiled(tmp_path, program.replace("    actor.generate: precision(fp32)\n", ""), 4)
    assert (plan.layouts["actor.generate"].precision, narrow.layouts["actor.generate"].precision) == ("fp32", "bf16")
    wide = compiled(tmp_path, program.replace(", precision(bf16)\n    actor.gen", "\n    actor.gen"), 4)
    moved = [next(s.total_bytes for s in p.steps if isinstance(s, Reshard)) for p in (plan, narrow, wide)]
    assert moved[0] == moved[1] == moved[2] // 2 > 0
    assert resolve(plan.layouts, "actor.train").layers(4, 0) == (range(0, 1), range(2, 3))
    assert degrees_text(plan.layouts["actor.train"]) == "tp2 pp2 dp1 chunks2 sequence-parallel bf16"
    assert degrees_text(plan.layouts["critic.train"]) == "tp1 pp1 dp4 sharded-optimizer"


def placed_by(tmp_path: Path, constraints: str, ranks: int) -> dict[tuple[str, ...], tuple[int, int]]:
    """(first, ranks) of each group, which the layouts of its models have, too."""
    plan = compiled(tmp_path, TRAINED + constraints, ranks)
    for name, spec in plan.layouts.items():
        group = next(g for g in plan.groups if name.split(".")[0] in g.models)
        assert (spec.first, spec.ranks) == (group.first, group.ranks)
    return {group.models: (group.first, group.ranks) for group in plan.groups}


def test_devices_gives_models_ranks_for_themselves(tmp_path):
    """Sets in order of declaration; who says nothing shares what is left, `colocate` or not."""
    assert placed_by(tmp_path, "    critic: devices(2)\n", 6) == {("critic",): (0, 2), ("actor", "ref", "reward"): (2, 4)}
    found = placed_by(tmp_path, "    reward: devices(2)\n    actor: devices(4), parallel(tp=2)\n", 8)
    assert found == {("actor",): (0, 4), ("reward",): (4, 2), ("ref", "critic"): (6, 2)}
    found = placed_by(tmp_path, "    reward: colocate(actor)\n    actor.generate: devices(3)\n", 4)
    assert found == {("actor", "reward"): (0, 3), ("ref", "critic"): (3, 1)}
    assert placed_by(tmp_path, "    reward: colocate(actor)\n", 4) == {("actor", "ref", "critic", "reward"): (0, 4)}


def test_colocate_joins_through_others(tmp_path):
    found = placed_by(tmp_path, "    reward: colocate(ref), devices(2)\n    critic: colocate(ref)\n", 3)
    assert found == {("ref", "critic", "reward"): (0, 2), ("actor",): (2, 1)}


def test_degrees_are_of_the_ranks_of_a_set(tmp_path):
    plan = compiled(tmp_path, TRAINED + """
    actor: devices(4), parallel(tp=2)
    actor.generate: parallel(tp=2)
    critic: devices(2), parallel(pp=2)
    ref: parallel(tp=2)
""", 8)
    assert without_caches(plan) == {
        "actor.train": LayoutSpec(4, 2, 1, 2), "actor.generate": LayoutSpec(4, 2, 1, 2, within="actor.train"),
        "ref.forward": LayoutSpec(2, 2, 1, 1, first=6), "critic.train": LayoutSpec(2, 1, 2, 1, first=4),
        "reward.forward": LayoutSpec(2, 1, 1, 2, first=6)}
    assert sorted(resolve(plan.layouts, "critic.train").ranks) == [4, 5]


@pytest.mark.parametrize("constraint, ranks", [("actor: parallel(pp=3)", 6), ("critic: parallel(dp=3)", 3),
                                               ("ref: parallel(tp=4)", 8), ("ref: devices(2)", 8),
                                               ("ref: devices(2)\n    critic: parallel(tp=4)", 6),
                                               ("ref: devices(2)\n    critic: parallel(dp=1)", 3),
                                               ("ref: devices(7)", 8),
                                               ("ref: devices(2)\n    actor: colocate(reward, critic), devices(3)", 5)])
def test_the_number_of_ranks_follows_the_constraints(tmp_path, constraint, ranks):
    assert compiled(tmp_path, TRAINED + f"    {constraint}\n", None).world == ranks


def test_the_number_of_ranks_follows_machine_and_batch(tmp_path):
    text = TRAINED.replace("plan:\n", "")
    assert compiled(tmp_path, text, None).world == 8
    assert compiled(tmp_path, text, None, b="2").world == 2
    assert compiled(tmp_path, text, None, local_cluster()).world == min(local_cluster().devices, 4)


FAULTS = [
    ("actor.train: parallel(tp=2)", 3, "P0101", "a multiple of 2", "--ranks 2"),
    ("actor.train: parallel(tp=2, dp=2)", 2, "P0101", "needs 4 ranks", "--ranks 4"),
    ("critic: parallel(tp=3)", 3, "P0102", "tp 3 does not divide", "degrees"),
    ("critic: parallel(pp=8)", 8, "P0102", "pp 8 exceeds the 4 layers", "degrees"),
    ("reward: devices(4)", 4, "P0103", "none is left for `actor`, `ref` and `critic`", "--ranks 5"),
    ("reward: devices(4)", 2, "P0103", "there are not as many", "`colocate`"),
    ("reward: devices(2)\n    ref: devices(3)\n    critic: parallel(tp=2)", 4, "P0103", "3 belong to others", "--ranks 7"),
    ("reward: devices(2)\n    critic: parallel(tp=2, dp=2)", 4, "P0101", "needs 4 ranks, but there are 2", "--ranks 6"),
    ("reward: devices(3), parallel(tp=2)", 4, "P0101", "a multiple of 2 ranks", "`devices(2)`"),
    ("ref: devices(2), colocate(critic)\n    critic.train: devices(1)", 4, "P0108", "`devices` is 1 here and 2", "leave"),
    ("ref: devices(2)\n    critic: devices(1)\n    reward: colocate(ref, critic)", 4, "P0108", "1 here and 2", "leave"),
    ("critic: engine(vllm)", 2, "P0104", "no engine `vllm`", "megatron"),
    ("actor.generate: engine(megatron)", 2, "P0104", "no engine `megatron`", "`torch` and `vllm`"),
    ("ref.generate: parallel(tp=2)", 2, "P0105", "a stage that `ref` does not have", "forward"),
    ("actor: parallel(tp=2)\n    actor.forward: parallel(tp=1)", 2, "P0108", "`tp` is 1 here and 2 there", "leave one"),
    ("actor.generate: parallel(pp=2)", 2, "P0102", "no pipeline", "degrees"),
    ("critic: parallel(pp=2, chunks=4)", 2, "P0102", "pp 2 in 4 chunks exceeds the 4 layers", "degrees"),
    ("critic: parallel(tp=2, chunks=2)", 2, "P0102", "a pipeline", "degrees"),
    ("ref: recompute(full)", 2, "P0117", "`ref.forward` takes no `recompute`", "`train`"),
    ("actor.generate: sequence_parallel(true)", 2, "P0117", "`actor.generate` takes no `sequence_parallel`", "`forward`"),
    ("ref: optimizer(sharded)", 2, "P0117", "`ref.forward` takes no `optimizer`", "`train`"),
]


@pytest.mark.parametrize("constraint, ranks, code, message, help", FAULTS)
def test_what_cannot_be_placed_is_a_diagnostic_with_a_way_out(tmp_path, constraint, ranks, code, message, help):
    with pytest.raises(DiagnosticError) as caught:
        compiled(tmp_path, TRAINED + f"    {constraint}\n", ranks)
    (found,) = caught.value.diagnostics
    assert (found.code, caught.value.exit_code) == (code, 3)
    assert message in found.message and help in found.help
    assert found.span is not None and found.source is not None


def test_more_ranks_than_a_described_cluster_has(tmp_path):
    with pytest.raises(DiagnosticError) as caught:
        compiled(tmp_path, TRAINED.replace("plan:\n", ""), 16)
    assert caught.value.diagnostics[0].code == "P0106"


def test_weights_of_a_frozen_sampler_move_once(tmp_path):
    plan = compiled(tmp_path, GROUPS + '''
rollout:
    y[b, g, t] = ref.generate(prompts)
update:
    train actor to maximize mean(actor.logprobs(y))
''')
    assert [type(s) for s in plan.setup] == [Reshard] and not any(isinstance(s, Reshard) for s in plan.steps)
    copied = compiled(tmp_path, GROUPS + '''
rollout:
    y[b, g, t] = ref.generate(prompts)
update:
    train actor to maximize mean(actor.logprobs(y))
run:
    steps = 1
    every 1: copy(actor, ref)
''')
    kinds = [type(s) for s in copied.steps]
    assert not copied.setup and kinds.index(Reshard) < kinds.index(Generate)


# ---- sources and clusters ------------------------------------------------------------------------

def test_models_are_found_beside_the_program_then_here(tmp_path, monkeypatch):
    monkeypatch.chdir(model_folder(tmp_path / "here" / "m").parent)
    beside = model_folder(tmp_path / "there" / "m")
    assert resolve_model("m", tmp_path / "there") == beside
    assert resolve_model("m", tmp_path) == Path("m")
    assert resolve_model(str(beside), "/") == beside


@pytest.mark.parametrize("source", ["nowhere", "builtin:huge"])
def test_a_missing_model_is_reported_at_its_line(tmp_path, source):
    with pytest.raises(DiagnosticError) as caught:
        compiled(tmp_path, TRAINED.replace("plan:\n", ""), 2, base=source)
    (found,) = caught.value.diagnostics
    assert found.code == "R0130" and caught.value.exit_code == 2
    assert "model actor = policy(base)" in found.source.slice(found.span)
    if source.startswith("builtin:"):
        assert all(name in found.help for name in builtin_models())


def test_a_model_that_is_not_supported_is_named_with_its_file(tmp_path):
    folder = model_folder(tmp_path / "other", model_type="gpt2")
    with pytest.raises(DiagnosticError) as caught:
        compiled(tmp_path, TRAINED.replace("plan:\n", ""), 2, base=str(folder))
    (found,) = caught.value.diagnostics
    assert "gpt2" in found.message and found.place.endswith("config.json") and found.span is not None


GOOD = """
nodes = 2
devices_per_node = 4
[device]
tflops = 400
memory_gb = 80
memory_gb_per_s = 3000
[links]
intra_gb_per_s = 400
inter_gb_per_s = 50
latency_us = 10
"""


def test_a_cluster_file_is_read(tmp_path):
    (tmp_path / "c.toml").write_text(GOOD)
    cluster = read_cluster(tmp_path / "c.toml")
    assert (cluster.name, cluster.devices, cluster.device.flops) == ("c", 8, 4e14)
    assert cluster.machines[0].inter_latency == pytest.approx(1e-5)


@pytest.mark.parametrize("before, after, reason", [
    ("nodes = 2", "node = 2", "unknown key `node`"), ("nodes = 2", "nodes = 0", "positive integer"),
    ("tflops = 400", 'tflops = "many"', "positive number"), ("[links]", "[links", "expected"),
    ("nodes = 2\n", "", "`nodes`"),
])
def test_a_wrong_cluster_file_is_a_diagnostic(tmp_path, before, after, reason):
    (tmp_path / "c.toml").write_text(GOOD.replace(before, after, 1))
    with pytest.raises(DiagnosticError) as caught:
        read_cluster(tmp_path / "c.toml")
    assert caught.value.exit_code == 2 and reason.lower() in caught.value.diagnostics[0].message.lower()
