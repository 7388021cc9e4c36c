"""`rlflowc explain --analyze`: medians of what a run wrote down, beside the estimates of its plan."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from compiler.cost import CostModel, iteration_seconds
from compiler.plan import Plan
from compiler.reading.analyze import analysis_json, analysis_text, analyze
from compiler.reading.tables import ITERATION, rows_of
from rlhf_dsl.cli import main
from rlhf_dsl.diagnostics import DiagnosticError
from runtime.executor.executor import Iteration
from runtime.journal import Journal
from runtime.run_folder import RunFolder
from runtime.times import Stopwatch
from runtime.world import SoloWorld
from tests.compiling import CLUSTER, compiled
from tests.test_explain import PPO

EVAL = '''eval(every=2):
    z[e, s] = actor.generate(held, temperature=0)
    metric long = mean(length[s](z))
'''
HELD = """dim e = 8
dim s <= 16
data held[e] = jsonl("held.jsonl", "prompt")
"""
LENGTHS = {"prompt": 6.0, "response": 3.5, "longest": 5.0}


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    return compiled(tmp_path_factory.mktemp("analyze"), HELD + PPO.replace("plan:\n", f"{EVAL}plan:\n"), 4)


@pytest.fixture
def folder(plan, tmp_path) -> RunFolder:
    """A run of four iterations; step i of iteration n took i n ms, the first iteration a hundred times that."""
    made = RunFolder(tmp_path / "run").create()
    made.plan.write_text(plan.to_json())
    journal, watch = Journal(made), Stopwatch(plan, SoloWorld())
    for number, scale in ((0, 1.0), (1, 100.0), (2, 2.0), (3, 3.0), (4, 4.0)):
        done = Iteration(number)
        for i, row in enumerate(row for row in rows_of(plan) if row.section == ITERATION):
            done.seconds[row.title] = (number > 0) * i * scale / 1e3
        if number % 2 == 0:
            done.evals["eval"] = {"generate eval/z": 0.5 * scale}
        journal.write(number, {}, 10.0 * scale, watch.slowest(done), LENGTHS if number else {})
    journal.close()
    return made


def test_each_step_has_its_median_and_its_estimate(plan, folder):
    found = analyze(folder.path, CLUSTER)
    assert found.lengths == LENGTHS
    costs, rows = CostModel(dataclasses.replace(plan, assume=LENGTHS), CLUSTER), [row for row in rows_of(plan) if row.section == ITERATION]
    assert found.iterations == 3
    steps = {(s.section, s.title): s for s in found.steps}
    for i, row in enumerate(rows):
        step = steps[ITERATION, row.title]
        same = [r for r in rows if r.title == row.title]
        assert step.estimate == pytest.approx(sum(r.times * costs.seconds(r.step, r.part) for r in same))
        if i and len(same) == 1:
            assert (step.measured, step.least, step.most) == pytest.approx((3e-3 * i, 2e-3 * i, 4e-3 * i))
    assert steps["eval", "generate eval/z"].measured == 1.0  # of iterations 0, 2 and 4: 0.5, 1, 2
    assert steps["eval", "load e"].measured is None
    assert found.seconds == 30.0 and found.estimate == pytest.approx(iteration_seconds(costs))


def test_a_run_that_tells_no_lengths_is_estimated_by_those_of_its_plan(plan, folder):
    lines = [json.loads(line) for line in folder.trace.read_text().splitlines()]
    folder.trace.write_text("".join(json.dumps({**line, "lengths": {}}) + "\n" for line in lines))
    found = analyze(folder.path, CLUSTER)
    assert found.lengths == {} and found.estimate == pytest.approx(iteration_seconds(CostModel(plan, CLUSTER)))


def test_evaluations_are_no_part_of_an_iteration(folder):
    """The iterations took 20, 30 and 40 s, of which 1 and 2 s went to evaluations: the middle is 30 s."""
    lines = [json.loads(line) for line in folder.trace.read_text().splitlines()]
    lines[4]["seconds"] = 31.5  # that of iteration 4, less its 2 s: 29.5 s
    folder.trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert analyze(folder.path, CLUSTER).seconds == 29.5


def test_text_and_json_say_the_same(folder):
    found = analyze(folder.path, CLUSTER)
    text, told = analysis_text(found), json.loads(json.dumps(analysis_json(found)))
    assert text.startswith("program on 4 ranks: 30.00 s an iteration, estimated ")
    assert [s["value"] for s in told["steps"]] == [s.title for s in found.steps]
    assert told["iteration"]["ratio"] == pytest.approx(30.0 / told["iteration"]["estimate_s"])
    assert all(step.title in text for step in found.steps) and "eval, each time" in text
    assert all(len(line) <= 100 for line in text.splitlines()[1:] if "median" not in line)


def test_the_slowest_rank_counts(plan):
    class Other:
        """Another rank that took 0.25 s for each step."""

        def all_reduce(self, mine, op):
            assert op == "max"
            return torch.maximum(mine, torch.full_like(mine, 0.25))

    world = SoloWorld()
    world.reducer = Other()
    times = Stopwatch(plan, world).slowest(Iteration(1, seconds={"generate y": 1.0}))
    assert times[ITERATION]["generate y"] == 1.0 and set(times[ITERATION].values()) == {1.0, 0.25}


def test_a_cut_last_line_is_left_out(folder):
    folder.trace.write_text(folder.trace.read_text()[:-40])
    assert analyze(folder.path, CLUSTER).iterations == 2


@pytest.mark.parametrize("trace, reason", [
    (None, "has no `trace.jsonl`"), ("", "no iteration was finished"), ("[1]\n", "not one of a run"),
    ('{"iteration": 1}\n', "not one of a run"), ('{"iteration": 0, "seconds": 1.0, "steps": {}}\n', "no iteration"),
    ('{"iteration": "x", "seconds": [], "steps": 3}\n', "not one of a run"),
    ('{"iteration": 1, "seconds": 1, "steps": {"generate y": "soon"}}\n', "not one of a run"),
])
def test_what_cannot_be_read_is_a_diagnostic(folder, trace, reason):
    folder.trace.unlink()
    if trace is not None:
        folder.trace.write_text(trace)
    with pytest.raises(DiagnosticError) as caught:
        analyze(folder.path, CLUSTER)
    assert caught.value.diagnostics[0].code == "P0303" and reason in caught.value.diagnostics[0].message


def test_the_command_line(folder, tmp_path, capsys):
    assert main(["explain", "--analyze", str(folder.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "rlflow.analysis/1"
    assert main(["explain", "--analyze", str(tmp_path)]) == 2
    assert "P0303" in capsys.readouterr().err
    assert main(["explain"]) == 2
    assert "E0005" in capsys.readouterr().err
