"""The oracle itself: against numbers worked out elsewhere, and against every shipped program on one rank."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from compiler.compile import compile_program
from rlhf_dsl.builtins import call_text
from rlhf_dsl.frontend import load, loads
from rlhf_dsl.typed import Bind, Checked, Expr, Schedule
from runtime import draws as named_draws
from tests.distributed.judging import CLEAR, Run, Subject, judge, run_plans, shipped_programs, table
from tests.oracle import Iteration, Oracle
from tests.oracle.draws import permuted, uniform
from tests.oracle.equations import Cells, Scope, constant
from tests.oracle.models import Model, learning_rate
from tests.oracle.sampling import Options, Response, distribution, first_greatest, invert, margin, sample

ROOT = Path(__file__).resolve().parents[1]
CASES = sorted((ROOT / "tests" / "cases").glob("*.json"))


# ---- given numbers in place of models: the cases of `rlflowc eval` -----------------------------------


class Given:
    """In place of a model that trains: keeps each objective and its gradient by the given calls."""

    def __init__(self, owner: "FedOracle") -> None:
        self.owner, self.steps = owner, []

    def differentiate(self, loss: torch.Tensor) -> None:
        leaves = [(key, at, x) for key, cells in self.owner.current_calls.items() for at, x in cells.items()]
        gradients = torch.autograd.grad(loss, [x for _, _, x in leaves], retain_graph=True, materialize_grads=True)
        self.steps.append({(key, at): g.item() for (key, at, _), g in zip(leaves, gradients)})

    def step(self) -> tuple[float, float]:
        self.owner.current_calls = {}
        return 0.0, 0.0


class FedOracle(Oracle):
    """One iteration of a program on the numbers of a feed."""

    def __init__(self, program: Checked, feed: dict, shuffle: bool) -> None:
        self.program, self.feed, self.shuffle, self.seed = program, feed, shuffle, program.run.seed
        self.models = {name: Given(self) for name in program.models}
        self.states = feed.get("state", {})
        self.current, self.current_calls = Iteration(1), {}
        self.drawn, self.columns, self.sources = {}, {}, {}
        self.scope = self._scope([d.root for d in program.data])
        with torch.no_grad():
            self._rollout(self.scope)
        self.skipped = self._is_empty(self.scope)
        if not self.skipped:
            with torch.no_grad():
                self.states = {n: self.scope.scalar(s.next).item() for n, s in program.states.items()}
            for update in program.updates:
                self._update(update, self.scope)

    def _scope(self, roots) -> Scope:
        scope = super()._scope(roots)
        for name, spec in self.program.dims.items():
            if spec.response in self.feed["responses"]:
                scope.lengths[name] = dict(flat(self.feed["responses"][spec.response]["lengths"]))
        return scope

    def _order(self, root: str, epoch: int, rows: int) -> list[int]:
        return super()._order(root, epoch, rows) if self.shuffle else list(range(rows))

    def _leaf(self, scope: Scope, expr: Expr) -> Cells:
        if expr.op in ("call", "pyop"):
            return self._fed(call_text(expr), str(expr.attr("phase")).startswith("update"))
        if expr.op == "field":
            return dict(flat(self.feed["responses"][expr.args[0].attr("name")][expr.attr("field")]))
        if expr.op in ("generate", "data"):
            return {}
        return super()._leaf(scope, expr)

    def _fed(self, key: str, trains: bool) -> Cells:
        calls = self.feed["calls"]
        given = (calls.get("update", {}) if trains else {}).get(key, calls.get("rollout", {}).get(key))
        cells = {at: constant(x) for at, x in flat(given)}
        if trains:
            cells = {at: x.requires_grad_() for at, x in cells.items()}
            self.current_calls[key] = cells
        return cells


def flat(lists, at=()):
    """(coordinates, element) of nested lists."""
    if not isinstance(lists, list):
        return [(at, lists)]
    return [pair for i, x in enumerate(lists) for pair in flat(x, (*at, i))]


def same(found: dict, wanted, tolerance: float) -> None:
    wanted = dict(flat(wanted))
    assert found.keys() == wanted.keys()
    for at, want in wanted.items():
        assert float(found[at]) == pytest.approx(float(want), abs=tolerance * max(1, abs(want))), at


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_given_numbers(path):
    case = json.loads(path.read_text())
    sizes = {name: str(n) for name, n in case["feed"].get("dims", {}).items()}
    program = loads("\n".join(case["program"]) + "\n", sizes, str(ROOT / "programs" / "case.rlflow"))
    run = FedOracle(program, case["feed"], "--no-shuffle" not in case["args"])
    expect, tolerance = case["expect"], case["tolerance"]
    bound = {s.name: s.expr for s in program.rollout if isinstance(s, Bind)}
    for name, wanted in expect.get("rollout", {}).items():
        same({at: x for at, x in run.scope.known[bound[name]].items()}, wanted, tolerance)
    for name, wanted in expect.get("metrics", {}).items():
        assert run.current.metrics[name] == pytest.approx(wanted, abs=tolerance)
    for name, wanted in expect.get("state", {}).items():
        assert run.states[name] == pytest.approx(wanted, abs=tolerance)
    for dims, wanted in expect.get("kept", {}).items():
        at = dims.split(",")
        found = {c: run.scope.kept(dict(zip(at, c)), len(run.scope.keeps)) for c in run.scope.coordinates(tuple(at))}
        same(found, wanted, 0)
    assert run.skipped == expect.get("skipped", False)
    for model, steps in expect.get("train", {}).items():
        check_steps(run, model, steps, tolerance)


def check_steps(run: FedOracle, model: str, wanted: list[dict], tolerance: float) -> None:
    if run.skipped:
        assert not run.models[model].steps
        return
    objectives = [step["objective"] for step in wanted]
    assert run.current.metrics[f"train/{model}"] == pytest.approx(sum(objectives) / len(objectives), abs=tolerance)
    maximize = next(t.maximize for u in run.program.updates for t in u.trains if t.model == model)
    for found, step in zip(run.models[model].steps, wanted, strict=True):
        for key, gradient in step["grad"].items():
            same({at: -g if maximize else g for (k, at), g in found.items() if k == key}, gradient, tolerance)


# ---- draws, sampling, schedules ----------------------------------------------------------------------


def test_draws_are_those_of_the_runtime():
    """Two implementations of one text."""
    for seed, *what in itertools.product((0, -1, 7), (1, 40), (0, 2 ** 40), (0, 3), (0, 11)):
        assert uniform(seed, "y", *what) == named_draws.uniform(seed, "y", *what)[0]
    assert permuted(50, 3, "b", 2, 1) == named_draws.permutation(50, 3, "b", 2, 1).tolist()


def options(**given) -> Options:
    plain = {"max_tokens": 3, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_tokens": 0, "ends": (0,), "stop": ()}
    return Options(**plain | given)


LOGITS = torch.tensor([0.4, 0.1, 0.3, 0.2]).log()


@pytest.mark.parametrize("given, wanted", [
    ({}, [0.4, 0.1, 0.3, 0.2]),
    ({"top_k": 2}, [4 / 7, 0, 3 / 7, 0]),
    ({"top_p": 0.65}, [4 / 7, 0, 3 / 7, 0]),
    ({"top_p": 0.75}, [4 / 9, 0, 3 / 9, 2 / 9]),
    ({"min_tokens": 1}, [0, 1 / 6, 3 / 6, 2 / 6]),
    ({"temperature": 0.5}, [16 / 30, 1 / 30, 9 / 30, 4 / 30]),
])
def test_distribution(given, wanted):
    assert distribution(LOGITS.double(), options(**given), 0) == pytest.approx(wanted)


def test_a_number_draws_the_token_it_falls_on():
    weights = [0.4, 0.1, 0.3, 0.2]
    assert [invert(weights, u) for u in (0.0, 0.39, 0.41, 0.5, 0.799, 0.81, 1 - 2 ** -53)] == [0, 0, 1, 2, 2, 3, 3]
    assert first_greatest([0.2, 0.4, 0.4]) == 1
    assert margin(weights, 0, 2, 0.39) == pytest.approx(0.11)  # across all of token 1
    assert margin(weights, 2, 1, 0.53) == pytest.approx(0.03)
    assert margin(weights, 0, 2, None) == pytest.approx(0.1)


def test_told_tokens_are_followed_and_measured():
    def drawn(told=None):
        return sample(lambda tokens: LOGITS, [9], options(), [0.41, 0.85, 0.3].__getitem__, lambda ids: "", 99, told)

    own = drawn()
    assert (own.tokens, own.truncated, own.margins) == ([1, 3, 0], False, [])
    assert own.logprobs == pytest.approx([math.log(x) for x in (0.1, 0.2, 0.4)])
    other = drawn([1, 2, 2])
    assert (other.tokens, other.truncated) == ([1, 2, 2], True)
    assert other.margins == pytest.approx([0.05, 0.2])
    assert math.inf in drawn([1, 3]).margins and math.inf in drawn([0, 1, 2]).margins


def test_learning_rates():
    cosine = Schedule("cosine", 1.0, warmup=2, low=0.2)
    assert [learning_rate(cosine, k, 6) for k in (0, 1, 2, 4, 6)] == pytest.approx([0.5, 1, 1, 0.6, 0.2])
    assert [learning_rate(Schedule("linear", 1.0), k, 4) for k in range(5)] == pytest.approx([1, 0.75, 0.5, 0.25, 0])


def test_a_drawn_padding_token_learns():
    """`transformers` gives its embedding no gradient unless it is told that there is no padding."""
    program = load(ROOT / "programs" / "sft.rlflow")
    model = Model(next(iter(program.models.values())), ROOT / "programs" / "models" / "tiny", 1)
    padding = model.net.config.pad_token_id
    sum(model.call("logprobs", Response([5, 6], [padding, 7]), 1.0)).backward()
    assert model.net.get_input_embeddings().weight.grad[padding].abs().sum() > 0


def test_unknown_forms_are_named():
    with pytest.raises(ValueError, match="`refill`"):
        Oracle(load(ROOT / "programs" / "dapo.rlflow"))


# ---- shipped programs on one rank --------------------------------------------------------------------

BEYOND = ("dapo",)  # it refills
PROGRAMS = [path.stem for path in sorted((ROOT / "programs").glob("*.rlflow")) if path.stem not in BEYOND]


def small(name: str) -> Subject:
    """Two iterations on few rows: a multiple of the mini-batches."""
    program = load(ROOT / "programs" / f"{name}.rlflow")
    held = {root for section in program.evals for root in section.roots}
    rows = 2 * max((u.minibatches for u in program.updates), default=3)
    sizes = {d.name: "5" if d.name in held else str(rows) for d in program.dims.values() if d.root}
    return Subject(name, "tiny", sizes | {"run.steps": "2"}, CLEAR.get(name, ()))


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """By program, its checked form and what one rank made of it."""
    folder = tmp_path_factory.mktemp("oracle")
    programs = shipped_programs(folder / "programs")
    checked = {name: small(name).checked("", programs) for name in PROGRAMS}
    found = run_plans({name: compile_program(program, ranks=1) for name, program in checked.items()}, folder)
    return {name: (program, Run.of_result(found[name])) for name, program in checked.items()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_rank_equals_oracle(shipped, name):
    torch.set_num_threads(1)
    program, run = shipped[name]
    verdict = judge(run, Run.of_oracle(Oracle(program)), program)
    print(table({name: verdict}, {}))
    verdict.check()
