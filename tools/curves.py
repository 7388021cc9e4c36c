"""Draws the training curves of the README: success on held-out prompts over steps, one line a seed.

    python tools/curves.py runs/ppo-0 runs/ppo-1 runs/grpo-0 ... -o docs/images/curves.png

A run's name up to its last dash is the program; runs of one program share a panel.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

METRIC = "eval/success"


def curve(run: Path) -> tuple[list[int], list[float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [(row["iteration"], row["metrics"][METRIC]) for row in rows if METRIC in row["metrics"]]
    return [x for x, _ in points], [y for _, y in points]


def draw(runs: list[Path], output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    programs = list(dict.fromkeys(run.name.rsplit("-", 1)[0] for run in runs))
    figure, panels = pyplot.subplots(1, len(programs), figsize=(4.5 * len(programs), 3), sharey=True, squeeze=False)
    for panel, program in zip(panels[0], programs):
        mine = [run for run in runs if run.name.rsplit("-", 1)[0] == program]
        for run in mine:
            panel.plot(*curve(run), marker="o", markersize=3, label=f"seed {run.name.rsplit('-', 1)[1]}")
        panel.set_title(program)
        panel.set_xlabel("step")
        panel.set_ylim(0, 1)
        panel.grid(alpha=0.3)
        panel.legend(loc="lower right")
    panels[0][0].set_ylabel("greedy success on 512 held-out sums")
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/images/curves.png"))
    args = parser.parse_args()
    draw(args.runs, args.output)


if __name__ == "__main__":
    main()
