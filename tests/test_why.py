"""`rlflowc explain --why`: the reasons it gives are those of the plan and of the cost model."""

from __future__ import annotations

import json

import pytest

from compiler.cluster_file import read_cluster
from compiler.compile import compile_program
from compiler.cost import CostModel, iteration_seconds
from compiler.plan import Plan
from compiler.proof.verify import walk
from compiler.proof.wellformed import shape_of
from compiler.reading.moves import HOW
from compiler.reading.searched import bounds_of, runners_up, terms
from compiler.reading.tables import Tables, rows_of, title_of
from compiler.reading.units import plural, seconds_text
from compiler.reading.why import why, why_json, why_text
from compiler.resharding.transitions import weight_transfer
from compiler.search.program import Searched
from rlhf_dsl.cli import main
from rlhf_dsl.diagnostics import DiagnosticError
from rlhf_dsl.frontend import loads
from tests.compiling import CLUSTER, PROGRAMS, compiled, model_folder, shipped
from tests.test_explain import PPO


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    return compiled(tmp_path_factory.mktemp("why"), PPO, 4)


def facts(plan: Plan, name: str) -> dict[str, list[str]]:
    return why_json(why(plan, CLUSTER, name))["facts"]


def test_a_value_is_explained_from_its_line_to_its_readers(plan):
    found = facts(plan, "kl")
    line = next(n for n, text in plan.program.lines.items() if text.strip().startswith("kl "))
    assert found[f"line {line}"] == ["kl       = logp_old - ref.logprobs(y)"]
    assert found["made by"] == ["equation kl, at home on ranks 0-3"]
    assert found["reads"] == ["logp_old, ref.logprobs(y)"]
    assert [reader.split(" (")[0] for reader in found["read by"]] == ["equation r", "metric kl"]


def test_a_constraint_is_named_with_its_line(plan):
    line = next(n for n, text in plan.program.lines.items() if "actor.train: parallel" in text)
    assert facts(plan, "actor.train")["because"] == [
        f"line {line} asks for it: actor.train: parallel(tp=2, pp=2)"]
    assert facts(plan, "ref.forward")["because"] == ["`plan:` leaves it open: data parallelism over 4 ranks"]
    assert any("parallel(pp=2)" in reason for reason in facts(plan, "critic")["because"])


def test_a_model_says_where_its_time_and_memory_go(plan):
    found, costs = facts(plan, "actor"), CostModel(plan, CLUSTER)
    assert found["devices"] == ["ranks 0-3, shared with ref, critic, reward"]
    assert found["layouts"] == ["actor.train tp2 pp2 dp1", "actor.generate tp1 pp1 dp4"]
    text = why_text(why(plan, CLUSTER, "actor"))
    steps = [line for line in text.splitlines() if "update/train actor" in line]
    train = next(r for r in rows_of(plan) if r.title == "update/train actor")
    share = train.times * costs.seconds(train.step, train.part) / iteration_seconds(costs)
    assert len(steps) == 1 and f"{share:.1%}".replace("%", " %") in steps[0]


def test_an_estimate_is_the_sum_of_its_parts_the_longest_first(plan):
    costs = CostModel(plan, CLUSTER)
    for row in rows_of(plan):
        parts = costs.estimate(row.step, row.part).parts
        assert sum(p.seconds for p in parts) == pytest.approx(costs.seconds(row.step, row.part)), row.title
        if parts and row.step.op != "update":
            told = facts(plan, row.title)["made of"]
            assert [line.split("  ")[-1].strip() for line in told] == [
                p.why for p in sorted(parts, key=lambda p: -p.seconds)], row.title


def test_the_work_of_a_forward_is_told(plan):
    assert any("FLOP a rank at 1.0 TFLOP/s" in line for line in facts(plan, "ref.logprobs(y)")["made of"])
    train = facts(plan, "update/train actor")["made of"]
    assert any("in rings of 2 over links inside a node" in line for line in train)
    assert any("2 stages of a pipeline" in line for line in train)


def test_a_transfer_says_for_whom_it_moves(plan):
    found = facts(plan, "transfer y to ref.forward")
    assert found["moves"][1:] == ["y, for forward ref.logprobs(y)"]
    costs = CostModel(plan, CLUSTER)
    moved = costs.moved(next(r.step for r in rows_of(plan) if r.title == "transfer y to ref.forward"))
    assert f"{moved.total / 1e3:.1f} kB in all" in found["moves"][0]


def test_readers_are_the_other_side_of_inputs(plan):
    tables = Tables(plan)
    for row in tables.rows:
        for expr in tables.inputs(row.step):
            if row.step.op != "transfer" and expr in tables.names:
                readers = [id(r.step) for r in tables.readers(expr)]
                assert id(row.step) in readers or row in tables.makers(expr), (row.title, tables.names[expr])


def test_a_name_of_one_section_needs_no_section(tmp_path):
    plan = compile_program(shipped(tmp_path, "ppo"), CLUSTER, 2)
    assert facts(plan, "ratio") == facts(plan, "update/ratio")


