"""Compares estimates and search with published measurements and writes docs/validation.md.

    python tools/validate.py            # writes the report
    python tools/validate.py --print    # prints it
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from compiler.catalog import model_shape  # noqa: E402
from compiler.cluster_file import read_cluster  # noqa: E402
from compiler.cost import generation, training  # noqa: E402
from compiler.cost.layouts import Degrees  # noqa: E402
from compiler.cost.sizes import sizes_of  # noqa: E402
from compiler.cost.workload import GENERATE, Call, Workload, ppo  # noqa: E402
from compiler.machine import Machine  # noqa: E402
from compiler.search import search  # noqa: E402
from compiler.search.fronts import Fronts  # noqa: E402
from compiler.search.given import seconds_of_groups, symmetric  # noqa: E402

DATA = ROOT / "tests" / "validation"
REPORT = ROOT / "docs" / "validation.md"
MODELS = {7: "llama-2-7b", 13: "llama-2-13b", 34: "codellama-34b", 70: "llama-2-70b"}
HEURISTIC_TP = 8
WON = 0.03


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
        one = machine(DATA / "real-h100.toml", row["gpus"])
        shapes = {name: model_shape(MODELS[size]) for name, size in row["sizes_b"].items()}
        workload = ppo(shapes, row["batch"], row["prompt"], row["response"], minibatches=4, recompute_logprobs=False)
        degrees, seconds = symmetric(workload, one, HEURISTIC_TP)
        found = search(workload, (one,), keep=1)
        measured = row["iteration_s"]
        sizes = "+".join(str(row["sizes_b"][name]) for name in ("actor", "critic"))
        yield Row(f"{sizes}, {row['prompt']}+{row['response']}", row["gpus"], degrees,
                  (measured["megatron_heuristic"], sum(seconds)), (measured["real"], found.iteration_s), _groups(found))


def _groups(found) -> str:
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
    """seconds: of the placement that won where it was measured; best: of our search; None where it does not fit."""

    models: str
    devices: int
    placement: str
    seconds: Optional[float]
    best: float
    groups: str

    @property
    def margin(self) -> float:
        return math.inf if self.seconds is None else self.seconds / self.best - 1

    @property
    def won(self) -> bool:
        return self.margin <= WON


def winners() -> Iterator[Winner]:
    for row in rows("hybridflow.json")["best_placement"]:
        for devices in row["gpus"]:
            one = machine(ROOT / "programs" / "clusters" / "a100-16x8.toml", devices)
            workload = hybridflow_workload(row["models"])
            fronts = Fronts(workload, (one,))
            found = search(workload, (one,), keep=1, fronts=fronts)
            seconds = seconds_of_groups(fronts, placement(row["best"], devices))
            yield Winner(row["models"], devices, row["best"], seconds, found.iteration_s, _groups(found))


def hybridflow_workload(models: str) -> Workload:
    shapes = {name: model_shape(MODELS[size]) for name, size in zip((A, R, C, W), SIZES[models])}
    return ppo(shapes, 1024, 1024, 1024, minibatches=8)


def placement(words: str, devices: int) -> dict[tuple[str, ...], int]:
    """The groups that the data means."""
    if words == "colocate all":
        return {(A, R, C, W): devices}
    if words.startswith("split"):
        return {(A, R): devices // 2, (C, W): devices // 2}
    if words.startswith("standalone"):
        return {(A,): 64, (C,): 32, (R,): 16, (W,): 16}
    return {(A, R, W): 64, (C,): 64}


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
        one = machine(ROOT / "programs" / "clusters" / "a100-16x8.toml", row["gpus"])
        sizes = sizes_of(model_shape(MODELS[int(row["model"][:-1])]), "policy")
        train, call = Degrees(tp, pp, dp), Call("actor", GENERATE, 1024, 1024, 1024)
        layouts = {g: Degrees(g, 1, row["gpus"] // g) for g in (1, 2, 4, 8)}
        seconds = {g: generation_seconds(one, sizes, train, layout, call) for g, layout in layouts.items()}
        yield Generation(row["model"], row["best_tp"], row["latency_vs_tp8"], seconds)


def generation_seconds(one: Machine, sizes, train: Degrees, degrees: Degrees, call: Call) -> float:
    """Transition and generation with the fullest cache beside the actor's training state."""
    resident = generation.generation_weight_bytes(one, sizes, train, degrees) + sum(
        kept(one, sizes, train) for kept in (training.weight_bytes, training.gradient_bytes, training.state_bytes))
    each = generation.cache_bytes(one, sizes, degrees, call, 1)
    most = min(int((one.usable - resident) // each), call.rows // degrees.dp)
    waves = math.ceil(call.rows / degrees.dp / most)
    times = generation.generate_time(one, sizes, degrees, call, math.ceil(call.rows / degrees.dp / waves))
    return times.total + generation.transition_time(one, sizes, train, degrees)


def transitions() -> Iterator[tuple[str, float, float]]:
    """(setting, bytes a device receives, those of HybridFlow's formula)."""
    for row in rows("hybridflow.json")["transition_settings"]:
        sizes = sizes_of(model_shape(MODELS[int(row["model"][:-1])]), "policy")
        (pp, tp), (gen_pp, gen_tp) = row["train_pt"], row["gen_pt"]
        micro = pp * tp // (gen_pp * gen_tp)
        formula = (micro - 1) / (tp * pp) * 2 * sizes.parameters
        got = generation.transition_bytes(sizes, Degrees(tp, pp, 1), Degrees(gen_tp, gen_pp, micro))
        yield f"{row['model']}, tp{tp} pp{pp} to tp{gen_tp} pp{gen_pp}", got, formula


# ---- report --------------------------------------------------------------------------------------

def report(real: list[Row], won: list[Winner]) -> str:
    return "\n".join([*_head(), *_real(real), *_winners(won), *_generation(), *_transition(), *_constants()]) + "\n"


def _head() -> list[str]:
    return ["# Validation", "",
            "Estimates and placements beside published measurements. `python tools/validate.py` writes this page; the",
            "data and its sources are in `tests/validation`. None of this ran on a GPU for this page.", ""]


def _real(found: list[Row]) -> list[str]:
    total = summary(found)
    lines = ["## Iteration times of ReaL", "",
             "Synchronous PPO on H100 (arXiv 2406.14088): models as billions of parameters of actor and critic, tokens",
             "of prompt and response. *Symmetric* is tp 8 inside a node, the least pp that fits, the rest dp, for",
             "every call. *Searched* is ReaL's own search there, and the search of this project here.", "",
             "| models, tokens | devices | symmetric plan | measured s | estimate s | error | searched: measured s "
             "| estimate s | error | ratio measured | ratio here | placement found |",
             "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
    for r in found:
        (hm, he), (sm, se), (herr, serr), (rm, re) = r.heuristic, r.searched, r.errors, r.ratios
        lines.append(f"| {r.name} | {r.devices} | {r.degrees} | {hm:g} | {he:.1f} | {herr:+.0%} | {sm:g} | {se:.1f} "
                     f"| {serr:+.0%} | {rm:.2f} | {re:.2f} | {r.groups} |")
    alone = [abs(r.errors[0]) for r in found]
    return [*lines, "",
            f"Absolute error over all {2 * len(found)} times: median {total.median:.1%}, worst {total.worst:.1%}; "
            f"of the symmetric plans alone: median {statistics.median(alone):.1%}, worst {max(alone):.1%}.",
            f"The ratio searched / symmetric is within 25 % of the measured one in {total.ratios} of {len(found)}.",
            "", "What is searched is estimated too low on the whole: ReaL's plans come from a stochastic search, those",
            "here are the best of the model, and what the model does not know is not in their price.", ""]


def _winners(found: list[Winner]) -> list[str]:
    lines = ["## Placements of HybridFlow", "",
             "PPO on A100 (arXiv 2409.19256, section 8.3). The margin says by how much the placement that was fastest",
             f"there is slower here than the best that the search finds; within {WON:.0%} it counts as won.", "",
             "| models | devices | fastest there | estimate s | best here s | margin | won | placement found |",
             "| --- | ---: | --- | ---: | ---: | ---: | --- | --- |"]
    for w in found:
        seconds = "does not fit" if w.seconds is None else f"{w.seconds:.1f}"
        words = w.placement.replace("|", "\\|")
        lines.append(f"| {w.models} | {w.devices} | {words} | {seconds} | {w.best:.1f} | {w.margin:+.1%} "
                     f"| {'yes' if w.won else 'no'} | {w.groups} |")
    return [*lines, "", f"{sum(w.won for w in found)} of {len(found)} are won.", ""]


def _generation() -> list[str]:
    lines = ["## Tensor parallelism of generation", "",
             "16 A100, trained with tp 8, pp 1, dp 2, the training state on the device; seconds of transition and",
             "generation (HybridFlow, section 8.4).", "",
             "| model | tp 1 | tp 2 | tp 4 | tp 8 | best here | best there | best against tp 8, here | there |",
             "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for g in generations():
        cells = " | ".join(f"{g.seconds[tp]:.1f}" for tp in (1, 2, 4, 8))
        lines.append(f"| {g.model} | {cells} | {g.tp} | {g.measured_tp} | {g.gain:+.0%} | {g.measured_gain:+.0%} |")
    return [*lines, ""]


def _transition() -> list[str]:
    lines = ["## Bytes of the transition", "", "Received by each device on the way from training to generation.", "",
             "| setting | here GB | (d_g - 1) / (t p) M, GB |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {got / 1e9:.3f} | {formula / 1e9:.3f} |" for name, got, formula in transitions()]
    return [*lines, ""]


_UNITS = (
    ("flops", "TFLOP/s", 1e12), ("memory", "GB", 1e9), ("memory_bandwidth", "GB/s", 1e9),
    ("intra", "GB/s of a device inside its node", 1e9), ("node", "GB/s of a node", 1e9),
    ("host", "GB/s to the host", 1e9), ("intra_latency", "us", 1e-6), ("inter_latency", "us", 1e-6),
)
_SOFTWARE = (*(("reached", name, "") for name in ("matmul", "memory_bandwidth", "links", "memory")),
             *(("engine", name, ", s") for name in ("layer", "collective", "call")),
             *(("storage", name, ", bytes") for name in ("weight", "gradient", "states")))


def _constants() -> list[str]:
    lines = ["## Constants", "",
             "All rows of a source share them. Peaks and links are those of data sheets. The host's part and the",
             "shares of peaks are properties of the software that was measured. Neither source reports them: those of",
             "ReaL were chosen in round numbers by looking at the 32 times above (`matmul`, `memory`, `layer`,",
             "`collective`, `call`), those of HybridFlow by looking at its winners (`call`). So the errors above are",
             "those of five numbers fitted to 32, not of a prediction.", "",
             "| constant | ReaL, H100 | HybridFlow, A100 |", "| --- | ---: | ---: |"]
    both = [machine(p, 128) for p in (DATA / "real-h100.toml", ROOT / "programs" / "clusters" / "a100-16x8.toml")]
    for name, unit, scale in _UNITS:
        lines.append(f"| {name}, {unit} | " + " | ".join(f"{getattr(m, name) / scale:g}" for m in both) + " |")
    for part, name, unit in _SOFTWARE:
        cells = " | ".join(f"{getattr(getattr(m, part), name):g}" for m in both)
        lines.append(f"| {part}.{name}{unit} | {cells} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="print the report instead of writing it")
    text = report(list(real_rows()), list(winners()))
    if parser.parse_args().print:
        print(text, end="")
    else:
        REPORT.write_text(text)


if __name__ == "__main__":
    main()
