"""From checked programs to flow graphs, pass by pass."""

from __future__ import annotations

import itertools

import pytest

from compiler.compile import lower_equations
from compiler.exprs import brief, walk
from compiler.ir import FlowGraph, Value, make_op
from compiler.lower import lower
from compiler.passes.cse import CommonSubexpressions
from compiler.passes.dce import DeadCode
from compiler.passes.fuse import FuseCalls
from rlhf_dsl.typed import Type
from tests.compiling import GROUPS, checked_text, shipped


def ops_of(graph: FlowGraph, kind: str) -> list:
    return [op for op in graph.ops if op.kind == kind]


def outputs_of(graph: FlowGraph, kind: str) -> list[str]:
    return [name for op in ops_of(graph, kind) for name in op.outputs]


@pytest.mark.parametrize("name", ["ppo", "grpo", "sft", "reward_model"])
def test_shipped_programs_lower_to_sound_graphs(tmp_path, name):
    seen = {}
    graph = lower_equations(shipped(tmp_path, name), lambda stage, made, seconds: seen.setdefault(stage, made))
    assert list(seen) == ["graph", "cse", "dce", "fuse", "split_reductions"]
    for made in seen.values():
        assert made.verify() == ()
        assert str(made) == str(made) and "%" not in str(made)
    assert graph is seen["split_reductions"]


def test_values_have_the_names_of_the_program(tmp_path):
    graph = lower(shipped(tmp_path, "ppo"))
    assert outputs_of(graph, "forward") == [
        "logp_old", "ref.logprobs(y)", "score", "v_old", "update/actor.logprobs(y)", "update/critic.values(y)"]
    assert "update/ratio" in graph.values and "eval/z" in graph.values and "adv" in graph.values
    assert [op.name for op in ops_of(graph, "metric")] == [
        "metric kl", "metric reward", "metric train/actor", "metric train/critic", "metric eval/success"]


def test_lowering_is_deterministic(tmp_path):
    assert lower(shipped(tmp_path, "grpo")).to_json() == lower(shipped(tmp_path, "grpo")).to_json()


UPDATED = GROUPS + '''
rollout:
    y[b, g, t] = actor.generate(prompts)
    logp_old = actor.logprobs(y)
    r = reward.score(y)
'''


def test_equal_equations_are_evaluated_once(tmp_path):
    graph = lower(checked_text(tmp_path, UPDATED + '''
    a = r - mean[g](r)
    c = r - mean[g](r)
    metric both = mean(a * c)
update:
    train actor to maximize mean(actor.logprobs(y) * c)
'''))
    assert {"a", "c"} <= set(graph.values)
    after = CommonSubexpressions()(graph)
    assert "a" in after.values and "c" not in after.values and after.verify() == ()
    assert "a" in ops_of(after, "metric")[0].inputs


def test_draws_and_python_ops_are_never_merged(tmp_path):
    text = GROUPS + '''
rollout:
    y[b, g, t] = actor.generate(prompts)
    z[b, u] = actor.generate(prompts)
    metric difference = mean(length[t](y)) - mean(length[u](z))
update:
    train actor to maximize mean(actor.logprobs(y)) + mean(actor.logprobs(z))
'''
    graph = lower_equations(checked_text(tmp_path, text.replace("dim t <= 16", "dim t <= 16\ndim u <= 16")))
    assert outputs_of(graph, "generate") == ["y", "z"]


def test_unused_values_are_left_out(tmp_path):
    graph = lower(checked_text(tmp_path, UPDATED + '''
    unused = ref.logprobs(y) * 2
    metric reward = mean(r)
update:
    train actor to maximize mean(actor.logprobs(y) * (r - mean[g](r)))
'''))
    after = DeadCode()(graph)
    assert "unused" in graph.values and "unused" not in after.values
    assert "ref" not in {op.model for op in after.ops} and "logp_old" not in after.values
    assert after.verify() == ()


