"""The page of a plan: numbers are brought into words and places here, the template says where they stand."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cached_property
from typing import Any, Iterator, Sequence

from compiler.cluster import Cluster
from compiler.cost import CostModel, Memory
from compiler.drawing.picture import picture
from compiler.groups import groups_of, layouts_of
from compiler.plan import GroupSpec, Plan
from compiler.reading.report import lanes
from compiler.reading.report.dataflow import dataflow_of
from compiler.reading.report.devices import cells_of, cut_of, where
from compiler.reading.moves import moving
from compiler.reading.searched import GOING_ON, goes_on, groups_text, runners_up, search_counts, size_lines, terms
from compiler.reading.tables import ITERATION, Row, Tables, layout_of, microbatches
from compiler.reading.units import bytes_text, degrees_text, plural, ranks_text, seconds_text, share_text
from compiler.steps import HOME, UpdateLoop
from compiler.templating import environment

WIDTH = 1000.0  # of timeline and bars, in the units of their pictures
CHARACTER = 6.6  # width of one in a block
COLOURS = 8  # of models, in turn


def report(plan: Plan, cluster: Cluster, program: Sequence[str]) -> str:
    """A page that needs nothing but itself. program: the lines of the source, or those that the plan has."""
    return environment(groupby_run=_runs).get_template("report.html.j2").render(_Page(plan, cluster, program).facts())


class _Page:
    def __init__(self, plan: Plan, cluster: Cluster, program: Sequence[str]) -> None:
        self.plan, self.cluster, self.program = plan, cluster, program
        self.costs, self.tables = CostModel(plan, cluster), Tables(plan)
        self.colour = {name: i % COLOURS for i, name in enumerate(plan.models)}

    @cached_property
    def lanes(self) -> lanes.Lanes:
        return lanes.lanes_of(self.plan, self.costs)

    def facts(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "name": plan.program.name, "cluster": "this machine" if self.cluster.is_local else f"cluster {self.cluster.name}",
            "ranks": plural(plan.world, "rank"), "digest": plan.digest[:12], "cards": list(self.cards()),
            "models": [{"name": name, "colour": colour} for name, colour in self.colour.items()],
            "timeline": self.timeline(), "stages": list(self.stages()),
            "cells": self.cells(), "groups": [self.group(i) for i in range(len(groups_of(plan)))],
            "memory": list(self.memory()), "parts": [f.name for f in dataclasses.fields(Memory)],
            "transfers": list(self.transfers()), "runners_up": list(self.runners_up()),
            "stage_names": self.stage_names, "searched": self.searched(),
            "picture": picture(dataflow_of(plan)), "steps": list(self.steps()), "lines": list(self.lines()),
            "assumed": f"prompts of {self.costs.prompt_tokens:g} tokens", "is_whole": bool(self.program),
        }

    def cards(self) -> Iterator[tuple[str, str, str]]:
        yield "an iteration", seconds_text(self.lanes.seconds), "estimated, from the first step to the end of the last"
        yield "ranks", str(self.plan.world), f"in {plural(len(groups_of(self.plan)), 'group')}"
        fullest = max(groups_of(self.plan), key=lambda g: self.costs.peak(g.members), default=None)
        if fullest is not None:
            yield self._memory_card(fullest)
        moved = sum(r.times * r.part * self.costs.moved(r.step).total for r in self._moves())
        yield "moved", bytes_text(moved), "between ranks in an iteration, weights and rows"

    def _memory_card(self, fullest: GroupSpec) -> tuple[str, str, str]:
        memory = self.costs.machine(fullest.members[0]).memory
        return ("memory", bytes_text(self.costs.peak(fullest.members)),
                f"on the fullest rank, of {bytes_text(memory)}: {', '.join(fullest.members)}")

    # ---- the timeline

    def timeline(self) -> dict[str, Any]:
        scale = WIDTH / self.lanes.seconds if self.lanes.seconds else 0.0
        groups = [(", ".join(g.members), ranks_text(range(g.first, g.last + 1))) for g in groups_of(self.plan)]
        return {
            "lanes": [{"models": models, "ranks": ranks, "busy": share_text(_busy(blocks), self.lanes.seconds),
                       "blocks": [self._block(b, scale) for b in blocks if b.end > b.start]}
                      for (models, ranks), blocks in zip(groups, self.lanes.groups)],
            "moving": [self._block(b, scale) for b in self.lanes.moving if b.end > b.start],
            "brackets": [{"title": b.title, "x": _px(b.start * scale), "width": _px((b.end - b.start) * scale)}
                         for b in self.lanes.brackets],
            "ticks": [{"x": _px(t * scale), "text": f"{t:g} s"} for t in self.lanes.ticks],
        }

    def _block(self, block: lanes.Block, scale: float) -> dict[str, Any]:
        width = (block.end - block.start) * scale
        return {"x": _px(block.start * scale), "width": _px(max(width, 0.75)), "tip": block.tip,
                "colour": self.colour.get(block.model, "home"), "text": _fitting(block, width)}

    def stages(self) -> Iterator[dict[str, str]]:
        for group, block in lanes.rows(self.lanes):
            if block.end - block.start >= self.lanes.seconds / 1000:
                yield {"title": block.title, "model": block.model, "colour": self.colour[block.model],
                       "ranks": self.group_ranks(group), "start": seconds_text(block.start), "end": seconds_text(block.end),
                       "seconds": seconds_text(block.end - block.start),
                       "share": share_text(block.end - block.start, self.lanes.seconds)}

    def group_ranks(self, number: int) -> str:
        group = groups_of(self.plan)[number]
        return ranks_text(range(group.first, group.last + 1)).split(" ", 1)[1]

    # ---- devices

    def cells(self) -> dict[str, Any]:
        found = cells_of(self.plan, self.cluster)
        size = max(cell.last - cell.first + 1 for cell in found)
        each = self.plan.world if self.cluster.is_local else self.cluster.devices_per_node
        nodes = _runs([{"cell": cell, "node": cell.first // each if size == 1 else 0} for cell in found], "node")
        return {"nodes": [[one["cell"] for one in run] for _, run in nodes],
                "each": "A square is a rank" if size == 1 else f"A square is {size} ranks"}

    def group(self, number: int) -> dict[str, Any]:
        group = groups_of(self.plan)[number]
        layouts = [name for member in group.members for name in layouts_of(self.plan, member)]
        return {"models": ", ".join(group.members), "where": where(self.plan, group, self.cluster),
                "layouts": [self._layout(name) for name in layouts]}

    def _layout(self, name: str) -> dict[str, Any]:
        spec, (model, _, stage) = self.plan.layouts[name], name.rpartition(".")
        lines = self.plan.constraints.get(name, ())
        why = f"line {', '.join(map(str, lines))}" if lines else "the search" if self.plan.search else "left open"
        return {"model": model, "stage": stage, "colour": self.colour[model], "degrees": degrees_text(spec),
                "cut": cut_of(spec), "why": why, "micro": ", ".join(microbatches(self.tables, name)).removeprefix("micro-batches of ") or "-",
                "offload": self.plan.models[model].offload}

    # ---- memory

    def memory(self) -> Iterator[dict[str, Any]]:
        """By group: a bar for each model, and what all hold at the fullest time."""
        groups = groups_of(self.plan)
        held = {m: self.costs.memory(m) for g in groups for m in g.members}
        peaks = [self.costs.peak(g.members) for g in groups]
        capacities = [self.costs.machine(g.members[0]).memory for g in groups]
        longest = max([*capacities, *(_stacked(m) for m in held.values()), *peaks], default=0.0) or 1.0
        scale = WIDTH / longest
        for number, group in enumerate(groups):
            yield {"models": ", ".join(group.members), "ranks": self.group_ranks(number), "peak": bytes_text(peaks[number]),
                   "peak_x": _px(peaks[number] * scale), "capacity": bytes_text(capacities[number]),
                   "capacity_x": _px(capacities[number] * scale), "share": share_text(peaks[number], capacities[number]),
                   "bars": [{"model": m, "total": bytes_text(held[m].total), "segments": list(_segments(held[m], scale))}
                            for m in group.members]}

    # ---- tables

    def _moves(self) -> list[Row]:
        return [row for row in self.tables.rows if row.section == ITERATION and row.step.op in ("transfer", "reshard")]

    def transfers(self) -> Iterator[dict[str, str]]:
        """Those that move anything, the longest first."""
        spent = {id(row): row.times * self.costs.seconds(row.step, row.part) for row in self._moves()}
        for row in sorted(self._moves(), key=lambda r: -spent[id(r)]):
            found = moving(self.costs, row)
            if not found.total:
                continue
            value = row.step.name if row.step.op == "reshard" else ", ".join(v.name for v in row.step.values)
            yield {"value": value, "src": row.step.src, "dst": row.step.dst, "times": str(row.times),
                   "total": bytes_text(found.total), "most": bytes_text(found.most), "least": bytes_text(found.least),
                   "link": found.links, "how": found.how, "seconds": seconds_text(spent[id(row)]),
                   "peak": bytes_text(found.peak) if found.peak else "-"}

    def runners_up(self) -> Iterator[dict[str, Any]]:
        """The plan's groups as the search sees them, then its other divisions of the models, as bars to one scale."""
        if self.plan.search is None:
            return
        found = [(sum(self.plan.search.stages.values()), self.plan.search, groups_of(self.plan))]
        found += [(other.iteration_s, other, other.groups) for other in runners_up(self.plan)]
        (best, _, chosen), longest = found[0], max(seconds for seconds, *_ in found) or 1.0
        for seconds, one, groups in found:
            stages = [seconds_text(terms(one)[name]) if name in terms(one) else "-" for name in self.stage_names]
            yield {"text": groups_text(groups), "seconds": seconds_text(seconds), "width": f"{100 * seconds / longest:.1f}",
                   "stages": stages, "memory": bytes_text(one.memory),
                   "more": "this plan" if groups is chosen else f"{100 * (seconds / best - 1 if best else 0):+.1f} %"}

    @property
    def stage_names(self) -> list[str]:
        seen = (self.plan.search, *self.plan.alternatives) if self.plan.search else ()
        return list(dict.fromkeys(name for one in seen for name in terms(one)))

    def searched(self) -> dict[str, Any]:
        """What the search looked at, and what fewer and more ranks would do to each group."""
        if self.plan.search is None:
            return {}
        groups = ((", ".join(b.models), list(size_lines(self.plan, b.models[0]))) for b in self.plan.search.bounds)
        return {"counts": search_counts(self.plan.search), "going_on": goes_on(self.plan) and GOING_ON.capitalize(),
                "sizes": [{"models": m, "lines": lines} for m, lines in groups]}

    def steps(self) -> Iterator[dict[str, Any]]:
        for row in self.tables.rows:
            seconds = row.times * self.costs.seconds(row.step, row.part)
            if isinstance(row.step, UpdateLoop):
                continue
            place = layout_of(row.step) or (f"{row.step.src} to {row.step.dst}" if hasattr(row.step, "src") else HOME)
            yield {"section": row.section, "title": row.title, "place": place, "times": row.times, "line": row.step.line,
                   "seconds": seconds_text(seconds), "why": self.costs.reason(row.step, row.part),
                   "share": self._share(seconds) if row.section == ITERATION else ""}

    def _share(self, seconds: float) -> str:
        return share_text(seconds, self.lanes.seconds).replace("less than ", "< ")

    def lines(self) -> Iterator[dict[str, Any]]:
        """The program, each line with the time of an iteration that its steps take."""
        spent: dict[int, float] = {}
        for row in self.tables.rows:
            if row.section == ITERATION and not isinstance(row.step, UpdateLoop):
                seconds = row.times * self.costs.seconds(row.step, row.part)
                spent[row.step.line] = spent.get(row.step.line, 0.0) + seconds
        longest = max(spent.values(), default=0.0) or 1.0
        kept = ((int(number), text) for number, text in self.plan.program.lines.items())
        numbered = list(enumerate(self.program, 1)) or sorted(kept)
        for number, text in numbered:
            seconds = spent.get(number, 0.0)
            yield {"number": number, "text": text, "heat": f"{seconds / longest:.3f}",
                   "seconds": seconds_text(seconds) if seconds >= self.lanes.seconds / 1000 > 0 else ""}


def _runs(rows: Sequence[dict], key: str) -> list[tuple[Any, list[dict]]]:
    """Neighbours that have one value, in the order of the rows."""
    return [(value, list(run)) for value, run in itertools.groupby(rows, lambda row: row[key])]


def _busy(blocks: Sequence[lanes.Block]) -> float:
    return sum(block.end - block.start for block in blocks if block.model)


def _fitting(block: lanes.Block, width: float) -> str:
    """The label as far as it fits into its block."""
    text, most = block.label, int((width - 8) / CHARACTER)
    return text if len(text) <= most else f"{text[:most - 1]}…" if most >= 5 else ""


def _stacked(memory: Memory) -> float:
    return sum(dataclasses.astuple(memory))


def _segments(memory: Memory, scale: float) -> Iterator[dict[str, str]]:
    at = 0.0
    for number, field in enumerate(dataclasses.fields(memory)):
        size = getattr(memory, field.name)
        if size:
            yield {"part": number, "x": _px(at * scale), "width": _px(size * scale), "tip": f"{field.name}: {bytes_text(size)}"}
        at += size


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
