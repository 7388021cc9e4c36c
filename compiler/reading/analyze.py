"""`rlflowc explain --analyze RUN`: what the steps of a run took, beside what was estimated."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterator, Optional

from compiler.cluster import Cluster
from compiler.cost import CostModel, iteration_seconds
from compiler.plan import Plan
from compiler.proof.verify import load_plan
from compiler.reading.tables import ITERATION, SETUP, rows_of
from compiler.reading.units import plural, seconds_text
from rlhf_dsl.diagnostics import fault

LENGTHS = ("prompt", "response", "longest")  # tokens, as `assume:` has them
SMALLEST = 1e-5  # s; what is estimated to take less is not compared
WIDTHS = (48, 12, 12, 9, 8)  # step, estimate, measured, ratio, share


@dataclass(frozen=True)
class Measured:
    """A step of a section, all its times together, in s; measured: the median, None where a run never came to it."""

    section: str
    title: str
    estimate: float
    measured: Optional[float]
    least: Optional[float] = None
    most: Optional[float] = None


@dataclass(frozen=True)
class Analysis:
    """iterations: how many were measured; seconds: the median of a whole iteration, without evaluations.

    lengths: tokens of a prompt, of a response and of the longest, on average over the iterations; estimates are for these
    """

    plan: Plan
    cluster: Cluster
    iterations: int
    seconds: float
    estimate: float
    steps: tuple[Measured, ...]
    lengths: dict[str, float]


def analyze(folder: Path, cluster: Cluster) -> Analysis:
    """Raises DiagnosticError P0303 where nothing was measured, and as `load_plan`."""
    if not (folder / "plan.json").is_file():
        raise fault("P0303", place=str(folder), reason="it is not the folder of a run")
    plan = load_plan(folder / "plan.json")
    lines = list(_lines(folder))
    iterations = [line for line in lines if line["iteration"] > 0]
    counted = iterations[1:] or iterations  # the first warms up
    if not counted:
        raise fault("P0303", place=str(folder), reason="no iteration was finished")
    lengths = _lengths(counted)
    costs = CostModel(replace(plan, assume={**plan.assume, **lengths}), cluster)
    steps = tuple(_steps(plan, costs, counted, lines))
    evals = [sum(sum(steps.values()) for steps in line.get("evals", {}).values()) for line in counted]
    outside = [line["seconds"] - spent for line, spent in zip(counted, evals)]
    return Analysis(plan, cluster, len(counted), statistics.median(outside), iteration_seconds(costs), steps, lengths)


def _lengths(iterations: list[dict]) -> dict[str, float]:
    """Means over the iterations that tell their samples' lengths."""
    told = [line["lengths"] for line in iterations if line.get("lengths")]
    return {name: statistics.fmean(each[name] for each in told) for name in LENGTHS} if told else {}


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of the run's trace; a last one that was cut by a crash is left out."""
    try:
        text = (folder / "trace.jsonl").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise fault("P0303", place=str(folder), reason="it has no `trace.jsonl`") from None
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            return
        if not _is_line(value):
            raise fault("P0303", place=str(folder), reason="its `trace.jsonl` is not one of a run")
        yield value


def _is_line(value: Any) -> bool:
    if not isinstance(value, dict) or not all(_is_number(value.get(key)) for key in ("iteration", "seconds")):
        return False
    evals = value.get("evals", {})
    lengths = value.get("lengths", {})
    if not isinstance(lengths, dict) or lengths and not all(_is_number(lengths.get(name)) for name in LENGTHS):
        return False
    sections = [value.get("steps"), *(evals.values() if isinstance(evals, dict) else [None])]
    return all(isinstance(steps, dict) and all(map(_is_number, steps.values())) for steps in sections)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _steps(plan: Plan, costs: CostModel, iterations: list[dict], lines: list[dict]) -> Iterator[Measured]:
    """One for each title of a section, in the plan's order."""
    estimates: dict[tuple[str, str], float] = {}
    for row in (row for row in rows_of(plan) if row.section != SETUP):
        key = row.section, row.title
        estimates[key] = estimates.get(key, 0.0) + row.times * costs.seconds(row.step, row.part)
    for (section, title), estimate in estimates.items():
        sources = iterations if section == ITERATION else lines
        found = [taken[title] for line in sources if title in (taken := _taken(line, section))]
        spread = (statistics.median(found), min(found), max(found)) if found else (None, None, None)
        yield Measured(section, title, estimate, *spread)


def _taken(line: dict, section: str) -> dict[str, float]:
    return line["steps"] if section == ITERATION else line.get("evals", {}).get(section, {})


# ---- text and JSON -------------------------------------------------------------------------------

def analysis_text(found: Analysis) -> str:
    return "\n".join(_text(found)) + "\n"


def _text(found: Analysis) -> Iterator[str]:
    yield (f"{found.plan.program.name} on {plural(found.plan.world, 'rank')}: {seconds_text(found.seconds)} an iteration, "
           f"estimated {seconds_text(found.estimate)}, {_ratio(found.seconds, found.estimate)}")
    yield (f"the median of {plural(found.iterations, 'iteration')}; of each step the time of the rank that took longest, "
           "waiting for others included")
    if found.lengths:
        prompt, response, longest = (f"{found.lengths[name]:.3g}" for name in LENGTHS)
        yield f"estimated for the lengths that it had: {prompt} tokens a prompt, {response} a response, {longest} the longest"
    yield ""
    heads = ("step", "estimate", "measured", "ratio", "share")
    yield heads[0].ljust(WIDTHS[0]) + "".join(head.rjust(width) for head, width in zip(heads[1:], WIDTHS[1:]))
    section = ""
    for step in found.steps:
        if step.section != section:
            section = step.section
            yield "each iteration" if section == ITERATION else f"{section}, each time"
        yield _row(step, found)
    if found.plan.cluster != found.cluster.digest:
        yield ""
        yield f"estimated for {found.cluster.name}; the plan was made for another cluster (`--cluster`)"


def _row(step: Measured, found: Analysis) -> str:
    left = f"  {step.title}"
    if len(left) >= WIDTHS[0]:
        left += "\n" + " " * WIDTHS[0]
    measured = "-" if step.measured is None else seconds_text(step.measured)
    share = f"{step.measured / found.seconds:.1%}" if step.section == ITERATION and step.measured and found.seconds else ""
    cells = (seconds_text(step.estimate), measured, _ratio(step.measured, step.estimate), share)
    return (left.ljust(WIDTHS[0]) + "".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS[1:]))).rstrip()


def _ratio(measured: Optional[float], estimate: float) -> str:
    """`x 1.3`: measured over estimated, where the estimate is more than nothing."""
    return f"x {measured / estimate:.3g}" if measured and estimate > SMALLEST else ""


def analysis_json(found: Analysis) -> dict[str, Any]:
    return {
        "format": "rlflow.analysis/1", "program": found.plan.program.name, "plan": found.plan.digest,
        "iterations": found.iterations, "lengths": found.lengths, "iteration": _pair(found.estimate, found.seconds),
        "steps": [{"section": s.section, "value": s.title, **_pair(s.estimate, s.measured), "least_s": s.least, "most_s": s.most}
                  for s in found.steps],
    }


def _pair(estimate: float, measured: Optional[float]) -> dict[str, Optional[float]]:
    ratio = measured / estimate if measured is not None and estimate else None
    return {"estimate_s": estimate, "measured_s": measured, "ratio": ratio}
