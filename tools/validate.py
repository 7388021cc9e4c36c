"""Compares estimates and search with published measurements and writes docs/validation.md.

    python tools/validate.py            # writes the report
    python tools/validate.py --print    # prints it
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from measured import (  # noqa: E402
    A100, REAL, WON, Row, Winner, generations, machine, real_rows, rows, scalings, sensitivities, summary, transitions,
    winners,
)

REPORT = ROOT / "docs" / "validation.md"


# ---- report --------------------------------------------------------------------------------------

def report(real: list[Row], won: list[Winner]) -> str:
    return "\n".join([*_head(), *_real(real), *_winners(won), *_lost(won), *_scaling(),
                      *_generation(), *_transition(), *_constants()]) + "\n"


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
             f"there is slower here than the best that the search finds; within {WON:.0%} it counts as won.",
             "Two of the rows that are won are near that: with `call` at 0.6 s in place of 0.5, 34B on 64 devices is",
             "at 3.05% and lost.", "",
             "| models | devices | fastest there | estimate s | best here s | margin | won | placement found |",
             "| --- | ---: | --- | ---: | ---: | ---: | --- | --- |"]
    for w in found:
        seconds = "does not fit" if w.stages is None else f"{sum(w.stages):.1f}"
        words = w.placement.replace("|", "\\|")
        lines.append(f"| {w.models} | {w.devices} | {words} | {seconds} | {sum(w.best):.1f} | {w.margin:+.1%} "
                     f"| {'yes' if w.won else 'no'} | {w.groups} |")
    return [*lines, "", f"{sum(w.won for w in found)} of {len(found)} are won.", ""]


def _lost(found: list[Winner]) -> list[str]:
    lost = [w for w in found if not w.won]
    beside = next(w for w in found if (w.models, w.devices) == ("13B x4", 64))
    lines = ["## What is lost", "",
             "Seconds of generation, scoring and training of the placement that was fastest there, and of the best",
             "here.", "", "| models | devices | placement | generation | scoring | training |",
             "| --- | ---: | --- | ---: | ---: | ---: |"]
    for w in lost:
        for words, stages in ((w.placement.replace("|", "\\|"), w.stages), (w.groups, w.best)):
            lines.append(f"| {w.models} | {w.devices} | {words} | " + " | ".join(f"{t:.1f}" for t in stages) + " |")
    lines += ["", *_WHY_LOST, "",
              "Margins under other constants, and with the layouts of training that are published (13B tp8 pp1, 70B",
              "tp8 pp8) instead of the best:", "",
              "| layouts of training | share of FLOP/s | share of links | "
              + " | ".join(f"{w.models}, {w.devices}" for w in (*lost, beside)) + " |",
              "| --- | ---: | ---: |" + " ---: |" * (len(lost) + 1)]
    for s in sensitivities([*lost, beside]):
        cells = " | ".join(f"{m:+.1%}" for m in s.margins)
        lines.append(f"| {'published' if s.published else 'best'} | {s.matmul:g} | {s.links:g} | {cells} |")
    return [*lines, ""]


def _scaling() -> list[str]:
    found = list(scalings())
    there = rows("hybridflow.json")["shares"]["strong_scaling_efficiency_8_to_128"]
    lines = ["## Strong scaling", "",
             "Speed-up of the searched placement from the least number of devices to 128, over that of the devices. No",
             "constant was chosen by it.", "",
             "| model x4 | from devices | s there | s on 128 | efficiency |", "| --- | ---: | ---: | ---: | ---: |"]
    for s in found:
        lines.append(f"| {s.model} | {s.least} | {s.seconds[0]:.1f} | {s.seconds[1]:.1f} | {s.efficiency:.1%} |")
    mean = statistics.mean(s.efficiency for s in found)
    return [*lines, "",
            f"On average {mean:.1%}; HybridFlow measured {there:.1%}, an average over its models and algorithms.", ""]


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


_WHY_LOST = (
    "**Each model alone.** The 2.1 million tokens of scoring take ref, on 16 devices, 11 s at the full 312",
    "TFLOP/s and 22 s at the half that is assumed. On 64 devices that it shares with another model both take as",
    "long together. In training the critic's 32 devices have half the rate of 64; what they save in summing",
    "gradients, 3/4 instead of 7/8 of the bytes around a ring, is less than that. So at any efficiency that all",
    "calls share, halves are faster. The placement comes nearest where gradients are nearly all of training.",
    "",
    "**The 70B critic alone.** Its training is 8.8e17 FLOP: 88 s on 64 devices at half of peak. Actor and critic",
    "in turn on 128 take 52 s at the same efficiency, so the placement can only win if work on 128 devices loses",
    "two fifths of it. It does so for the actor in tp8 pp1 dp16, where summing gradients takes longer than",
    "computing them. The search is free to train it in tp4 pp8 dp4 instead, where little is summed. With the",
    "published layouts the row is nearly won, or won where links are slower. But the slower links are, the more",
    "is lost where 13B on 64 devices was fastest colocated (last column): no constants here have both.",
)
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
    both = [machine(path, 128) for path in (REAL, A100)]
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
