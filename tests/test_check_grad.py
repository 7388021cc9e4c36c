"""`rlflowc eval --check-grad`: gradients beside finite differences, kinks told from faults, faults found."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from rlhf_dsl.cli import main
from runtime.feeds.executor import FeedExecutor

CASES = sorted(Path(__file__).with_name("cases").glob("*.json"))
HEAD = """
dim b  = 4
dim t <= 4
data q[b] = jsonl("q.jsonl", "prompt")
model actor  = policy("builtin:tiny") trained by adamw(lr=1e-3)
model critic = value("builtin:tiny") trained by adamw(lr=1e-3)

rollout:
    y[b, t] = actor.generate(q)
    old     = actor.logprobs(y)

"""
FEED = {
    "responses": {"y": {"lengths": [1, 3, 2, 4]}},
    "calls": {
        "rollout": {"actor.logprobs(y)": [[-1.0], [-0.5, -2.0, -0.3], [-1.2, -0.7], [-0.1, -0.4, -0.9, -1.6]]},
        "update": {"actor.logprobs(y)": [[-0.9], [-0.6, -2.0, -0.2], [-1.0, -0.8], [-0.2, -0.3, -0.9, -1.5]],
                   "critic.values(y)": [[0.5], [0.25, -0.5, 1.5], [0.0, 1.0], [0.1, 0.2, 0.3, 0.4]]},
    },
}


def evaluated(folder, update, *arguments, feed=FEED):
    """(exit code, standard output, standard error)."""
    (folder / "p.rlflow").write_text(HEAD + update)
    (folder / "f.json").write_text(json.dumps(feed))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["eval", str(folder / "p.rlflow"), "--feed", str(folder / "f.json"), "--check-grad", *arguments])
    return code, out.getvalue(), err.getvalue()


def checks(folder, update, *arguments):
    code, out, err = evaluated(folder, update, "--json", *arguments)
    assert code == 0, err
    return json.loads(out)["check_grad"]


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_cases_gradients_are_right(path, tmp_path):
    case = json.loads(path.read_text())
    program, feed = tmp_path / "p.rlflow", tmp_path / "feed.json"
    program.write_text("\n".join(case["program"]) + "\n")
    feed.write_text(json.dumps({"format": "rlflow.feed/1", **case["feed"]}))
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["eval", str(program), "--feed", str(feed), "--check-grad", *case["args"]]) == 0


PPO = """
update(minibatches=2):
    ratio = exp(actor.logprobs(y) - old)
    adv   = stop(critic.values(y))
    train actor to maximize mean(min(ratio * adv, clip(ratio, 0.8, 1.2) * adv)) - 0.1 * mean(ratio ** 2)
    train critic to minimize mean(critic.values(y) ** 2)
"""


@pytest.mark.parametrize("arguments", [
    (), ("--dp", "2"), ("--micro-batch", "1"), ("--dp", "3", "--no-shuffle"), ("--dtype", "f32")])
def test_any_split_gives_the_gradients_of_the_equations(tmp_path, arguments):
    found = checks(tmp_path, PPO, *arguments)
    assert [(c["model"], c["step"], c["call"]) for c in found] == [
        ("actor", 1, "actor.logprobs(y)"), ("critic", 1, "critic.values(y)"),
        ("actor", 2, "actor.logprobs(y)"), ("critic", 2, "critic.values(y)")]
    assert sum(c["numbers"] for c in found if c["model"] == "actor") == 10
    assert not any(c["kinks"] or c["wrong"] for c in found)
    assert all(c["largest_deviation"] < (1e-3 if "f32" in arguments else 1e-8) for c in found)


def test_what_is_stopped_keeps_its_value(tmp_path):
    """The differences of `stop(x) * x` would be 2x, its gradient is x."""
    objective = "mean(stop(x) * x + stop(mean(x)) * x)"
    found = checks(tmp_path, f"update:\n    x = actor.logprobs(y)\n    train actor to maximize {objective}\n")
    assert found[0]["largest_deviation"] < 1e-8 and not found[0]["kinks"]


def test_a_statistic_of_current_values_is_seen(tmp_path):
    """Affine in means of what is trained: the whole of it is differentiated."""
    objective = "mean(x ** 2) + 3 * mean(sum[t](x))"
    found = checks(tmp_path, f"update:\n    x = actor.logprobs(y)\n    train actor to maximize {objective}\n")
    assert found[0]["largest_deviation"] < 1e-8


def test_kinks_are_told_and_are_no_faults(tmp_path):
    """`abs` at 0 and a ratio of exactly 1 at a bound."""
    update = """update:
    ratio = exp(actor.logprobs(y) - old)
    train actor to maximize mean(clip(ratio, 0.5, 1)) + mean(where(ratio > 1, 5, ratio))
    train critic to minimize mean(abs(critic.values(y)))