def test_one_forward_serves_several_calls(tmp_path):
    checked = checked_text(tmp_path, UPDATED + '''
    e = actor.entropy(y)
    cold = actor.logprobs(y, temperature=0.5)
    metric entropy = mean(e) + mean(cold) + mean(logp_old)
update:
    train actor to maximize mean(actor.logprobs(y)) + 0.01 * mean(actor.entropy(y))
''')
    graph = FuseCalls()(DeadCode()(lower(checked)))
    assert [op.outputs for op in ops_of(graph, "forward")] == [
        ("logp_old", "e"), ("cold",), ("update/actor.logprobs(y)", "update/actor.entropy(y)")]


def test_what_an_update_needs_once_stands_before_it(tmp_path):
    graph = lower_equations(checked_text(tmp_path, UPDATED + '''
update(epochs=2, minibatches=4):
    anchor = ref.logprobs(y)
    centred = r - mean(r)
    train actor to maximize mean(actor.logprobs(y) * centred - 0.1 * k3(actor.logprobs(y), anchor))
'''))
    phases = {name: op.phase for op in graph.ops for name in op.outputs}
    assert phases["update/anchor"] == "before0"
    assert phases["update/mean[b, g](r)"] == "update0"  # of the mini-batch, not of the iteration
    order = [op.kind for op in graph.phase("update0")]
    assert order.index("statistics") < order.index("train") < order.index("metric") < order.index("optimizer")


def test_the_whole_batch_and_the_mini_batch_are_told_apart(tmp_path):
    graph = lower_equations(checked_text(tmp_path, UPDATED + '''
    whole = r - mean(r)
update(minibatches=2):
    train actor to maximize mean(actor.logprobs(y) * (whole + r - mean(r)))
'''))
    train = ops_of(graph, "train")[0]
    assert "whole" in train.inputs and "update/mean[b, g](r)" in train.inputs


def test_outputs_that_training_must_know_come_first(tmp_path):
    graph = lower_equations(checked_text(tmp_path, UPDATED + '''
update(minibatches=2):
    v = critic.values(y)
    logp = actor.logprobs(y)
    train actor to maximize mean(logp * v) - mean(logp, where=logp > stop(mean(logp)))
    train critic to minimize mean((v - at_end[t](r)) ** 2)
'''))
    body = graph.phase("update0")
    early = [name for op in body if op.kind == "forward" for name in op.outputs]
    assert early == ["update/v", "update/logp"]
    actor, critic = (op for op in body if op.kind == "train")
    assert "update/v" in actor.inputs and actor.outputs == ("update/actor.gradient",)
    assert critic.outputs == ("update/critic.gradient",)
    kinds = [op.kind for op in body]
    assert kinds.index("forward") < kinds.index("statistics") < kinds.index("train")


def test_python_ops_on_current_outputs_run_before_training(tmp_path):
    (tmp_path / "judge.py").write_text("from rlhf_dsl import op\n@op\ndef weigh(x: float) -> float: ...\n")
    text = UPDATED.replace("data prompts", "from judge import weigh\ndata prompts") + '''
update:
    logp = actor.logprobs(y)
    w = weigh(sum[t](logp))
    train actor to maximize mean(sum[t](logp) * w)
'''
    body = lower_equations(checked_text(tmp_path, text)).phase("update0")
    kinds = [op.kind for op in body]
    assert kinds.index("forward") < kinds.index("pyop") < kinds.index("train")
    assert "update/w" in next(op for op in body if op.kind == "train").inputs


def test_a_second_update_recomputes_only_what_was_trained(tmp_path):
    graph = lower_equations(checked_text(tmp_path, UPDATED + '''
    v_old = critic.values(y)
update:
    train critic to minimize mean((critic.values(y) - at_end[t](r)) ** 2)
update:
    train actor to maximize mean(actor.logprobs(y) * (critic.values(y) - v_old))
'''))
    assert [op.outputs for op in graph.phase("before1") if op.kind == "forward"] == [("update2/critic.values(y)",)]
    assert [op.attr("metric") for op in ops_of(graph, "metric")] == ["train/critic", "train2/actor"]


