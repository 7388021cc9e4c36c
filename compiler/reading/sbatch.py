"""`rlflowc sbatch PLAN`: the script that has Slurm run a plan."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

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


@dataclass(frozen=True)
class Part:
    """Ranks on nodes of one kind. feature: what such nodes have in Slurm, "" where all are alike"""

    ranks: int
    nodes: int
    per_node: int
    feature: str = ""


def job_script(plan: Plan, path: Path, cluster: Cluster, job: Job) -> str:
    """The script; ranks fill nodes in their order, as the plan assumes. Raises DiagnosticError P0302."""
    if plan.cluster != cluster.digest:
        raise fault("P0302", place=str(path), cluster=cluster.name)
    return environment(autoescape=False, quoted=shlex.quote).get_template("sbatch.sh.j2").render(
        name=_word(plan.program.name), ranks=plan.world, parts=list(parts_of(plan, cluster)), plan=str(path),
        grace=GRACE_S, gpus=job.gpus, time=job.time, partition=job.partition, account=job.account)


def parts_of(plan: Plan, cluster: Cluster) -> Iterator[Part]:
    """The ranks on each kind of node, in their order: each kind begins on a node of its own."""
    each = {machine.name: machine.devices_per_node for machine in cluster.machines}
    firsts: dict[str, int] = {}
    for group in sorted(plan.groups, key=lambda g: g.first):
        firsts.setdefault(group.pool, group.first)
    firsts = firsts or {"": 0}  # a plan without groups has all of its models, or none, on all ranks
    starts = [0, *list(firsts.values())[1:], plan.world]
    for pool, first, stop in zip(firsts, starts, starts[1:]):
        most = plan.world if cluster.is_local else each.get(pool, cluster.devices_per_node)
        per_node = min(stop - first, most)
        yield Part(stop - first, -(-(stop - first) // per_node), per_node, _word(pool))


def _word(name: str) -> str:
    """A name that a script may hold."""
    return re.sub(r"[^\w.-]", "-", name)
