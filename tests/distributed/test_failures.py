"""How a run ends when it does not end by itself: killed ranks, interrupts, the user's own mpiexec, a full disk."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time

import pytest

from tests.running import BIN, ENDS_WITHIN_S, environment, make_desk, metrics, rlflowc, start, start_mpiexec

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    return make_desk(tmp_path_factory.mktemp("desk"))


@pytest.fixture(scope="module")
def whole(desk):
    """(screen of a terminal, run folder) of a run that nothing disturbs."""
    return on_terminal(["run", "small.rlflow", "--ranks", "2", "--run-dir", "whole"], desk), desk / "whole"


# ---- a run that ends by itself

def test_a_terminal_shows_a_live_bar_and_keeps_whole_lines(whole):
    (raw, screen, code), folder = whole
    assert code == 0
    assert "━" in raw and "\x1b[?25l" in raw  # there was a bar
    assert screen[0].startswith("small: 4 steps on 2 ranks") and screen[-1].startswith("done in ")
    assert {line.split()[0] for line in screen[1:-1]} == {"step", "saved"}, screen
    assert [line[:9] for line in screen if line.startswith("step")] == [f"step {i}/4 " for i in range(1, 5)]


def test_the_run_folder_holds_what_went_in_and_came_out(whole, desk):
    _, folder = whole
    assert (folder / "program.rlflow").read_text() == (desk / "small.rlflow").read_text()
    assert (folder / "overrides.json").read_text() == "{}\n"
    assert [row["iteration"] for row in metrics(folder)] == [1, 2, 3, 4]
    assert {"reward", "train/actor", "train/critic", "actor/grad_norm"} <= set(metrics(folder)[0]["metrics"])
    assert sorted(p.name for p in (folder / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    assert {"actor", "critic"} <= {p.name for p in (folder / "checkpoints" / "step-000004").iterdir()}
    again = rlflowc("run", "small.rlflow", "--ranks", "2", "--run-dir", folder, cwd=desk)
    assert again.returncode == 2 and "error[R0157]" in again.stderr


def test_checkpoints_load_in_transformers(whole):
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    saved = whole[1] / "checkpoints" / "step-000004"
    for kind, name in ((AutoModelForCausalLM, "actor"), (AutoModelForSequenceClassification, "critic")):
        model, info = kind.from_pretrained(saved / name, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        assert torch.isfinite(model(torch.tensor([[3, 4, 5]])).logits).all()


# ---- the user's own mpiexec

def compile_for_two(desk, plan: str, setting: str) -> None:
    done = rlflowc("compile", "small.rlflow", "--ranks", "2", "-s", setting, "-o", plan, cwd=desk)
    assert done.returncode == 0, done.stderr


def test_mpiexec_runs_a_plan_and_saves_on_sigusr1(whole, desk):
    compile_for_two(desk, "two.plan.json", "wait=0.05")
    job = start_mpiexec(desk, "by-mpiexec", 2, "two.plan.json")
    job.until(lambda: job.iterations() >= 1)
    job.rank(1).send_signal(signal.SIGUSR1)
    code, talk = job.end()
    assert code == 0, talk
    assert metrics(desk / "by-mpiexec") == metrics(whole[1])
    steps = sorted(p.name for p in (desk / "by-mpiexec" / "checkpoints").iterdir())
    assert len(steps) == 2 and "step-000001" <= steps[0] < steps[1] == "step-000004"
    assert talk.count("step 1/4") == 1 and "finished" in talk


def test_mpiexec_with_another_number_of_ranks(desk):
    compile_for_two(desk, "of-two.plan.json", "wait=0")
    code, talk = start_mpiexec(desk, "of-three", 3, "of-two.plan.json").end()
    assert code == 2 and talk.count("error[R0152]") == 1 and "Traceback" not in talk
    assert not (desk / "of-three").exists()


def test_mpiexec_gives_one_report_of_a_failure(desk):
    compile_for_two(desk, "bad.plan.json", "wait=-1")
    job = start_mpiexec(desk, "failing", 2, "bad.plan.json")
    code, talk = job.end(240)
    assert code == 4 and talk.count("error[R") == 1 and "Traceback" not in talk, talk
    assert "error[R0321]: `judge` raised ValueError: sleep length must be non-negative on row" in talk
    assert "iteration 1, step `pyop r` (small.rlflow:21)" in talk


# ---- ends by force

def test_a_killed_rank_ends_the_job_with_one_report(desk):
    job = start(desk, "killed", "-s", "wait=3")
    job.until(job.judging)
    scratch = job.scratch()
    job.rank(1).kill()
    began = time.monotonic()
    code, talk = job.end()
    assert time.monotonic() - began < ENDS_WITHIN_S and not job.left() and not scratch.exists()
    assert code == 4 and talk.count("error[") == 1 and "Traceback" not in talk, talk
    assert "error[R0153]: rank 1 died of SIGKILL in iteration 1, at `pyop r`" in talk
    assert "small.rlflow:21:5" in talk and "21 │     r          = judge(y.text, answer, wait)" in talk


def test_a_killed_launcher_takes_its_ranks_along(desk):
    job = start(desk, "orphaned", "-s", "wait=3")
    job.until(job.judging)
    job.process.kill()
    job.end()
    assert not job.left()


def test_ctrl_c_saves_at_the_next_boundary_and_the_checkpoint_continues(desk):
    job = start(desk, "stopped", "-s", "wait=0.1", "-s", "run.steps=500")
    job.until(lambda: job.iterations() >= 1)
    job.process.send_signal(signal.SIGINT)
    code, talk = job.end()
    done = job.iterations()
    assert code == 130 and not job.left() and "Traceback" not in talk, talk
    assert "stopping after this step" in talk and "stopped as asked" in talk
    saved = desk / "stopped" / "checkpoints" / f"step-{done:06d}"
    assert {"actor", "critic"} <= {p.name for p in saved.iterdir()}

    # from the checkpoint, and into a folder that becomes unwritable
    job = start(desk, "continued", "-s", f"base={saved / 'actor'}", "-s", "wait=0.1")
    checkpoints = desk / "continued" / "checkpoints"
    job.until(lambda: job.iterations() >= 1)
    checkpoints.rmdir()
    checkpoints.write_text("no folder")
    code, talk = job.end()
    assert code == 4 and not job.left() and "Traceback" not in talk, talk
    assert talk.count("error[") == 1 and "error[R0163]: this cannot be written" in talk and str(checkpoints) in talk
    assert len(metrics(desk / "continued")) in (3, 4) and checkpoints.read_text() == "no folder"


def test_a_second_signal_ends_at_once(desk):
    job = start(desk, "twice", "-s", "wait=3")
    job.until(job.judging)
    job.process.send_signal(signal.SIGTERM)
    job.until(lambda: (desk / "twice" / "state" / "stop").exists(), 10)
    began = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    code, talk = job.end()
    assert code == 130 and time.monotonic() - began < ENDS_WITHIN_S and not job.left()
    assert "error" not in talk and not list((desk / "twice" / "checkpoints").iterdir())


# ---- a terminal

def on_terminal(arguments: list[str], cwd) -> tuple[str, list[str], int]:
    """(everything written, the lines of the screen at the end, exit code) of a command on a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 300, 0, 0))
    process = subprocess.Popen([str(BIN / "rlflowc"), *arguments], cwd=cwd, env=environment(TERM="xterm-256color"),
                               stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    written = b""
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        written += data
    os.close(ours)
    text = written.decode()
    return text, screen_of(text), process.wait()


def screen_of(text: str) -> list[str]:
    """What a terminal shows after `text`: carriage returns, line feeds, cursor up and erase line are followed."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token.startswith("\x1b"):
            if token.endswith("A"):
                row -= int(token[2:-1] or 1)
            if token == "\x1b[2K":
                lines[row] = ""
        else:
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token):]
            column += len(token)
    return [line.rstrip() for line in lines if line.strip()]
