"""`rlflowc profile`: what it writes is a cluster file whose machine takes the times that were measured."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compiler.catalog import model_shape
from compiler.cluster_file import read_cluster
from compiler.cost.compute import bandwidth, layer_forward
from compiler.cost.sizes import sizes_of
from compiler.machine import SINGLE
from rlhf_dsl.cli import main
from runtime import launch
from runtime.profile.found import LENGTH, cluster_text, long_batch, machine_of

SIZES = sizes_of(model_shape("llama-3.2-1b"), "policy")
FOUND = {"flops": 1e11, "flops_bf16": 2e11, "memory_bandwidth": 2e10, "latency": 2e-5, "collective": 1e-4, "links": 3e9,
         "step": 5e-4, "short_forward": 0.02, "call": 2e-3, "long_forward": 0.4, "long_train": 1.2, "decode": 0.02}
PPO = str(Path(__file__).parents[1] / "programs" / "ppo.rlflow")


def measured(**changes):
    return machine_of(FOUND | changes, SIZES, 2, 8e9)


def test_estimates_of_what_was_measured_are_the_measurements():
    machine, tokens = measured(), long_batch(SIZES)
    assert layer_forward(machine, SIZES, 1, tokens, LENGTH).total == pytest.approx(FOUND["long_forward"], rel=0.05)
    assert layer_forward(machine, SIZES, 1, 2, 2).total == pytest.approx(FOUND["short_forward"], rel=1e-6)
    assert bandwidth(machine) == FOUND["memory_bandwidth"] and machine.engine.call == FOUND["call"]


def test_a_rate_that_no_product_reaches_is_none():
    assert measured(long_forward=1e-6).reached.matmul == 1.0
    assert 0 < measured(long_forward=1e6).reached.matmul < 0.02


def test_the_cluster_file_holds_the_machine(tmp_path):
    machine = measured(flops=123456789012.0)
    (tmp_path / "here.toml").write_text(cluster_text(machine, "as measured"))
    (read,) = read_cluster(tmp_path / "here.toml").machines
    assert read.storage == SINGLE and read.devices == 2 and not read.engine.ahead
    assert read.flops == 1.23e11  # three digits
    for name in ("memory", "memory_bandwidth", "intra", "intra_latency"):
        assert getattr(read, name) == pytest.approx(getattr(machine, name), rel=0.01)
    for name in ("layer", "collective", "call", "step"):
        assert getattr(read.engine, name) == pytest.approx(getattr(machine.engine, name), rel=0.01)


def test_one_rank_has_no_links_to_measure(tmp_path):
    alone = {name: FOUND[name] for name in FOUND if name not in ("latency", "collective", "links", "step")}
    (tmp_path / "here.toml").write_text(cluster_text(machine_of(alone, SIZES, 1, 8e9), "alone"))
    assert read_cluster(tmp_path / "here.toml").devices == 1


# ---- the command

def test_this_machine_is_measured_and_planned_for(tmp_path, capsys):
    here = tmp_path / "here.toml"
    assert main(["profile", "--ranks", "2", "--seconds", "0.003", "-o", str(here)]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "GFLOP/s" in err and "a message of gloo" in err and f"wrote {here}" in err
    cluster = read_cluster(here)
    assert cluster.is_local and cluster.machines[0].storage == SINGLE
    assert main(["explain", PPO, "--ranks", "2", "--cluster", str(here)]) == 0
    assert "on 2 ranks of this machine" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, code, said", [
    (["--model", "nowhere"], 2, "R0130"), (["--model", "catalog:llama"], 3, "P0112"), (["--seconds", "0"], 2, "E0005"),
    (["--seconds", "nan"], 2, "E0005"), (["--ranks", "100000"], 2, "R0111"),
])
def test_faults_are_diagnostics(capsys, arguments, code, said):
    assert main(["profile", *arguments]) == code
    assert said in capsys.readouterr().err


def test_ranks_that_fail_are_reported(monkeypatch, capsys):
    monkeypatch.setattr(launch, "mpiexec", lambda: "false")
    assert main(["profile", "--ranks", "1"]) == 4
    assert "R0167" in capsys.readouterr().err


def test_an_interrupt_ends_the_ranks(tmp_path):
    """After the first result; nothing is written, and no rank outlives the command."""
    command = [sys.executable, "-P", "-m", "rlhf_dsl.cli", "profile", "--ranks", "2", "--seconds", "2",
               "-o", str(tmp_path / "here.toml")]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert "measuring with 2 ranks" in running.stderr.readline()
    assert "float32" in running.stderr.readline()
    (launcher,) = _children(running.pid)
    ranks = _children(launcher)
    running.send_signal(signal.SIGINT)
    assert running.wait() == 130
    assert not (tmp_path / "here.toml").exists()
    assert ranks
    while any(map(_alive, ranks)):  # mpiexec has told them; the test's own limit ends a wait that does not end
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    """A process that has ended may wait for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("before, after, reason", [
    ("ahead = false", "ahead = 1", "true or false"), ("weight = 4", "weight = 0", "whole number"),
    ("weight = 4", "wait = 4", "unknown key `storage.wait`"), ("step_us = 500", "step_us = -1", "positive number"),
])
def test_a_wrong_file_is_a_diagnostic(tmp_path, capsys, before, after, reason):
    text = cluster_text(measured(), "as measured")
    assert before in text
    (tmp_path / "here.toml").write_text(text.replace(before, after))
    assert main(["explain", PPO, "--cluster", str(tmp_path / "here.toml")]) == 2
    err = capsys.readouterr().err
    assert "P0107" in err and reason in err
