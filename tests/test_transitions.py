"""`reshard(NAME)` in a plan: which strategy is planned, what it moves, and that no plan says one and means another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compiler.cluster_file import read_cluster
from compiler.compile import compile_program
from compiler.explain import explain_json
from compiler.plan import Plan
from compiler.proof.verify import faults, verify_plan
from compiler.proof.wellformed import shape_of
from compiler.resharding.gathers import MINIMAL, STRATEGIES
from compiler.resharding.transitions import resolve, strategy_of, weight_transfer
from compiler.steps import Reshard
from rlhf_dsl.diagnostics import DiagnosticError
from tests.compiling import CLUSTER, GROUPS, checked_text, compiled

CLUSTERS = Path(__file__).resolve().parents[1] / "programs" / "clusters"
PROGRAM = GROUPS.replace("dim g = 4\n", "") + '''
rollout:
    y[b, t] = actor.generate(prompts)
    r[b]    = reward.score(y)
update(epochs=1, minibatches=1):
    train actor to maximize mean(actor.logprobs(y) * r)
plan:
    actor.train: parallel(tp=4)
    actor.generate: parallel(tp=2)'''


def planned(tmp_path, strategy: str) -> Plan:
    return compiled(tmp_path, f"{PROGRAM}, reshard({strategy.replace('-', '_')})\n" if strategy else f"{PROGRAM}\n", 4)


def reshard_of(plan: Plan) -> Reshard:
    return next(step for step in plan.steps if isinstance(step, Reshard))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plan_moves_by_the_strategy_asked_for(tmp_path, strategy):
    plan = planned(tmp_path, strategy)
    step = reshard_of(plan)
    assert step.strategy == plan.layouts["actor.generate"].strategy == strategy
    transfer = weight_transfer(shape_of(plan, "actor"), "policy", plan.layouts, step.src, step.dst)
    assert transfer.total_bytes == step.total_bytes
    assert (transfer.total_bytes == transfer.lower_bound_bytes) == (strategy in ("zero-redundancy", "minimal"))
    assert Plan.from_json(plan.to_json()) == plan
    verify_plan(plan)


def test_without_a_word_it_is_zero_redundancy_at_intervals(tmp_path):
    plan = planned(tmp_path, "")
    assert reshard_of(plan).strategy == "zero-redundancy"
    assert resolve(plan.layouts, "actor.generate").ranks == (0, 2, 1, 3)
    assert resolve(planned(tmp_path, "vanilla").layouts, "actor.generate").ranks == (0, 1, 2, 3)
    assert strategy_of(plan.layouts, "actor.generate", "actor.train") == "minimal"


def test_a_searched_plan_moves_by_the_strategy_asked_for(tmp_path):
    checked = checked_text(tmp_path, f"{PROGRAM}, reshard(vanilla)\n    assume: prompt=10\n")
    plan = compile_program(checked, read_cluster(CLUSTERS / "a100-1x8.toml"))
    assert reshard_of(plan).strategy == plan.layouts["actor.generate"].strategy == "vanilla"
    assert resolve(plan.layouts, "actor.generate").ranks == tuple(range(plan.layouts["actor.generate"].ranks))


def test_where_generation_has_ranks_of_its_own_there_is_nothing_to_choose(tmp_path):
    """A strategy that gathers is refused at its line; what happens anyway may be said."""
    text = PROGRAM.replace("parallel(tp=2)", "devices(2), parallel(tp=2), reshard(NAME)")
    text += "\nrun:\n    steps = 2\n    lag = 1\n"
    for strategy in (s for s in STRATEGIES if s != MINIMAL):
        with pytest.raises(DiagnosticError) as caught:
            compiled(tmp_path, text.replace("NAME", strategy.replace("-", "_")), 6)
        (found,) = caught.value.diagnostics
        assert (found.code, caught.value.exit_code) == ("P0119", 3)
        assert "actor.generate: devices(2)" in found.source.text[found.span.start:found.span.end]
    assert reshard_of(compiled(tmp_path, text.replace("NAME", "minimal"), 6)).strategy == MINIMAL


def test_a_plan_that_says_another_strategy_is_refused(tmp_path):
    plan = planned(tmp_path, "vanilla")
    steps = tuple(replace(s, strategy="minimal") if isinstance(s, Reshard) else s for s in plan.steps)
    assert "says `minimal`, its layouts say `vanilla`" in next(faults(replace(plan, steps=steps)))
    layouts = plan.layouts | {"actor.generate": replace(plan.layouts["actor.generate"], strategy="magic")}
    assert "there is no strategy `magic`" in next(faults(replace(plan, layouts=layouts)))


def test_explain_tells_the_strategy_its_peak_and_links(tmp_path):
    found = {}
    for strategy in STRATEGIES:
        told = explain_json(planned(tmp_path, strategy), CLUSTER, 0.0)["transfers"]
        found[strategy] = next(t for t in told if "strategy" in t)
        assert found[strategy]["strategy"] == strategy
        assert found[strategy]["bytes_within_nodes"] == found[strategy]["total_bytes"]
        assert found[strategy]["bytes_between_nodes"] == 0
    assert found["zero-redundancy"]["redundant_bytes"] == 0 < found["vanilla"]["redundant_bytes"]
    assert found["zero-redundancy"]["peak_bytes"] < found["vanilla"]["peak_bytes"]
