"""Programs on described clusters: what they ask of their models, what `plan:` fixes, and what is said of it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compiler.catalog import model_shape
from compiler.cluster_file import read_cluster
from compiler.compile import compile_program, lower_and_place
from compiler.cost import CostModel, generation, memory, training
from compiler.cost.layouts import Degrees
from compiler.cost.workload import FORWARD, GENERATE, TRAIN
from compiler.emit import Target, emit
from compiler.proof.fits import fit_faults
from compiler.proof.verify import load_plan, walk
from compiler.search.derive import workload_of
from compiler.search.program import Searched, placement_on
from rlhf_dsl.cli import main
from rlhf_dsl.diagnostics import DiagnosticError
from rlhf_dsl.frontend import load, loads

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = sorted((ROOT / "programs").glob("*.rlflow"))
CLUSTERS = ROOT / "programs" / "clusters"


def checked_with(tmp_path: Path, plan: str = "", program: str = "ppo"):
    """The program with a `plan:` section, its batch as in a large run."""
    copy = tmp_path / f"{program}.rlflow"
    text = (ROOT / "programs" / f"{program}.rlflow").read_text()
    lines = "".join(f"    {line}\n" for line in plan.split("; ")) if plan else ""
    copy.write_text(text.replace('from rewards.arithmetic import exact_match\n', "").replace(
        text[text.index("eval("):text.index("run:")], "") + (f"\nplan:\n{lines}" if plan else ""))
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "data" / "heldout.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return load(str(copy), {"b": "1024", "t": "1024"})


def shapes_of(checked, name: str = "llama-2-7b"):
    return {model: model_shape(name) for model in checked.models}


def placed(tmp_path, plan: str, cluster: str = "a100-16x8", name: str = "llama-2-7b"):
    checked = checked_with(tmp_path, plan)
    fronts, found = placement_on(checked, shapes_of(checked, name), read_cluster(CLUSTERS / f"{cluster}.toml"))
    return fronts.workload, found, {m.model: (g, m.choice) for g in found.groups for m in g.models}


def test_the_calls_of_ppo(tmp_path):
    checked = checked_with(tmp_path, "assume: prompt=512, response=600")
    workload = workload_of(checked, shapes_of(checked))
    calls = [(stage.name, c.model, c.kind, c.rows, c.prompt, c.response, c.epochs, c.minibatches)
             for stage in workload.stages for c in stage.calls]
    assert sorted(calls) == sorted([
        ("generation", "actor", GENERATE, 1024, 512, 600, 1, 1),
        *(("scoring", m, FORWARD, 1024, 512, 600, 1, 1) for m in ("actor", "ref", "reward", "critic")),
        ("training", "actor", TRAIN, 1024, 512, 600, 2, 4), ("training", "critic", TRAIN, 1024, 512, 600, 2, 4),
    ])


def test_the_longest_response_is_waited_for(tmp_path):
    checked = checked_with(tmp_path, "assume: prompt=512, response=600, longest=900")
    calls = [c for stage in workload_of(checked, shapes_of(checked)).stages for c in stage.calls]
    assert {(c.response, c.steps, c.tail) for c in calls} == {(600, 900, 0.5)}
    mean, late = (placed(tmp_path, f"assume: response=600, longest={n}")[1].stages for n in (600, 900))
    assert late[0] > mean[0] and late[1:] == pytest.approx(mean[1:], rel=0.05)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.stem)
def test_every_program_has_a_workload(path):
    checked = load(str(path), {})
    workload = workload_of(checked, shapes_of(checked, "llama-3.2-1b"))
    trained = {call.model for stage in workload.stages for call in stage.calls if call.kind == TRAIN}
    assert trained == {train.model for update in checked.updates for train in update.trains}
    for stage in workload.stages:
        assert all(call.rows > 0 and call.response > 0 for call in stage.calls)


def test_pairs_of_responses_are_trained_together():
    checked = load(str(ROOT / "programs" / "dpo.rlflow"), {})
    workload = workload_of(checked, shapes_of(checked))
    rows = {(c.model, c.kind): c.rows for s in workload.stages for c in s.calls if c.kind == TRAIN}
    size = next(d.size for d in checked.dims.values() if d.root)
    assert list(rows.values()) == [2 * size]


# ---- constraints -----------------------------------------------------------------------------------

def test_degrees_are_kept(tmp_path):
    _, _, models = placed(tmp_path, "actor.train: parallel(tp=8, pp=2); actor.generate: parallel(tp=4)")
    choice = models["actor"][1]
    assert (choice.layout.tp, choice.layout.pp, choice.generate.tp) == (8, 2, 4)


def test_devices_sets_and_micro_batches_are_kept(tmp_path):
    _, _, models = placed(tmp_path, "critic: devices(32), colocate(reward), micro_batch(2)")
    group, choice = models["critic"]
    assert group.devices == 32 and choice.micro.samples <= 2
    assert "reward" in [m.model for m in group.models]


def test_a_constraint_never_makes_it_faster(tmp_path):
    free = placed(tmp_path, "assume: prompt=64")[1].iteration_s
    bound = placed(tmp_path, "actor.train: parallel(tp=8, pp=1); assume: prompt=64")[1].iteration_s
    assert bound >= free * 0.99


@pytest.mark.parametrize("plan, name, cluster, code", [
    ("assume: prompt=64", "llama-2-70b", "a100-1x8", "P0113"),
    ("actor: parallel(tp=8, pp=3)", "llama-2-7b", "a100-16x8", "P0115"),
    ("actor: devices(40); ref: devices(40); critic: devices(16), colocate(reward)", "llama-2-7b", "mixed", "P0114"),
])
def test_what_does_not_fit_is_a_diagnostic(tmp_path, plan, name, cluster, code):
    with pytest.raises(DiagnosticError, match=code) as caught:
        placed(tmp_path, plan, cluster, name)
    assert caught.value.exit_code == 3
    if code == "P0113":
        assert "nodes like those" in caught.value.diagnostics[0].help


CONTRADICTIONS = [
    ("actor: devices(4); ref: devices(8)", "P0103", "4 belong to others", "ref: devices(8)"),
    ("actor: devices(16)", "P0103", "there are not as many", "actor: devices(16)"),
    ("actor: devices(8)", "P0103", "none is left for `ref`, `critic` and `reward`", "actor: devices(8)"),
    ("actor: devices(3)", "P0118", "no number of devices", "actor: devices(3)"),
    ("actor: devices(4), parallel(tp=8)", "P0101", "a multiple of 8 ranks, but there are 4", "parallel(tp=8)"),
    ("actor: devices(4), parallel(tp=2, pp=1, dp=1)", "P0101", "needs 2 ranks, but there are 4", "parallel(tp=2"),
    ("actor: devices(4); actor.generate: parallel(tp=2, dp=4)", "P0101", "needs 8 ranks", "actor.generate:"),
    ("actor: devices(4); actor.generate: devices(2)", "P0108", "`devices` is 2 here and 4 there", "actor.generate:"),
    ("actor.train: parallel(tp=2, pp=1, dp=2); actor.generate: parallel(tp=1, dp=8)", "P0108", "8 ranks here and 4",
     "dp=8"),
    ("ref: devices(2), colocate(critic); critic: devices(4)", "P0108", "`devices` is 4 here and 2 there",
     "critic: devices(4)"),
    ("ref: colocate(critic), parallel(tp=4, pp=1, dp=1); critic: parallel(tp=8)", "P0101", "a multiple of 8",
     "critic:"),
    ("actor: parallel(tp=3)", "P0102", "tp 3 does not divide", "actor: parallel(tp=3)"),
    ("actor: parallel(pp=64)", "P0102", "pp 64 exceeds", "actor: parallel(pp=64)"),
    ("actor: micro_batch(2); actor.train: micro_batch(4)", "P0108", "`micro_batch` is 4 here and 2 there",
     "actor.train:"),
    ("ref.generate: parallel(tp=2)", "P0105", "a stage that `ref` does not have", "ref.generate"),
]


@pytest.mark.parametrize("plan, code, message, line", CONTRADICTIONS)
def test_a_contradiction_is_reported_at_its_place(tmp_path, plan, code, message, line):
    with pytest.raises(DiagnosticError) as caught:
        placed(tmp_path, plan, "a100-1x8")
    (found,) = caught.value.diagnostics
    assert (found.code, caught.value.exit_code) == (code, 3) and message in found.message and found.help
    assert line in found.source.line(found.source.position(found.span.start)[0])


def test_devices_are_for_a_set_alone(tmp_path):
    groups = placed(tmp_path, "critic: devices(16), colocate(ref); reward: devices(8)")[1].groups
    assert {tuple(m.model for m in g.models): g.devices for g in groups} == {
        ("actor",): 104, ("ref", "critic"): 16, ("reward",): 8}


def test_limits_of_micro_batches_and_recomputation_are_kept(tmp_path):
    free = placed(tmp_path, "actor: parallel(tp=8, pp=4)")[2]["actor"][1].micro
    few = placed(tmp_path, "actor: parallel(tp=8, pp=4), tokens(2200)")[2]["actor"][1].micro
    assert few.samples == 2 and free.samples != 2  # samples of 1088 tokens
    for asked, again in (("full", True), ("none", False)):
        assert placed(tmp_path, f"actor: recompute({asked})")[2]["actor"][1].micro.recompute == again


# ---- command line ----------------------------------------------------------------------------------

def explain(capsys, *more: str) -> str:
    program, cluster = str(ROOT / "programs" / "ppo.rlflow"), str(CLUSTERS / "a100-16x8.toml")
    assert main(["explain", program, "--cluster", cluster, "-s", "base=catalog:llama-2-7b", "-s", "b=512",
                 "-s", "t=1024", *more]) == 0
    return capsys.readouterr().out


def test_explain_on_a_described_cluster(capsys):
    text = explain(capsys)
    assert "on 128 ranks of cluster a100-16x8" in text and "found by the search for the shortest iteration" in text
    assert "allocations of devices considered" in text and "(this plan)" in text
    for word in ("actor.generate", "critic.train", "generate y", "update/train actor", "memory on the fullest rank"):
        assert word in text


def test_explain_json_has_its_keys(capsys):
    found = json.loads(explain(capsys, "--json"))
    assert found["estimate"]["iteration_s"] > 0
    assert sorted(m for g in found["groups"] for m in g["models"]) == sorted(found["models"])
    assert {"tp", "pp", "dp"} <= found["models"]["actor"]["train"].keys() & found["models"]["actor"]["generate"].keys()
    assert all(m["memory_bytes"] > 0 for m in found["models"].values())
    assert found["search"]["seconds"] > 0 and found["alternatives"]
    assert {"value", "from", "to", "bytes_per_rank", "total_bytes", "lower_bound_bytes"} <= found["transfers"][0].keys()


def test_an_unknown_model_of_the_catalogue(capsys):
    program, cluster = str(ROOT / "programs" / "ppo.rlflow"), str(CLUSTERS / "a100-16x8.toml")
    code = main(["explain", program, "--cluster", cluster, "-s", "base=catalog:llama-2-8b"])
    assert code == 3 and "P0112" in capsys.readouterr().err


# ---- engines of generation -------------------------------------------------------------------------

@pytest.mark.parametrize("cluster, offload", [("a100-1x8", True), ("a100-16x8", False)])
def test_what_vllm_reserves_is_there_while_others_compute(tmp_path, cluster, offload):
    """Its weights and its cache are no part of what takes turns, unless all of it is offloaded: in the search, and in
    the memory of the plan."""
    machines = read_cluster(CLUSTERS / f"{cluster}.toml")
    checked = checked_with(tmp_path, "actor.generate: engine(vllm)")
    shapes = shapes_of(checked)
    found = placement_on(checked, shapes, machines)[1]
    plan = lower_to_plan(checked, shapes, machines)
    costs = CostModel(plan, machines)
    generate = next(step for step in walk(plan) if step.op == "generate")
    group = next(g for g in found.groups if any(m.model == "actor" for m in g.models))
    option = next(m.option for m in group.models if m.model == "actor")
    own = costs.memory("actor")
    held = own.weights + own.gradients + own.optimizer + own.generation + own.cache
    assert option.choice.offload == offload and option.resident == pytest.approx(held * (not offload), rel=0.05)
    assert own.generation == pytest.approx(training.weight_bytes(*costs.placed("actor.generate")), rel=1e-6)
    assert memory.idle(costs, "actor") == pytest.approx(option.resident, rel=0.05)
    assert costs.peak([m.model for m in group.models]) <= costs.machine("actor").usable
    assert costs.sequences(generate) <= generation.MOST_SEQUENCES["vllm"]


def lower_to_plan(checked, shapes, cluster):
    """With shapes in place of model folders."""
    placement = Searched()(checked, shapes, cluster, None)
    target = Target(cluster.digest, placement, str(Path(checked.path).parent), shapes)
    return emit(checked, lower_and_place(checked, placement), target)


# ---- how weights move ------------------------------------------------------------------------------

@pytest.mark.parametrize("lines", [
    *(f"actor.generate: reshard({name})" for name in ("zero_redundancy", "vanilla", "all_gather", "minimal")),
    "actor.generate: engine(vllm)", "actor: parallel(tp=2, pp=4); actor.generate: parallel(tp=8), engine(vllm)",
])
def test_a_search_prices_the_strategy_that_the_plan_has(tmp_path, lines):
    """Seconds of the move and weights beside those of training: the search's are the plan's."""
    cluster, checked = read_cluster(CLUSTERS / "a100-16x8.toml"), checked_with(tmp_path, lines)
    shapes = shapes_of(checked)
    found = placement_on(checked, shapes, cluster)[1]
    plan = lower_to_plan(checked, shapes, cluster)
    costs = CostModel(plan, cluster)
    move = next(step for step in walk(plan) if step.op == "reshard")
    choice = next(m.choice for g in found.groups for m in g.models if m.model == "actor")
    assert Degrees(*(getattr(plan.layouts["actor.generate"], a) for a in ("tp", "pp", "dp"))) == choice.generate
    assert move.strategy.replace("-", "_") in lines or "reshard" not in lines
    assert costs.seconds(move) == pytest.approx(plan.search.transition, rel=1e-9) and plan.search.transition > 0.01


def test_another_strategy_is_best_in_another_layout(tmp_path):
    """By vanilla, what is best by zero redundancy is slower than what the search finds."""
    usual = placed(tmp_path, "assume: prompt=64")[2]["actor"][1]
    vanilla = "actor.generate: reshard(vanilla)"
    _, found, models = placed(tmp_path, vanilla)
    own = models["actor"][1]
    assert (own.layout, own.generate) != (usual.layout, usual.generate)
    degrees = f"actor.train: parallel(tp={usual.layout.tp}, pp={usual.layout.pp})"
    bound = placed(tmp_path, f"{vanilla}, parallel(tp={usual.generate.tp}); {degrees}")[1]
    assert bound.iteration_s > 1.01 * found.iteration_s


# ---- units -----------------------------------------------------------------------------------------

TOGETHER = """
dim b = 256
dim g = 6
dim t <= 512
dim c <= 512
dim d <= 512
data prompts[b], good[b, c], bad[b, d] after prompts = jsonl("pairs.jsonl", "prompt", "good", "bad")
model actor = policy("catalog:llama-2-7b") trained by adamw(lr=1e-6)
rollout:
    y[b, g, t] = actor.generate(prompts)
