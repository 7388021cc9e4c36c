"""Faults that no program alone can show: of feeds, of evaluations, of a machine without MPI, of ranks that end."""

import json
import shutil
import sys

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from compiler.compile import compile_program
from compiler.placement import place
from compiler.shapes import ModelShape
from rlhf_dsl.cli import main
from rlhf_dsl.diagnostics import DiagnosticError
from rlhf_dsl.frontend import loads
from runtime import launch, preflight
from runtime.failures import report_of, report_of_failure
from runtime.feeds.executor import FeedModels
from runtime.launch import Ended
from runtime.run_folder import Position, RunFolder
from runtime.tokenizer import Tokenizer
from tests.compiling import CLUSTER, GROUPS, checked_text, compiled

PROGRAM = """
dim b  = 2
dim t <= 4
data q[b], w[b]: f32 = jsonl("q.jsonl", "prompt", "weight")
model actor = policy("builtin:tiny") trained by adamw(lr=1e-3)

rollout:
    y[b, t] = actor.generate(q)
    old     = actor.logprobs(y)
    share   = w / sum(w)

update:
    train actor to maximize mean(actor.logprobs(y) * share - 0.1 * old)
"""
FEED = {
    "data": {"w": [1.0, 3.0]}, "responses": {"y": {"lengths": [1, 2]}},
    "calls": {"rollout": {"actor.logprobs(y)": [[-1.0], [-0.5, -0.25]]}},
}
LOGP = "actor.logprobs(y)"


def evaluated(folder, feed, capsys, program=PROGRAM):
    (folder / "p.rlflow").write_text(program)
    (folder / "feed.json").write_text(feed if isinstance(feed, str) else json.dumps(feed))
    code = main(["eval", str(folder / "p.rlflow"), "--feed", str(folder / "feed.json")])
    return code, capsys.readouterr().err


def changed(**parts):
    return {**FEED, **parts}


def calls(value):
    return {"rollout": {LOGP: value}}


# ---- feeds

def test_a_feed_that_fits(tmp_path, capsys):
    assert evaluated(tmp_path, FEED, capsys) == (0, "")


@pytest.mark.parametrize("feed, reason", [
    ("{", "it is not JSON: "), ("[1]", "it is not a JSON object"), ("[" * 100_000, "it is not JSON: "),
    ('{"data": NaN', "it is not JSON"),
])
def test_what_is_no_feed(tmp_path, capsys, feed, reason):
    code, err = evaluated(tmp_path, feed, capsys)
    assert code == 2 and f"error[R0161]: the feed cannot be read: {reason}" in err and "feed.json" in err


