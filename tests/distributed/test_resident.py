"""A run does not grow: after 200 iterations a rank has at most 2 % more memory resident than after 20."""

from __future__ import annotations

import pytest

from compiler.compile import compile_program
from tests.distributed.judging import Subject, told

PLAN = """
plan:
    actor: parallel(tp=2), sequence_parallel(true), recompute(full), micro_batch(2)
    actor.generate: parallel(tp=1)
    critic: parallel(dp=2), optimizer(sharded), micro_batch(2)
    reward: parallel(pp=2)
"""


@pytest.mark.slow
def test_memory_is_that_of_the_first_iterations(programs, tmp_path):
    sizes = {"b": "4", "e": "2", "run.steps": "200"}
    subject = Subject("ppo", "qwen2", sizes, (("epochs=2, minibatches=4", "minibatches=1"),))
    path = tmp_path / "ppo.plan.json"
    path.write_text(compile_program(subject.checked(PLAN, programs), ranks=2).to_json())
    (found,) = told(2, "resident", path, tmp_path / "scratch")
    for settled, last, _ in found["by rank"]:
        assert last <= 1.02 * settled, found