update(minibatches=4):
    train actor to maximize OBJECTIVE
run:
    steps = 1
plan:
    LIMIT
"""


@pytest.mark.parametrize("objective, together", [
    ("mean(actor.logprobs(y))", 1), ("mean(max[g](sum[t](actor.logprobs(y))))", 6),
    ("mean(log_sigmoid(sum[c](actor.logprobs(good)) - sum[d](actor.logprobs(bad))))", 2),
])
@pytest.mark.parametrize("limit", ["assume: prompt=64", "actor: micro_batch(9)"])
def test_micro_batches_are_of_whole_units(tmp_path, objective, together, limit):
    """A pair, or a row with the group that its objective needs, is in one micro-batch: in the search as in the plan."""
    text = TOGETHER.replace("OBJECTIVE", objective).replace("LIMIT", limit)
    checked, cluster = loads(text, {}, str(tmp_path / "p.rlflow")), read_cluster(CLUSTERS / "a100-1x8.toml")
    found = []
    plan = compile_program(checked, cluster, placer=Searched(told=found.append))
    micro = found[0].groups[0].models[0].choice.micro
    train = next(step for step in walk(plan) if step.op == "train")
    costs = CostModel(plan, cluster)
    call = costs.call(train, 1 / 4)
    assert call.together == together and micro.samples % together == 0
    assert train.micro_batch == micro.samples // together
    assert costs.micro(train, call) == micro
    assert micro.samples <= 9 or "micro_batch" not in limit


# ---- plans -----------------------------------------------------------------------------------------

ARGUMENTS = ["-s", "base=catalog:llama-2-7b", "-s", "b=512", "-s", "t=1024"]


def compiled_file(tmp_path, cluster: str, *more: str) -> Path:
    path = tmp_path / "found.plan.json"
    assert main(["compile", str(ROOT / "programs" / "ppo.rlflow"), "--cluster", str(CLUSTERS / f"{cluster}.toml"),
                 *ARGUMENTS, *more, "-o", str(path)]) == 0
    return path


def test_a_found_placement_is_a_plan(tmp_path):
    """Layouts lie in the ranks of their group; groups are disjoint; the plan is proved and fits."""
    plan = load_plan(compiled_file(tmp_path, "a100-16x8"))
    cluster = read_cluster(CLUSTERS / "a100-16x8.toml")
    assert list(fit_faults(plan, cluster)) == [] and plan.world <= cluster.devices and plan.alternatives
    for group in plan.groups:
        layouts = [spec for name, spec in plan.layouts.items() if name.split(".")[0] in group.models]
        assert {(spec.first, spec.ranks) for spec in layouts} == {(group.first, group.ranks)}
    train = next(step for step in walk(plan) if step.op == "train")
    assert train.micro_batch >= 1
    others = [alternative.groups for alternative in plan.alternatives]
    assert all(sorted(m for g in groups for m in g.models) == ["actor", "critic", "ref", "reward"] for groups in others)


def test_large_plans_are_small_files_and_always_the_same(tmp_path):
    """PPO on 1,024 devices: under a megabyte, the same bytes in processes with other hashes."""
    texts = set()
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.json"
        program, cluster = str(ROOT / "programs" / "ppo.rlflow"), str(CLUSTERS / "h100-128x8.toml")
        command = [sys.executable, "-P", "-m", "rlhf_dsl.cli", "compile", program, "--cluster", cluster, *ARGUMENTS,
                   "-o", str(path)]
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed})
        texts.add(path.read_bytes())
    (text,) = texts
    assert len(text) < 1e6 and json.loads(text)["world"] == 1024


def test_a_plan_that_does_not_fit_is_refused(tmp_path, capsys):
    plan = str(compiled_file(tmp_path, "a100-16x8"))
    assert main(["explain", plan, "--cluster", str(CLUSTERS / "a100-16x8.toml")]) == 0
    assert main(["explain", plan, "--cluster", str(CLUSTERS / "a100-1x8.toml")]) == 3
    assert "P0204" in (said := capsys.readouterr().err) and "128 ranks, there are 8 devices" in said
    small = tmp_path / "small.toml"
    small.write_text((CLUSTERS / "a100-16x8.toml").read_text().replace('"a100-80gb"', '"a100-40gb"'))
    roomy = load_plan(Path(plan))
    tight = dataclasses.replace(read_cluster(small), machines=tuple(
        dataclasses.replace(m, memory=m.memory / 8) for m in read_cluster(small).machines))
    assert any("GB on the fullest rank, a plan may fill" in reason for reason in fit_faults(roomy, tight))


def test_an_objective_needs_a_cluster(capsys):
    assert main(["explain", str(ROOT / "programs" / "ppo.rlflow"), "--objective", "time"]) == 2
    assert "--cluster FILE" in capsys.readouterr().err


def test_device_hours_take_fewer_devices(tmp_path):
    hours = load_plan(compiled_file(tmp_path, "a100-16x8", "--objective", "device-hours"))
    assert hours.world < load_plan(compiled_file(tmp_path, "a100-16x8")).world


@pytest.mark.parametrize("ranks, code", [("16", ""), ("4", ""), ("12", "P0116"), ("1000", "P0106")])
def test_a_search_on_some_of_the_devices(tmp_path, capsys, ranks, code):
    program, cluster = str(ROOT / "programs" / "ppo.rlflow"), str(CLUSTERS / "a100-16x8.toml")
    command = ["compile", program, "--cluster", cluster, "-s", "base=catalog:llama-3.2-1b", "--ranks", ranks]
    assert main(command) == (3 if code else 0)
    told = capsys.readouterr()
    assert code in told.err if code else json.loads(told.out)["world"] == int(ranks)
