"""`rlflowc sbatch PLAN`: the script that has Slurm run a plan."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from compiler.cluster import Cluster
from compiler.plan import Plan
from compiler.templating import environment
from rlhf_dsl.diagnostics import fault

GRACE_S = 300  # between the request to save and the end of the job's time


@dataclass(frozen=True)
class Job:
    """What Slurm is asked for beside the plan's ranks; "" leaves it to Slurm. gpus: one for each rank."""

    time: str = ""
    partition: str = ""
    account: str = ""
    gpus: bool = False


def job_script(plan: Plan, path: Path, cluster: Cluster, job: Job) -> str:
    """The script; ranks fill nodes in their order, as the plan assumes. Raises DiagnosticError P0302."""
    if plan.cluster != cluster.digest:
        raise fault("P0302", place=str(path), cluster=cluster.name)
    per_node = plan.world if cluster.is_local else min(plan.world, cluster.devices_per_node)
    return environment(autoescape=False, quoted=shlex.quote).get_template("sbatch.sh.j2").render(
        name=re.sub(r"[^\w.-]", "-", plan.program.name), ranks=plan.world, nodes=-(-plan.world // per_node),
        per_node=per_node, plan=str(path), grace=GRACE_S, gpus=job.gpus, time=job.time, partition=job.partition,
        account=job.account)
