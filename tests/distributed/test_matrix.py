"""The plan never changes the result: programs under many layouts equal the one-rank run, which equals the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from compiler.compile import compile_program
from compiler.plan import Plan
from compiler.proof.wellformed import all_steps
from rlhf_dsl.typed import Checked
from tests.distributed.judging import CLEAR, Run, Subject, Verdict, check_few_part, judge, run_plans, table
from tests.oracle import Oracle

# (tp, pp, dp), the reference first
LAYOUTS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1))

# Sizes that neither ranks nor micro-batches divide. Each program at a temperature of its own, one with top-p.
SUBJECTS = {
    "ppo": Subject("ppo", "tiny", {"b": "12", "e": "5", "run.steps": "3"}, (("temperature=1.0", "temperature=0.8"),)),
    "grpo": Subject("grpo", "tiny", {"b": "6", "g": "3", "e": "5", "run.steps": "3"},
                    (("temperature=1.0", "temperature=1.2, top_p=0.95"),)),
    "ppo-qwen2": Subject("ppo", "qwen2", {"b": "12", "e": "5", "run.steps": "3"},
                         (("lr=lr)", "lr=lr, weight_decay=1)"),)),
    "ppo-once": Subject("ppo", "tiny", {"b": "12", "e": "5", "run.steps": "3"},
                        (("epochs=2, minibatches=4", "epochs=1, minibatches=1"),)),  # goes on from forwards of the rollout
    "reward_model": Subject("reward_model", "tiny-reward", {"b": "9", "run.steps": "3"}),
    "ppo_ptx": Subject("ppo_ptx", "tiny", {"b": "8", "c": "12", "e": "5", "run.steps": "2"}),
    "online_dpo": Subject("online_dpo", "tiny", {"b": "7", "e": "5", "run.steps": "2"}, CLEAR["online_dpo"]),
}
LAYOUTS_OF = {
    "ppo": LAYOUTS, "grpo": LAYOUTS,
    "ppo-qwen2": ((1, 1, 1), (2, 1, 2), (2, 2, 1)), "ppo-once": ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2)),
    "reward_model": ((1, 1, 1), (2, 1, 1), (1, 2, 2)),
    "ppo_ptx": ((1, 1, 1), (1, 2, 2)), "online_dpo": ((1, 1, 1), (2, 1, 2)),
}


WAYS = {
    "": "", "cut": ", sequence_parallel(true), optimizer(sharded), recompute(full)",
    "divided": ", sequence_parallel(true), optimizer(sharded)",
    "interleaved": ", parallel(chunks=2), optimizer(sharded)",
}


@dataclass(frozen=True)
class Case:
    subject: str
    layout: tuple[int, int, int]
    micro_batch: int
    sampler_tp: int
    ways: str = ""  # of WAYS: how engines compute

    @property
    def name(self) -> str:
        tp, pp, dp = self.layout
        degrees = f"{self.subject} tp{tp} pp{pp} dp{dp} micro{self.micro_batch} sampler{self.sampler_tp}"
        return f"{degrees} {self.ways}".strip()

    @property
    def ranks(self) -> int:
        tp, pp, dp = self.layout
        return tp * pp * dp

    def plan(self, checked: Checked) -> str:
        """The `plan:` section."""
        tp, pp, dp = self.layout
        how = f"parallel(tp={tp}, pp={pp}, dp={dp}), micro_batch({self.micro_batch})"
        lines = [f"    {name}: {how}{WAYS[self.ways] if m.optimizer else ''}" for name, m in checked.models.items()]
        lines += [f"    actor.generate: parallel(tp={self.sampler_tp})"] if "actor" in checked.models else []
        return "\nplan:\n" + "\n".join(lines) + "\n"


# Every layout with two micro-batch sizes, the second with the sampler over two ranks where there are two.
CASES = [Case(name, layout, micro, min(sampler, layout[0] * layout[1] * layout[2]))
         for name, layouts in LAYOUTS_OF.items() for layout in layouts for micro, sampler in ((2, 1), (5, 2))]
CASES += [Case("ppo", (2, 1, 2), 3, 2, "cut"), Case("ppo-qwen2", (2, 1, 2), 3, 1, "cut")]
CASES += [Case("ppo", (1, 2, 2), 3, 2, "interleaved"), Case("ppo-once", (2, 1, 2), 3, 2, "divided")]
REFERENCES = {name: next(case.name for case in CASES if case.subject == name) for name in SUBJECTS}
NAMES = [*SUBJECTS, *(case.name for case in CASES if case.name not in REFERENCES.values())]


@pytest.fixture(scope="module")
def plans(programs) -> dict[str, Plan]:
    def plan(case: Case) -> Plan:
        subject = SUBJECTS[case.subject]
        checked = subject.checked(case.plan(subject.checked("", programs)), programs)
        return compile_program(checked, ranks=case.ranks)

    return {case.name: plan(case) for case in CASES}


@pytest.fixture(scope="module")
def results(plans, tmp_path_factory) -> dict[str, dict]:
    return run_plans(plans, tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forwards_are_retained_in_one_stage_and_one_mini_batch(plans, case):
    once = case.subject == "ppo-once" and case.layout[1] == 1
    retained = {s.retained for _, s in all_steps(plans[case.name]) if s.op == "train"}
    assert retained == ({"logp_old", "v_old"} if once else {""})


@pytest.fixture(scope="module")
def verdicts(results, programs) -> dict[str, Verdict]:
    """Of each case against the one-rank run of its subject; of that, under the subject's name, against the oracle."""
    torch.set_num_threads(1)
    found = {}
    for name, subject in SUBJECTS.items():
        reference, checked = Run.of_result(results[REFERENCES[name]]), subject.checked("", programs)
        found[name] = judge(reference, Run.of_oracle(Oracle(checked)), checked)
        others = [case.name for case in CASES if case.subject == name and case.name != REFERENCES[name]]
        found |= {other: judge(Run.of_result(results[other]), reference, checked) for other in others}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_equals_reference(verdicts, name):
    verdicts[name].check()


def test_few_rows_part(verdicts):
    check_few_part(verdicts)


@pytest.mark.parametrize("case", [case.name for case in CASES if case.subject != "reward_model"])
def test_actor_is_resharded(results, case):
    """Bit for bit, at the bytes of the plan, which are those of HybridFlow's formula for tensors cut evenly."""
    checks = results[case]["checks"]
    assert {name: c for name, c in checks.items() if c["wrong"] or c["moved"] != c["planned"]} == {}
    by_formula = [c for c in checks.values() if c["formula"] is not None]
    assert by_formula
    assert all(c["evenly_cut"] == c["formula"] for c in by_formula)


@pytest.mark.parametrize("name", ["ppo", "grpo", "ppo-qwen2"])
def test_programs_are_worth_comparing(results, name):
    """Responses of different lengths, models that learn: else much of the above would hold of a wrong runtime too."""
    run = Run.of_result(results[REFERENCES[name]])
    assert len({len(row) for once in run.tokens["y"] for row in once.values()}) > 1
    assert all(m["actor/grad_norm"] > 1e-3 for m in run.metrics[1:])


def test_table(verdicts, results, capsys):
    with capsys.disabled():
        print(table(verdicts, results))
    assert len(verdicts) == len(NAMES)
