"""`rlflowc sbatch`: a script that bash takes, that asks Slurm for the plan's ranks, and that starts them."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from pathlib import Path

import pytest

from compiler.cluster import Cluster
from compiler.compile import compile_program
from compiler.plan import GroupSpec, Plan
from compiler.reading.sbatch import Job, job_script
from rlhf_dsl.cli import main
from rlhf_dsl.diagnostics import DiagnosticError
from tests.compiling import CLUSTER, shipped

replace = dataclasses.replace


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    return compile_program(shipped(tmp_path_factory.mktemp("sbatch"), "grpo"), CLUSTER, 8)


def asked(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script, re.M))


def test_slurm_is_asked_for_the_ranks_of_the_plan(plan):
    found = asked(job_script(plan, Path("p.json"), CLUSTER, Job()))
    assert (found["nodes"], found["ntasks"], found["ntasks-per-node"]) == ("1", "8", "8")
    assert not {"time", "partition", "account", "gpus-per-task"} & set(found)
    wanted = Job("04:00:00", "gpu", "me", True)
    found = asked(job_script(plan, Path("p.json"), CLUSTER, wanted))
    assert (found["time"], found["partition"], found["account"], found["gpus-per-task"]) == ("04:00:00", "gpu", "me", "1")


@pytest.mark.parametrize("path", ["p.json", "a plan.json", "it's $HOME; rm.json", "--p.json"])
def test_the_script_starts_the_ranks(plan, tmp_path, path):
    """Under an `srun` that only says what it was asked for; no name of a file is read as anything else."""
    (tmp_path / "job.sh").write_text(job_script(plan, Path(path), CLUSTER, Job()))
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$OMP_NUM_THREADS" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    assert subprocess.run(["bash", "-n", "job.sh"], cwd=tmp_path).returncode == 0
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "1", "--distribution=block,Pack", "--mpi=pmix", "--kill-on-bad-exit=1", "rlflowc", "run", "--run-dir", "runs/grpo-7", "--", path]


def test_unlike_nodes_are_parts_of_one_job(plan):
    """The first 4 ranks on a node of one kind, the others on two nodes of another, each kind from a node of its own."""
    mixed = Cluster("mixed", (replace(CLUSTER.machines[0], name="big", devices_per_node=8),
                              replace(CLUSTER.machines[0], name="small pool", nodes=2, devices_per_node=2)))
    groups = (GroupSpec(("actor",), 0, 4, "big"), GroupSpec(("ref",), 4, 3, "small pool"))
    script = job_script(replace(plan, cluster=mixed.digest, groups=groups, world=7), Path("p.json"), mixed, Job(gpus=True))
    first, second = (asked(part) for part in script.split("#SBATCH hetjob\n"))
    assert (first["nodes"], first["ntasks"], first["ntasks-per-node"], first["constraint"]) == ("1", "4", "4", "big")
    assert (second["nodes"], second["ntasks"], second["ntasks-per-node"], second["constraint"]) == (
        "2", "3", "2", "small-pool")
    assert "srun --het-group=0-1 " in script and first["gpus-per-task"] == second["gpus-per-task"] == "1"
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_nodes_that_are_alike_need_no_feature(plan):
    script = job_script(plan, Path("p.json"), CLUSTER, Job())
    assert "hetjob" not in script and "constraint" not in script and "--het-group" not in script


def test_a_name_cannot_add_lines(plan):
    odd = dataclasses.replace(plan, program=dataclasses.replace(plan.program, name="a\n#SBATCH --nodes=99\nb"))
    assert asked(job_script(odd, Path("p.json"), CLUSTER, Job()))["nodes"] == "1"


def test_the_plan_must_be_of_the_cluster(plan):
    with pytest.raises(DiagnosticError) as caught:
        job_script(dataclasses.replace(plan, cluster="0"), Path("p.json"), CLUSTER, Job())
    assert caught.value.diagnostics[0].code == "P0302" and caught.value.exit_code == 3


@pytest.mark.parametrize("option", [["--time", "4h"], ["--partition", "a b"], ["--account", "x\n#SBATCH"]])
def test_options_are_checked(option, capsys):
    assert main(["sbatch", "p.json", *option]) == 2
    assert "E0005" in capsys.readouterr().err