"""
    found = checks(tmp_path, update)
    assert [k["place"] for k in found[1]["kinks"]] == [{"b": 2, "t": 0}] and found[1]["kinks"][0]["gradient"] == 0.0
    assert [k["place"] for k in found[0]["kinks"]] == [{"b": 1, "t": 1}, {"b": 3, "t": 2}]
    code, out, err = evaluated(tmp_path, update)
    assert (code, err) == (0, "")
    assert "check    critic step 1: d/d critic.values(y): largest deviation " in out
    assert "           a kink at b=2, t=0: slopes -0.1 and 0.1, taken 0\n" in out


def test_a_value_without_neighbours_is_a_kink(tmp_path):
    feed = json.loads(json.dumps(FEED))
    feed["calls"]["update"]["critic.values(y)"][0] = [0.0]
    update = "update:\n    train critic to minimize mean(sqrt(critic.values(y) ** 2 + 0))\n"
    code, out, _ = evaluated(tmp_path, update, feed=feed)
    assert code == 0 and "a kink at b=0, t=0" in out


def test_nothing_trained_is_said(tmp_path):
    code, out, _ = evaluated(tmp_path, "")
    assert code == 0 and out.endswith("check    no gradient: nothing was trained\n")


# ---- wrong gradients are found

def test_a_wrong_gradient_is_a_diagnostic_with_call_and_place(tmp_path, monkeypatch):
    collect = FeedExecutor._collect

    def wrong(self, model):
        collect(self, model)
        for gradients in self.gradients.get((0, "critic"), []):
            gradients["critic.values(y)"][3] += 1e-3

    monkeypatch.setattr(FeedExecutor, "_collect", wrong)
    code, out, err = evaluated(tmp_path, "update:\n    train critic to minimize mean(critic.values(y) ** 2)\n")
    assert code == 1 and "train " in out
    assert "error[R0160]: the gradient of `critic` by `critic.values(y)` at b=1, t=2 is 0.301, " in err
    assert "finite differences give 0.3\n" in err
    assert "p.rlflow:13:5" in err and "train critic" in err


def test_a_gradient_of_another_mini_batch_is_wrong(tmp_path, monkeypatch):
    collect = FeedExecutor._collect

    def wrong(self, model):
        collect(self, model)
        self.gradients[0, "critic"][0]["critic.values(y)"] += 1e-3

    monkeypatch.setattr(FeedExecutor, "_collect", wrong)
    update = "update(minibatches=2):\n    train critic to minimize mean(critic.values(y) ** 2)\n"
    code, _, err = evaluated(tmp_path, update)
    assert code == 1 and err.count("error[R0160]") == 1


def test_a_wrong_scale_is_found_even_if_small(tmp_path, monkeypatch):
    """An average over two shards where a sum belongs."""
    collect = FeedExecutor._collect

    def wrong(self, model):
        collect(self, model)
        for gradients in self.gradients[0, "critic"]:
            gradients["critic.values(y)"] *= 1 + 1e-4

    monkeypatch.setattr(FeedExecutor, "_collect", wrong)
    assert evaluated(tmp_path, "update:\n    train critic to minimize mean(critic.values(y) ** 2)\n")[0] == 1


def test_two_updates_of_one_model_have_gradients_of_their_own(tmp_path):
    update = """update:
    train critic to minimize mean(critic.values(y))
update(minibatches=2):
    train critic to minimize mean(critic.values(y) ** 2) + mean(critic.last_value(y))
"""
    feed = json.loads(json.dumps(FEED))
    feed["calls"]["update"]["critic.last_value(y)"] = [1.0, 2.0, 3.0, 4.0]
    code, out, err = evaluated(tmp_path, update, "--json", "--no-shuffle", feed=feed)
    assert code == 0, err
    steps = json.loads(out)["train"]["critic"]
    both = ["critic.last_value(y)", "critic.values(y)"]
    assert [sorted(step["grad"]) for step in steps] == [["critic.values(y)"], both, both]
    assert steps[0]["grad"]["critic.values(y)"][0] == [pytest.approx(0.1)]
    assert steps[1]["grad"]["critic.values(y)"][0] == [pytest.approx(0.25)]
    assert steps[2]["grad"]["critic.last_value(y)"] == pytest.approx([0, 0, 0.5, 0.5])
