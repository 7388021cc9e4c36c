"""A few random programs, run: one rank as the oracle says, two ranks as one; `python -m tests.whole_runs` runs more."""

from collections import Counter

import torch

from tests import whole_runs

SEED, COUNT = 2026, 4


def test_random_programs_run_as_the_oracle_says(tmp_path):
    torch.set_num_threads(1)
    seen = Counter()
    wrong = whole_runs.campaign(SEED, range(COUNT), (2,), tmp_path, seen)
    assert wrong == {}, "\n\n".join(f"{name}: {said}" for name, said in wrong.items())
    assert seen["compared"] - seen["hang on rounding"] >= COUNT
