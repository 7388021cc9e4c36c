"""What a search found, and ranks without a model, give what sharing all ranks gives."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from compiler.cluster import Cluster
from compiler.compile import compile_program
from compiler.machine import SINGLE, Machine
from compiler.placement import place
from compiler.search.program import Searched
from tests.distributed.judging import Run, Subject, Verdict, judge, run_plans, table

RANKS = 4
FOUR = Cluster("four", (Machine("four", 1, RANKS, flops=5e10, memory=2e9, memory_bandwidth=6e9, intra=2e9, node=2e9,
                                host=6e9, intra_latency=5e-5, inter_latency=5e-5, storage=SINGLE),))
PAIRS = dataclasses.replace(FOUR, machines=(dataclasses.replace(FOUR.machines[0], name="a", devices_per_node=2),
                                            dataclasses.replace(FOUR.machines[0], name="b", devices_per_node=2)))
SMALL = {"e": "5", "run.steps": "2"}
SUBJECTS = {
    "ppo": Subject("ppo", "tiny", SMALL | {"b": "12"}, (("temperature=1.0", "temperature=0.8"),)),
}
CASES = {  # (subject, lines of plan:, cluster to search on)
    "ppo found": ("ppo", "", FOUR),
    "ppo found in pools": ("ppo", "actor: parallel(pp=2); actor.generate: parallel(tp=2)", PAIRS),
    "ppo with an idle rank": ("ppo", "actor: devices(2), colocate(ref); critic: devices(1), colocate(reward)", None),
}


@pytest.fixture(scope="module")
def results(programs, tmp_path_factory) -> dict[str, dict]:
    plans = {}
    cases = CASES | {subject: (subject, "", None) for subject in SUBJECTS}
    for name, (subject, lines, cluster) in cases.items():
        section = "\nplan:\n" + "".join(f"    {line}\n" for line in lines.split("; ")) if lines else ""
        checked = SUBJECTS[subject].checked(section, programs)
        plans[name] = compile_program(checked, cluster, RANKS, placer=Searched() if cluster else place)
    return run_plans(plans, tmp_path_factory.mktemp("searched"))


@pytest.fixture(scope="module")
def verdicts(results, programs) -> dict[str, Verdict]:
    """Of each case against all models on all ranks."""
    torch.set_num_threads(1)
    runs = {name: Run.of_result(found) for name, found in results.items()}
    return {name: judge(runs[name], runs[subject], SUBJECTS[subject].checked("", programs))
            for name, (subject, _, _) in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_equals_sharing_all_ranks(verdicts, name):
    verdicts[name].check()


def test_table(verdicts, results, capsys):
    """Prints the largest deviations."""
    with capsys.disabled():
        print(table(verdicts, results))
    assert len(verdicts) == len(CASES)
