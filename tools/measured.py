"""Published measurements beside what the cost model and the search say of them; `validate` writes the report."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Optional

from compiler.catalog import model_shape
from compiler.cluster_file import read_cluster
from compiler.cost import generation, training, transition
from compiler.cost.layouts import Degrees
from compiler.cost.sizes import sizes_of
from compiler.cost.workload import GENERATE, Asked, Call, Workload, ppo
from compiler.machine import Machine
from compiler.search import search
from compiler.search.fronts import Fronts
from compiler.search.given import stages_of_groups, symmetric
from compiler.search.thinning import Near

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "validation"
REAL, A100 = DATA / "real-h100.toml", ROOT / "programs" / "clusters" / "a100-16x8.toml"
MODELS = {7: "llama-2-7b", 13: "llama-2-13b", 34: "codellama-34b", 70: "llama-2-70b"}
HEURISTIC_TP = 8
WON = 0.03
FINE = Near(0.002, 0.004, 0.01)  # a fifth of what a search takes for equal: margins are near WON


def machine(path: Path, devices: int) -> Machine:
    """The machine of a cluster file with as many of its nodes as `devices` fill."""
    (one,) = read_cluster(path).machines
    return dataclasses.replace(one, nodes=devices // one.devices_per_node)


def rows(name: str) -> Any:
    return json.loads((DATA / name).read_text())


# ---- iteration times -----------------------------------------------------------------------------

class Row(NamedTuple):
    """Seconds, measured and estimated, of the symmetric plan and of the searched one."""

    name: str
    devices: int
    degrees: Degrees
    heuristic: tuple[float, float]
    searched: tuple[float, float]
    groups: str

    @property
    def errors(self) -> tuple[float, float]:
        return tuple(estimate / measured - 1 for measured, estimate in (self.heuristic, self.searched))

    @property
    def ratios(self) -> tuple[float, float]:
        """searched / heuristic, measured and estimated."""
        return tuple(self.searched[i] / self.heuristic[i] for i in (0, 1))

    @property
    def ratio_holds(self) -> bool:
        measured, estimate = self.ratios
        return abs(estimate / measured - 1) <= 0.25


def real_rows() -> Iterator[Row]:
    for row in rows("real.json")["rows"]:
        one = machine(REAL, row["gpus"])
        shapes = {name: model_shape(MODELS[size]) for name, size in row["sizes_b"].items()}
        workload = ppo(shapes, row["batch"], row["prompt"], row["response"], minibatches=4, recompute_logprobs=False)
        degrees, seconds = symmetric(workload, one, HEURISTIC_TP)
        found = search(workload, (one,), keep=1)
        measured = row["iteration_s"]
        sizes = "+".join(str(row["sizes_b"][name]) for name in ("actor", "critic"))
        yield Row(f"{sizes}, {row['prompt']}+{row['response']}", row["gpus"], degrees,
                  (measured["megatron_heuristic"], sum(seconds)), (measured["real"], found.iteration_s),
                  groups_text(found))


def groups_text(found) -> str:
    return " \\| ".join(f"{', '.join(m.model for m in g.models)}: {g.devices}" for g in found.groups)


class Summary(NamedTuple):
    median: float
    worst: float
    ratios: int


def summary(found: list[Row]) -> Summary:
    errors = [abs(e) for row in found for e in row.errors]
    return Summary(statistics.median(errors), max(errors), sum(row.ratio_holds for row in found))


# ---- placements ----------------------------------------------------------------------------------

A, R, C, W = "actor", "ref", "critic", "reward"
SIZES = {"13B x4": (13,) * 4, "34B x4": (34,) * 4, "13B actor and ref, 70B critic and reward": (13, 13, 70, 70)}


class Winner(NamedTuple):
    """stages: seconds of the placement that won where it was measured, None where it does not fit; best: of our own"""

    models: str
    devices: int
    placement: str
    stages: Optional[tuple[float, ...]]
    best: tuple[float, ...]
    groups: str

    @property
    def margin(self) -> float:
        return math.inf if self.stages is None else sum(self.stages) / sum(self.best) - 1

    @property
    def won(self) -> bool:
        return self.margin <= WON


def winners() -> Iterator[Winner]:
    for row in rows("hybridflow.json")["best_placement"]:
        for devices in row["gpus"]:
            yield winner(row["models"], devices, row["best"], machine(A100, devices))


def winner(models: str, devices: int, words: str, one: Machine, published: bool = False) -> Winner:
    """published: trained models have the layouts of `PUBLISHED`"""
    workload = hybridflow_workload(models, published)
    fronts = Fronts(workload, (one,), FINE)
    found = search(workload, (one,), keep=1, fronts=fronts)
    stages = stages_of_groups(fronts, placement(words, devices))
    return Winner(models, devices, words, stages, found.stages, groups_text(found))


# What HybridFlow trains in where it says so (section 8.4), as far as it divides the devices of every row.
PUBLISHED = {13: Asked(tp=8, pp=1), 70: Asked(tp=8, pp=8)}


def hybridflow_workload(models: str, published: bool = False) -> Workload:
    sizes = dict(zip((A, R, C, W), SIZES[models]))
    workload = ppo({name: model_shape(MODELS[size]) for name, size in sizes.items()}, 1024, 1024, 1024, minibatches=8)
    if not published:
        return workload
    bound = (dataclasses.replace(m, asked=PUBLISHED.get(sizes[m.name], Asked())) if m.trained else m
             for m in workload.models)
    return dataclasses.replace(workload, models=tuple(bound))


class Sensitivity(NamedTuple):
    """Margins of a row under other constants. matmul, links: shares of peaks; published: as in `winner`"""

    matmul: float
    links: float
    published: bool
    margins: tuple[float, ...]


def sensitivities(lost: list[Winner]) -> Iterator[Sensitivity]:
    for published in (False, True):
        for matmul, links in ((0.5, 0.8), (0.3, 0.8), (0.7, 0.8), (0.5, 0.4), (0.5, 0.2)):
            margins = []
            for row in lost:
                one = machine(A100, row.devices)
                reached = dataclasses.replace(one.reached, matmul=matmul, links=links)
                one = dataclasses.replace(one, reached=reached)
                margins.append(winner(row.models, row.devices, row.placement, one, published).margin)
            yield Sensitivity(matmul, links, published, tuple(margins))


def placement(words: str, devices: int) -> dict[tuple[str, ...], int]:
    """The groups that the data means."""
    if words == "colocate all":
        return {(A, R, C, W): devices}
    if words.startswith("split"):
        return {(A, R): devices // 2, (C, W): devices // 2}
    if words.startswith("standalone"):
        return {(A,): 64, (C,): 32, (R,): 16, (W,): 16}
    return {(A, R, W): 64, (C,): 64}


# ---- scaling -------------------------------------------------------------------------------------

class Scaling(NamedTuple):
    """Seconds of an iteration on `least` devices, on which the model fits there, and on 128."""

    model: str
    least: int
    seconds: tuple[float, float]

    @property
    def efficiency(self) -> float:
        return self.seconds[0] / self.seconds[1] * self.least / 128


def scalings() -> Iterator[Scaling]:
    for size, least in ((7, 8), (13, 16), (34, 32), (70, 64)):
        shapes = dict.fromkeys((A, R, C, W), model_shape(MODELS[size]))
        workload = ppo(shapes, 1024, 1024, 1024, minibatches=8)
        seconds = tuple(search(workload, (machine(A100, n),), keep=1).iteration_s for n in (least, 128))
        yield Scaling(f"{size}B", least, seconds)


# ---- generation and transition -------------------------------------------------------------------

class Generation(NamedTuple):
    model: str
    measured_tp: int
    measured_gain: float
    seconds: dict[int, float]

    @property
    def tp(self) -> int:
        return min(self.seconds, key=self.seconds.get)

    @property
    def gain(self) -> float:
        return self.seconds[self.tp] / self.seconds[8] - 1


def generations() -> Iterator[Generation]:
    for row in rows("hybridflow.json")["generation_tp"]:
        pp, tp, dp = row["train"]
        one = machine(A100, row["gpus"])
        sizes = sizes_of(model_shape(MODELS[int(row["model"][:-1])]), "policy")
        train, call = Degrees(tp, pp, dp), Call("actor", GENERATE, 1024, 1024, 1024)
        layouts = {g: Degrees(g, 1, row["gpus"] // g) for g in (1, 2, 4, 8)}
        seconds = {g: generation_seconds(one, sizes, train, layout, call) for g, layout in layouts.items()}
        yield Generation(row["model"], row["best_tp"], row["latency_vs_tp8"], seconds)


def generation_seconds(one: Machine, sizes, train: Degrees, degrees: Degrees, call: Call) -> float:
    """Transition and generation with the fullest cache beside the actor's training state."""
    resident = transition.generation_weight_bytes(one, sizes, train, degrees) + sum(
        kept(one, sizes, train) for kept in (training.weight_bytes, training.gradient_bytes, training.state_bytes))
    each = generation.cache_bytes(one, sizes, degrees, call, 1)
    most = min(int((one.usable - resident) // each), call.rows // degrees.dp)
    waves = math.ceil(call.rows / degrees.dp / most)
    times = generation.generate_time(one, sizes, degrees, call, math.ceil(call.rows / degrees.dp / waves))
    return times.total + transition.transition_time(one, sizes, train, degrees)


def transitions() -> Iterator[tuple[str, float, float]]:
    """(setting, bytes a device receives, those of HybridFlow's formula)."""
    for row in rows("hybridflow.json")["transition_settings"]:
        sizes = sizes_of(model_shape(MODELS[int(row["model"][:-1])]), "policy")
        (pp, tp), (gen_pp, gen_tp) = row["train_pt"], row["gen_pt"]
        micro = pp * tp // (gen_pp * gen_tp)
        formula = (micro - 1) / (tp * pp) * 2 * sizes.parameters
        got = transition.transition_bytes(sizes, Degrees(tp, pp, 1), Degrees(gen_tp, gen_pp, micro))
        yield f"{row['model']}, tp{tp} pp{pp} to tp{gen_tp} pp{gen_pp}", got, formula
