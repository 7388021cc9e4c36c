"""A run that was stopped and resumed, on the same ranks or in another layout, is the run that was not."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from runtime import checkpoint
from tests.running import make_desk, metrics, rlflowc

CUT = "\nplan:\n    actor: parallel(tp=2)\n    critic: parallel(pp=2)\n"


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """Two runs of the same program: `whole`, of four steps, and `half`, that ended after two with a checkpoint."""
    folder = make_desk(tmp_path_factory.mktemp("desk"))
    half = (folder / "small.rlflow").read_text().replace("steps = 4", "steps = 2").replace("every 4", "every 2")
    (folder / "half.rlflow").write_text(half)
    for program, run in (("small.rlflow", "whole"), ("half.rlflow", "half")):
        done = rlflowc("run", program, "--ranks", 2, "--run-dir", run, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def resumed(desk: Path, name: str, *options: object, program: str = "") -> list[dict]:
    shutil.copytree(desk / "half", desk / name)
    if program:
        (desk / name / "program.rlflow").write_text((desk / "half.rlflow").read_text() + program)
    done = rlflowc("resume", name, "-s", "run.steps=4", *options, cwd=desk)
    assert done.returncode == 0, done.stderr
    return metrics(desk / name)


def test_the_same_ranks_give_the_same_numbers(desk):
    assert resumed(desk, "same") == metrics(desk / "whole")


@pytest.mark.parametrize("name, options, program", [("one", ("--ranks", 1), ""), ("cut", (), CUT)])
def test_another_layout_gives_the_same_numbers_to_rounding(desk, name, options, program):
    for found, wanted in zip(resumed(desk, name, *options, program=program), metrics(desk / "whole"), strict=True):
        assert found["metrics"].keys() == wanted["metrics"].keys()
        for metric, number in wanted["metrics"].items():
            assert math.isclose(found["metrics"][metric], number, rel_tol=1e-4, abs_tol=1e-5), (found["iteration"], metric)


def test_a_damaged_checkpoint_is_refused(desk):
    shutil.copytree(desk / "half", desk / "damaged")
    weights = checkpoint.latest(desk / "damaged" / "checkpoints") / "actor" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    done = rlflowc("resume", "damaged", cwd=desk)
    assert done.returncode == 2 and "error[R0165]: the checkpoint is damaged: it has changed" in done.stderr
    assert len(metrics(desk / "damaged")) == 2  # what was there is there


def test_nothing_to_go_on_with(desk):
    done = rlflowc("resume", ".", cwd=desk)
    assert done.returncode == 2 and "error[R0166]" in done.stderr
