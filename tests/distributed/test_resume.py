"""A run that was stopped and resumed, on the same ranks or in another layout, is the run that was not."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runtime import checkpoint
from tests.running import make_desk, metrics, rlflowc

CHUNKS = """
plan:
    actor: parallel(pp=2, chunks=2), micro_batch(3), recompute(full)
    critic: parallel(dp=2), optimizer(sharded)
"""
NARROW = """
plan:
    actor: precision(bf16), optimizer(sharded)
    critic: precision(bf16), parallel(tp=2), sequence_parallel(true)
"""
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


def resumed(desk: Path, name: str, *options: object, program: str = "", steps: int = 4) -> list[dict]:
    """A copy of `half` goes on to so many steps, with more text to its program."""
    if not (desk / name).exists():
        shutil.copytree(desk / "half", desk / name)
    if program:
        (desk / name / "program.rlflow").write_text((desk / "half.rlflow").read_text() + program)
    done = rlflowc("resume", name, "-s", f"run.steps={steps}", *options, cwd=desk)
    assert done.returncode == 0, done.stderr
    return metrics(desk / name)


def test_the_same_ranks_give_the_same_numbers(desk):
    assert resumed(desk, "same") == metrics(desk / "whole")


@pytest.mark.parametrize("name, options, program", [
    ("one", ("--ranks", 1), ""), ("cut", (), CUT), ("chunks", (), CHUNKS)])
def test_another_layout_gives_the_same_numbers_to_rounding(desk, name, options, program):
    for found, wanted in zip(resumed(desk, name, *options, program=program), metrics(desk / "whole"), strict=True):
        assert found["metrics"].keys() == wanted["metrics"].keys()
        for metric, number in wanted["metrics"].items():
            assert math.isclose(found["metrics"][metric], number, rel_tol=1e-4, abs_tol=1e-5), (found["iteration"], metric)


def test_a_run_in_16_bits_goes_on_from_one_in_32_and_from_itself(desk):
    """A stop between leaves no trace: the weights that it steps on are kept in 32 bits."""
    at_once = resumed(desk, "narrow", program=NARROW, steps=6)
    resumed(desk, "stops", program=NARROW)
    assert resumed(desk, "stops", steps=6) == at_once
    saved = checkpoint.latest(desk / "stops" / "checkpoints")
    weights = load_file(saved / "actor" / "model.safetensors")
    masters = load_file(saved / "training" / "actor" / "master" / "model.safetensors")
    assert weights.keys() == masters.keys()
    assert all(torch.equal(tensor, masters[name].bfloat16()) for name, tensor in weights.items())
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in masters.values())


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
