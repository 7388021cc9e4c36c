"""Rows travel between the ranks that have them and the ranks that need them: nobody else waits, and senders go on."""

from __future__ import annotations

import pytest

from compiler.compile import compile_program
from tests.distributed.judging import Subject, told

PLAN = "\nplan:\n    actor: devices(1)\n    ref: devices(1)\n    reward: colocate(ref)\n    critic: devices(1)\n"
PPO = Subject("ppo", "tiny", {"b": "8", "e": "1", "run.steps": "1"})
RANK_OF = {"actor": 0, "ref": 1, "reward": 1, "critic": 2}


@pytest.fixture(scope="module")
def cases(programs, tmp_path_factory) -> dict[str, list]:
    folder = tmp_path_factory.mktemp("messages")
    plan = compile_program(PPO.checked(PLAN, programs), ranks=3)
    (folder / "plan.json").write_text(plan.to_json())
    lines = told(3, "message_cases", folder / "plan.json", folder / "scratch")
    return {line["case"]: line["by rank"] for line in lines}


def test_a_rank_without_rows_goes_on(cases):
    assert cases["who_has_nothing_goes_on"] == [5, 3, 0]


def test_a_sender_goes_on(cases):
    assert cases["who_sends_goes_on"] == [0, 100_000, 0]


def test_messages_arrive_whole_and_in_order(cases):
    found = [ranks for case, ranks in cases.items() if case.endswith("on their way")]
    assert len(found) == 2
    for ranks in found:
        assert all(rank["arrived"] > 100_000 for rank in ranks)
        assert [(rank["wrong"], rank["beyond"]) for rank in ranks] == [(0, 0)] * 3


def test_a_gather_fills_the_slots_of_all(cases):
    assert cases["gathered"] == [[[[10 * rank + i for i in range(3)] for rank in range(3)]] * 2] * 3


def test_only_ranks_that_need_rows_get_them_and_only_those_that_have_them_give_them(cases):
    """Each rank has two or three of the eight rows at home, and each model is on one rank."""
    by_step = cases["by step"]
    transfers = {name for rank in by_step for name in rank if name}
    assert len(transfers) >= 7
    for name in transfers:
        source, target = name.split(" to ")
        model = RANK_OF[(target if source == "home" else source).split(".")[0]]
        sent, received = zip(*(rank[name] for rank in by_step))
        others = [rank for rank in range(3) if rank != model]
        one, many = (received, sent) if source == "home" else (sent, received)
        assert one[model] == sum(many) > 0, name
        assert all(one[rank] == 0 < many[rank] for rank in others) and many[model] == 0, name