def test_states_and_keep(tmp_path):
    text = UPDATED.replace("rollout:", "state beta = 0.1 then clip(beta * (1 + mean(kl)), 0, 1)\nrollout:") + '''
    kl = logp_old - ref.logprobs(y)
    keep if std[g](r) > 0
    metric later = next(beta)
update:
    train actor to maximize mean(actor.logprobs(y) * at_end[t](r) - next(beta) * kl - beta * kl)
'''
    graph = lower_equations(checked_text(tmp_path, text))
    assert graph.verify() == ()
    assert [op.kind for op in graph.ops if op.kind in ("keep", "state")] == ["keep", "state"]
    state = ops_of(graph, "state")[0]
    assert "keep 1" in state.inputs
    constants = [brief(e) for e in ops_of(graph, "train")[0].attr("constants")]
    assert "beta" in constants and "next(beta)" in constants


UNITS = [
    ("mean(logp * at_end[t](r))", ("b", "g")),
    ("mean(mean[t](logp))", ("b", "g")),
    ("mean(logp * at_end[t](r - mean[g](r)))", ("b", "g")),
    ("mean(std[g](sum[t](logp)))", ("b",)),
    ("mean(mean[g](sum[t](logp)))", ("b",)),
    ("mean(sum[t](logp) * argmax[g](stop(sum[t](logp))))", ("b",)),
]


@pytest.mark.parametrize("objective, unit", UNITS)
def test_samples_are_split_only_where_no_group_is_needed(tmp_path, objective, unit):
    graph = lower_equations(checked_text(tmp_path, UPDATED + f'''
update:
    logp = actor.logprobs(y)
    train actor to maximize {objective}
'''))
    assert ops_of(graph, "train")[0].attr("unit") == unit


OBJECTIVES = [
    "mean(ratio * at_end[t](r))",
    "mean(min(ratio * at_end[t](r), clip(ratio, 0.8, 1.2) * at_end[t](r)))",
    "mean(sum[t](ratio)) - 0.5 * mean(logp ** 2) / 3 + 2",
    "mean(logp, where=logp < stop(mean(logp)))",
    "sum(logp) * stop(sum(logp)) / 100 - mean(logp)",
    "sum(mean[t](logp)) * count(r > 0)",
    "mean(mean[g](sum[t](logp)) * (max[g](r) - mean(r)))",
    "where(mean(r) > 0, mean(exp(logp)), -mean(logp))",
    "mean(logp * (logp_old - mean(logp_old)) / (std(logp_old) + 1))",
    "mean(log_sigmoid(sum[t](logp - logp_old)))",
    "mean(mean[g](sum[t](logp)) * r)",
    "mean(where(r > 0, mean[g](sum[t](logp)), 0))",
    "mean(togo[t](logp, 0.9) * next[t](logp_old))",
]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_partial_objectives_sum_to_the_whole_gradient(tmp_path, objective):
    """Over any cut into units, with statistics of the whole, the parts' gradients sum to that of the objective."""
    graph = lower_equations(checked_text(tmp_path, UPDATED + f'''
update:
    logp = actor.logprobs(y)
    ratio = exp(logp - logp_old)
    train actor to maximize {objective}
'''))
    batch = _Batch(graph)
    whole = batch.whole()
    for cut in ([[0], [1, 2]], [[2], [0], [1]], [[0, 1, 2]]):
        parts = batch.parts(cut)
        assert parts == pytest.approx(whole, rel=1e-9, abs=1e-12)
    assert any(abs(x) > 1e-6 for x in whole)