@pytest.mark.parametrize("name", ["ppo", "grpo", "dpo", "vapo", "distill", "safe_rlhf"])
def test_everything_in_a_plan_has_a_reason(tmp_path, name):
    plan = compile_program(shipped(tmp_path, name), CLUSTER, 2)
    for known in (*plan.models, *plan.layouts, *Tables(plan).values, *map(title_of, walk(plan))):
        text = why_text(why(plan, CLUSTER, known))
        assert text.startswith(known.split("/")[-1]) or text.startswith(known), known
        assert all(len(line) < 200 for line in text.splitlines())


def test_an_unknown_name_is_a_diagnostic(plan):
    with pytest.raises(DiagnosticError) as caught:
        why(plan, CLUSTER, "critc")
    found = caught.value.diagnostics[0]
    assert (found.code, found.help, caught.value.exit_code) == ("P0301", "did you mean `critic`?", 2)


def test_the_command_line(tmp_path, monkeypatch, capsys):
    model_folder(tmp_path / "model")
    (tmp_path / "p.rlflow").write_text(PPO.replace("MODEL", "model"))
    monkeypatch.chdir(tmp_path)
    assert main(["compile", "p.rlflow", "--ranks", "4", "-o", "p.plan.json"]) == 0
    capsys.readouterr()
    for arguments in (["p.rlflow", "--ranks", "4"], ["p.plan.json"]):
        assert main(["explain", *arguments, "--why", "critic.train", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["format"], found["kind"], found["name"]) == ("rlflow.why/1", "layout", "critic.train")
    assert main(["explain", "p.plan.json", "--why", "kl", "-s", "b=4"]) == 2
    assert "R0156" in capsys.readouterr().err


# ---- strategies, and what the search saw -----------------------------------------------------------

ORDER = {
    "zero_redundancy": ("at intervals", "each rank's shard there is part of its shard here", "nothing twice"),
    "minimal": ("at intervals", "each rank's shard there is part of its shard here", "nothing twice"),
    "vanilla": ("one after another", "stay beside it", "beside the new shard"),
    "all_gather": ("one after another", "stay beside it", "beside the new shard"),
}


@pytest.mark.parametrize("strategy", ORDER)
def test_a_layout_is_explained_by_its_strategy(tmp_path, strategy):
    layouts = f"plan:\n    actor.train: parallel(tp=4)\n    actor.generate: parallel(tp=2), reshard({strategy})\n"
    plan = compiled(tmp_path, PPO.split("plan:")[0] + layouts, 4)
    found, (at, inside, twice) = facts(plan, "actor.generate"), ORDER[strategy]
    assert at in found["order"][0] and inside in found["order"][0]
    assert HOW[strategy.replace("_", "-")] in found["weights"][0] and twice in found["weights"][2]
    step = next(s for s in walk(plan) if s.op == "reshard")
    transfer = weight_transfer(shape_of(plan, "actor"), "policy", plan.layouts, step.src, step.dst)
    assert (max(map(transfer.redundant_bytes, transfer.ranks)) > 0) == ("stay beside it" in found["order"][0])


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> tuple:
    """PPO with four 7B models where a search puts them on 128 devices: (plan, cluster)."""
    cluster = read_cluster(PROGRAMS / "clusters" / "a100-16x8.toml")
    text = PPO.split("plan:")[0].replace('"MODEL"', '"catalog:llama-2-7b"').replace("dim b = 8", "dim b = 1024")
    return compile_program(loads(text.replace("t <= 16", "t <= 512"), {}), cluster, placer=Searched()), cluster


def test_runners_up_say_which_term_makes_them_one(searched):
    plan, cluster = searched
    lines = why_json(why(plan, cluster, "actor"))["facts"]["runners-up"]
    best = sum(plan.search.stages.values())
    assert len(lines) == 2 * len(plan.alternatives)
    for other, line in zip(runners_up(plan), lines[1::2]):
        assert sum(other.stages.values()) == pytest.approx(other.iteration_s)
        assert other.iteration_s >= best * (1 - 1e-9)
        changes = {name: terms(other)[name] - terms(plan.search).get(name, 0.0) for name in terms(other)}
        most = max(changes, key=lambda name: abs(changes[name]))
        if "as good as" not in line:
            assert f"{most} {seconds_text(abs(changes[most]))} {'more' if changes[most] > 0 else 'less'}" in line


def test_numbers_of_devices_are_bound_by_what_fewer_and_more_would_do(searched):
    plan, cluster = searched
    found = why_json(why(plan, cluster, "critic"))["facts"]["devices"]
    group, bounds = next(g for g in plan.groups if "critic" in g.models), bounds_of(plan, "critic")
    assert f"fit on {plural(bounds.least, 'rank')} at least" in found[1] or "fits on" in found[1]
    best = sum(plan.search.stages.values())
    for other in bounds.others:
        assert other.ranks != group.ranks
        line = next(line for line in found if line.startswith(f"on {other.ranks}"))
        if other.stages and sum(other.stages.values()) > best * 1.01:
            assert " more" in line


def test_where_nothing_was_searched_nothing_is_said_of_it(plan):
    assert plan.search is None and "runners-up" not in facts(plan, "actor")
    assert facts(plan, "actor")["devices"] == ["ranks 0-3, shared with ref, critic, reward"]