def test_a_feed_that_is_not_there(tmp_path, capsys):
    (tmp_path / "p.rlflow").write_text(PROGRAM)
    assert main(["eval", str(tmp_path / "p.rlflow"), "--feed", str(tmp_path / "none.json")]) == 2
    assert main(["eval", str(tmp_path / "p.rlflow"), "--feed", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("error[R0161]") == 2


@pytest.mark.parametrize("feed, reason", [
    (changed(dat={}), "`dat` is unknown"),
    (changed(format="rlflow.feed/2"), "`format` is 'rlflow.feed/2', `rlflow.feed/1` is expected"),
    (changed(data=[1]), "`data` is not an object"),
    (changed(dims={"b": 0}), "`dims.b` is 0, a size from 1 up is expected"),
    (changed(data={}), "the column `w` is missing under `data`"),
    (changed(data={"w": [1.0]}), "`data.w`: a list of 2 is expected, found 1 entries"),
    (changed(data={"w": ["a", "b"]}), "`data.w`: "),
    (changed(data={"w": 1.0}), "`data.w`: a list of 2 is expected, found 1.0"),
    (changed(responses={}), "the response `y` is missing under `responses`"),
    (changed(responses={"y": {}}), "`responses.y` has no `lengths`"),
    (changed(responses={"y": [1, 2]}), "`responses.y` is not an object"),
    (changed(responses={"y": {"length": [1, 2]}}), "`responses.y.length` is unknown"),
    (changed(responses={"y": {"lengths": [1, 5]}}), "`responses.y.lengths` has 5, a response has 1 to 4 own tokens"),
    (changed(responses={"y": {"lengths": [1, "2"]}}), "`responses.y.lengths` has '2'"),
    (changed(responses={"y": {"lengths": [1, 2], "own": [[1], [1, 0]]}}), "sample 1 has 1 own tokens, `lengths` says"),
    (changed(responses={"y": {"lengths": [1, 2], "own": [1, 2]}}), "`responses.y"),
    (changed(responses={"y": {"lengths": [1, 2], "truncated": [1, "x"]}}), "`responses.y"),
    (changed(calls={"rollout": {}}), "the call `actor.logprobs(y)` is missing under `calls.rollout`"),
    (changed(calls={"later": {}}), "`calls.later` is unknown"),
    (changed(calls=calls([[-1.0], [-0.5]])), "sample 1 has 2 own tokens, found 1 entries"),
    (changed(calls=calls([[-1.0], "ab"])), "sample 1 has 2 own tokens, found 'ab'"),
    (changed(calls=calls([[None], [-0.5, -0.25]])), "a number is expected, found None"),
    (changed(calls={"rollout": [1]}), "`calls.rollout`"),
    (changed(state={"x": 1.0}), "`state.x`: there is no such state"),
])
def test_a_feed_that_does_not_fit(tmp_path, capsys, feed, reason):
    code, err = evaluated(tmp_path, feed, capsys)
    assert code == 2 and "error[R0162]: the feed does not fit the program: " in err and reason in err


def test_a_value_that_is_not_finite_is_named_with_its_place(tmp_path, capsys):
    feed = changed(data={"w": [1.0, -1.0]})
    code, err = evaluated(tmp_path, feed, capsys)
    assert code == 4 and "error[R0150]: `train/actor` is " in err
    code, err = evaluated(tmp_path, feed, capsys, PROGRAM.replace("* share", "").replace("share   =", "_share  ="))
    assert code == 2 and "error[R0159]: `_share` is inf at b=0" in err and "p.rlflow:10:5" in err


def test_a_gradient_that_is_not_finite_ends_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(FeedModels, "optimizer_step", lambda self, model: (0.0, float("nan")))
    code, err = evaluated(tmp_path, FEED, capsys)
    assert code == 4 and "error[R0151]: the gradient of `actor` is not finite" in err and "p.rlflow:13:5" in err


# ---- plans

def test_a_plan_has_ranks(tmp_path):
    checked = checked_text(tmp_path, GROUPS + "rollout:\n    y[b, g, t] = actor.generate(prompts)\n")
    with pytest.raises(DiagnosticError, match="P0109.*`--ranks 0`"):
        place(checked, dict.fromkeys(checked.models, ModelShape("llama", 1, 1, 1, 1, 1, 1, 1)), CLUSTER, 0)


def test_what_is_not_executed_yet_is_refused(tmp_path):
    prompts = "rollout:\n    y[b, g, t] = actor.generate(prompts, env=e, turns=2)\n    metric m = mean(length[t](y))\n"
    op = "from rlhf_dsl import op\n\n\n@op\ndef e(prompt: str, turns: str) -> str:\n    return ''\n"
    (tmp_path / "ops.py").write_text(op)
    checked = checked_text(tmp_path, "from ops import e\n" + GROUPS + prompts)
    with pytest.raises(DiagnosticError, match="P0111.*`env=`"):
        compile_program(checked, CLUSTER, 1)


def test_an_engine_that_is_not_installed(tmp_path, monkeypatch):
    rollout = "rollout:\n    y[b, g, t] = actor.generate(prompts)\n    metric m = mean(length[t](y))\n"
    plan = compiled(tmp_path, GROUPS + rollout + "run:\n    steps = 1\nplan:\n    actor.generate: engine(vllm)\n")
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DiagnosticError, match="R0139.*vLLM, which is not installed") as caught:
        preflight.check(plan)
    (found,) = caught.value.diagnostics
    assert caught.value.exit_code == 2 and "`make vllm`" in found.help
    assert found.source.text[found.span.start:found.span.end] == "actor.generate: engine(vllm)"


# ---- ranks

def test_a_machine_without_mpi(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(DiagnosticError, match="R0110"):
        launch.mpiexec()


@pytest.fixture
def job(tmp_path):
    rollout = "rollout:\n    y[b, g, t] = actor.generate(prompts)\n    metric m = mean(length[t](y))\n"
    plan = compiled(tmp_path, GROUPS + rollout)
    return plan, RunFolder(tmp_path / "run").create()


def test_a_rank_that_raised_is_reported_with_its_place(job):
    plan, folder = job
    position = Position(folder, 1)
    position.at(7, 1)
    position.close()
    failure = {"rank": 1, "rendered": "", "kind": "ValueError", "text": "no such luck", "trace": "Traceback ...",
               "code": 70, "time": 0.0, "consequence": False}
    report = report_of_failure(plan, folder, failure)
    assert "error[R0154]: rank 1 failed in iteration 7, at `load b`: ValueError: no such luck" in report.text
    assert report.code == 70 and report.trace == "Traceback ..." and str(folder.path / "logs") in report.text


def test_ranks_that_say_nothing_are_reported_with_what_they_printed(job):
    plan, folder = job
    report = report_of(plan, folder, Ended(code=213, output="mpiexec: lost a node\n"), [])
    assert "error[R0155]: the ranks ended with exit code 213; they said: mpiexec: lost a node" in report.text
    assert report.code == 4


# ---- tokenizers

def test_a_tokenizer_without_an_end_token(tmp_path):
    Backend(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DiagnosticError, match="R0311"):
        Tokenizer(tmp_path).encode_response("a", 4)


def test_values_that_nothing_needs_are_in_the_answer(tmp_path, capsys):
    """Of a rollout and of a mini-batch, over a column that nothing else reads."""
    program = PROGRAM.replace("* share", "").replace("share   =", "_share  =")
    program = program.replace("    train", "    _twice = 2 * w\n    train").replace("update:", "update(minibatches=2):")
    (tmp_path / "p.rlflow").write_text(program)
    (tmp_path / "feed.json").write_text(json.dumps(FEED))
    files = [str(tmp_path / "p.rlflow"), "--feed", str(tmp_path / "feed.json")]
    assert main(["eval", *files, "--json", "--no-shuffle"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["rollout"]["_share"] == [0.25, 0.75] and answer["update"]["_twice"] == [[2.0], [6.0]]