class _Batch:
    """Three rows of two samples with lengths, numbers for all leaves, and the evaluator of the runtime."""

    def __init__(self, graph: FlowGraph) -> None:
        self.torch = torch = pytest.importorskip("torch")
        self.train = ops_of(graph, "train")[0]
        (self.call,) = self.train.attr("calls")
        self.graph = graph
        self.lengths = torch.tensor([[3, 1], [2, 4], [1, 2]])
        generator = torch.Generator().manual_seed(7)
        self.logp = torch.randn(int(self.lengths.sum()), generator=generator, dtype=torch.float64) * 0.3 - 1
        self.numbers = {}
        for value in graph.values.values():
            if value.expr is not None and value.expr.op == "call" and value.expr is not self.call:
                size = int(self.lengths.sum()) if "t" in value.expr.type.dims else self.lengths.numel()
                self.numbers[value.expr] = torch.randn(size, generator=generator, dtype=torch.float64)

    def frame(self, rows):
        from runtime.values import Frame

        torch = self.torch
        lengths = {"t": self.lengths[rows].flatten()}
        return Frame({"b": torch.tensor(rows)}, {"g": 2}, lengths, {"t": ("b", "g")}, {"b": 3})

    def cut(self, numbers, dims, rows):
        from runtime.values import Value

        starts = [0, *itertools.accumulate(self.lengths.sum(1).tolist())]
        if "t" in dims:
            return Value(dims, self.torch.cat([numbers[starts[r]:starts[r + 1]] for r in rows]))
        width = 2 if "g" in dims else 1
        return Value(dims, self.torch.cat([numbers[width * r:width * (r + 1)] for r in rows]))

    def evaluate(self, expr, rows, env, partial):
        from runtime.evaluator import Evaluator
        from runtime.reducers import SoloReducer

        evaluator = Evaluator(self.frame(rows), SoloReducer(), self.torch.float64, partial=partial)
        return evaluator.evaluate(expr, env)

    def leaves(self, rows, logp):
        env = {e: self.cut(numbers, e.type.dims, rows) for e, numbers in self.numbers.items()}
        response = self.call.args[0]
        return env | {self.call: self.cut(logp, self.call.type.dims, rows), response: self.response(response)}

    def response(self, expr):
        from runtime.values import Value

        return Value(expr.type.dims, None)  # of a response, equations read the lengths alone, which the frame has

    def whole(self):
        logp = self.logp.clone().requires_grad_()
        self.evaluate(self.train.attr("objective"), [0, 1, 2], self.leaves([0, 1, 2], logp), False).data.backward()
        return logp.grad.tolist()

    def parts(self, cut):
        logp = self.logp.clone().requires_grad_()
        known = self.leaves([0, 1, 2], self.logp)
        constants = {e: self.evaluate(e, [0, 1, 2], dict(known), False) for e in self.train.attr("constants")}
        for rows in cut:
            env = {self.call: self.cut(logp, self.call.type.dims, rows)}
            env |= {e: self.cut(v.data, e.type.dims, rows) if e.type.dims else v for e, v in constants.items()}
            self.evaluate(self.train.attr("partial"), rows, env, True).data.backward()
        return logp.grad.tolist()


def test_train_steps_read_all_that_their_part_needs(tmp_path):
    graph = lower_equations(shipped(tmp_path, "ppo"))
    for train in ops_of(graph, "train"):
        given = {*train.attr("calls"), *train.attr("constants")}
        inside = walk(train.attr("partial"), stop=given.__contains__)
        assert all(e in given or e.op == "const" or e.args for e in inside)


def test_verify_names_what_is_wrong():
    value = Value("x", Type("f32"))
    read = make_op("x", "equation", ["y"], ["x"])
    assert FlowGraph("p", (read,), {"x": value}).verify() == ("`x` reads `y`, which nothing above it makes",)
    twice = FlowGraph("p", (make_op("x", "equation", [], ["x"]), make_op("again", "equation", [], ["x"])), {"x": value})
    assert twice.verify() == ("`x` is made by `x` and by `again`",)
    assert FlowGraph("p", (make_op("x", "magic"),), {}).verify() == ("`x` has the unknown kind `magic`",)
