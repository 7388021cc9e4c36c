"""Every plan that is written for a described cluster is proved and fits: random programs, clusters, constraints."""

from __future__ import annotations

import dataclasses
import random

import pytest

from compiler.cluster import Cluster
from compiler.cluster_file import read_cluster
from compiler.compile import compile_program
from compiler.plan import Plan
from compiler.proof.fits import fit_faults
from compiler.proof.verify import faults
from compiler.search.placement import OBJECTIVES
from compiler.search.program import Searched
from rlhf_dsl.diagnostics import DiagnosticError
from rlhf_dsl.frontend import load, loads
from rlhf_dsl.typed import Checked
from tests.compiling import PROGRAMS

NAMES = sorted(path.stem for path in PROGRAMS.glob("*.rlflow"))
MODELS = ("llama-3.2-1b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen3-0.6b", "llama-2-7b")
CLUSTERS = [read_cluster(PROGRAMS / "clusters" / f"{name}.toml") for name in ("a100-1x8", "mixed")]
MACHINES = [machine for cluster in CLUSTERS for machine in cluster.machines]
BLOCKS, EACH = 6, 12


def random_cluster(draw: random.Random) -> Cluster:
    """One or two kinds of nodes, some with few devices or little memory."""
    def machine(name: str):
        return dataclasses.replace(draw.choice(MACHINES), name=name, nodes=draw.choice((1, 1, 2, 3)),
                                   devices_per_node=draw.choice((1, 2, 3, 4, 6, 8)),
                                   memory=draw.choice((12e9, 24e9, 80e9)))

    return Cluster("random", tuple(machine(name) for name in ("one", "other")[:draw.choice((1, 1, 2))]))


def random_program(draw: random.Random) -> Checked:
    """A shipped program with larger models and, mostly, constraints of which many cannot be met."""
    name = draw.choice(NAMES)
    overrides = {"base": f"catalog:{draw.choice(MODELS)}"}
    path = PROGRAMS / f"{name}.rlflow"
    models = list(load(path, overrides).models)
    lines = [f"    {line}" for line in random_constraints(draw, models)]
    text = path.read_text() + ("\nplan:\n" + "\n".join(lines) + "\n" if lines else "")
    return loads(text, overrides, str(path))


def random_constraints(draw: random.Random, models: list[str]) -> list[str]:
    items = (lambda: f"devices({draw.choice((1, 2, 4, 8))})", lambda: f"parallel(tp={draw.choice((1, 2, 4))})",
             lambda: f"parallel(pp={draw.choice((1, 2))})", lambda: f"micro_batch({draw.choice((1, 3, 64))})",
             lambda: f"tokens({draw.choice((64, 4096))})", lambda: f"colocate({draw.choice(models)})")
    chosen = draw.sample(models, draw.randint(0, min(2, len(models))))
    found = [(model, draw.choice(items)()) for model in chosen]
    return [f"{model}: {item}" for model, item in found if item != f"colocate({model})"]


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_plan_is_proved_and_fits(block):
    """Or else there is none, and a diagnostic of planning says so."""
    made = 0
    for seed in range(EACH * block, EACH * (block + 1)):
        draw = random.Random(seed)
        checked, cluster = random_program(draw), random_cluster(draw)
        ranks = draw.choice((None, None, cluster.devices))
        try:
            plan = compile_program(checked, cluster, ranks, placer=Searched(draw.choice(OBJECTIVES)))
        except DiagnosticError as error:
            assert all(d.code.startswith("P01") for d in error.diagnostics), (seed, str(error))
            continue
        made += 1
        assert list(faults(plan)) == [] and list(fit_faults(plan, cluster)) == [], seed
        assert Plan.from_json(plan.to_json()) == plan, seed
        assert plan.world == (ranks or plan.world) <= cluster.devices, seed
    assert made >= EACH // 4
