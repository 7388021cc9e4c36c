"""A plan for people: every step with what it makes, where it runs, what it costs and what moves."""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator

from compiler.cluster import Cluster
from compiler.cost import CostModel, Memory, iteration_seconds, timeline
from compiler.groups import groups_of, layouts_of
from compiler.plan import Alternative, GroupSpec, Plan
from compiler.reading.moves import ROWS, move_lines, moving
from compiler.reading.searched import runners_up, search_json, search_lines
from compiler.reading.tables import ITERATION, Row, Tables, layout_of, microbatches, rows_of, told
from compiler.reading.units import bytes_text, cut_text, degrees_text, plural, ranks_text, seconds_text
from compiler.resharding.transitions import engine_of
from compiler.steps import HOME, UpdateLoop

STEP = 44  # width of the column of steps
MOVES = ("transfer", "reshard")


def explain_text(plan: Plan, cluster: Cluster) -> str:
    return "\n".join(_Text(plan, cluster).lines()) + "\n"


class _Text:
    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self.plan, self.cluster = plan, cluster
        self.costs, self.tables = CostModel(plan, cluster), Tables(plan)
        self.spans = {id(span.step): span for span in timeline(self.costs)}
        self.total = max((span.end for span in self.spans.values()), default=0.0)
        places = {*map(self.place, self.tables.rows)}
        self.widths = [max(map(len, column)) for column in zip(("layout", "ranks"), *places)]

    def lines(self) -> Iterator[str]:
        plan = self.plan
        where = "this machine" if self.cluster.is_local else f"cluster {self.cluster.name}"
        yield f"{plan.program.name} on {plural(plan.world, 'rank')} of {where}: about {seconds_text(self.total)} an iteration"
        yield ""
        yield from self.layouts()
        layout, ranks = self.widths
        yield f"{'step':{STEP}}{'layout':{layout}}  {'ranks':{ranks}}{'estimate':>11}{'share':>7}"
        if plan.setup:
            yield "once"
            yield from self.steps(plan.setup, "once", share=False)
        yield "each iteration"
        yield from self.steps(plan.steps, ITERATION)
        for section in plan.evals:
            due = f"every {plural(section.every, 'iteration')}" if section.every else "at the start and the end"
            yield f"{section.name}, {due}"
            yield from self.steps(section.steps, section.name, share=False)
        yield ""
        yield from self.memory()
        yield ""
        yield from self.reasons()

    # ---- where models are

    def layouts(self) -> Iterator[str]:
        """Who shares which ranks, and how each is cut over them."""
        width = max(map(len, self.plan.layouts), default=0)
        for group in groups_of(self.plan):
            pool = f" of {group.pool}" if group.pool else ""
            yield f"{ranks_text(range(group.first, group.last + 1))}{pool}: {', '.join(group.members)}"
            for name in (n for member in group.members for n in layouts_of(self.plan, member)):
                yield f"  {name:{width}}  {', '.join((degrees_text(self.plan.layouts[name]), *self.choices(name)))}"
        if groups_of(self.plan):
            yield ""

    def choices(self, name: str) -> Iterator[str]:
        """What is chosen of a layout beside its degrees."""
        spec, model = self.plan.layouts[name], name.rpartition(".")[0]
        yield from microbatches(self.tables, name)
        if spec.within:
            yield f"weights by {spec.strategy}"
        if self.plan.models[model].offload and not spec.within:
            yield "offloaded while idle"

    # ---- steps

    def steps(self, steps: Any, section: str, indent: int = 1, times: int = 1, part: float = 1.0,
              share: bool = True) -> Iterator[str]:
        """share: whether the steps are part of an iteration. times, part: as in `tables.Row`."""
        for step in steps:
            yield from self.step(Row(step, section, times, part), indent, share)
            if isinstance(step, UpdateLoop):
                yield from self.loop(step, indent)

    def step(self, row: Row, indent: int, share: bool) -> Iterator[str]:
        step, margin = row.step, "  " * indent
        seconds = row.times * self.costs.seconds(step, row.part)
        if isinstance(step, UpdateLoop):
            seconds = self.spans[id(step)].end - self.spans[id(step)].start
        cost = f"{seconds_text(seconds):>11}" + (f"{seconds / self.total:7.1%}" if share and self.total else "")
        left = f"{margin}{told(step)}"
        if len(left) > STEP - 2:
            yield left
            left = ""
        place, ranks = self.place(row)
        yield f"{left:{STEP}}{place:{self.widths[0]}}  {ranks:{self.widths[1]}}{cost}"
        if step.op in MOVES:
            yield from (f"{margin}    {line}" for line in move_lines(moving(self.costs, row)))

    def loop(self, loop: UpdateLoop, indent: int) -> Iterator[str]:
        if loop.before:
            yield f"{'  ' * (indent + 1)}before it"
            yield from self.steps(loop.before, ITERATION, indent + 2)
        counts = f"{plural(loop.epochs, 'epoch')} of {plural(loop.minibatches, 'mini-batch', 'mini-batches')}"
        yield f"{'  ' * (indent + 1)}{counts}"
        yield from self.steps(loop.body, ITERATION, indent + 2, loop.epochs * loop.minibatches, 1 / loop.minibatches)

    def place(self, row: Row) -> tuple[str, str]:
        """(layout, ranks): `actor.train tp2 pp4 dp8`, `0-63`"""
        step = row.step
        if isinstance(step, UpdateLoop):
            return "", ""
        name = layout_of(step) or (f"{step.src} to {step.dst}" if hasattr(step, "src") else HOME)
        spec = self.plan.layouts.get(name)
        return name + (f" {cut_text(spec)}" if spec else ""), ranks_text(self.tables.ranks_of(step)).split(" ", 1)[1]

    # ---- memory, and why

    def memory(self) -> Iterator[str]:
        parts = [field.name for field in dataclasses.fields(Memory)]
        yield f"{'memory on the fullest rank':28}{'total':>12}" + "".join(f"{name:>13}" for name in parts)
        for group in groups_of(self.plan):
            held = {name: self.costs.memory(name) for name in group.members}
            for name, memory in held.items():
                sizes = (bytes_text(getattr(memory, part)) if getattr(memory, part) else "-" for part in parts)
                yield f"  {name:26}{bytes_text(memory.total):>12}" + "".join(f"{size:>13}" for size in sizes)
            ranks = ranks_text(range(group.first, group.last + 1))
            most, capacity = self.costs.peak(group.members), self.costs.machine(group.members[0]).memory
            yield f"  {f'at once on {ranks}':26}{bytes_text(most):>12} of {bytes_text(capacity)}"

    def reasons(self) -> Iterator[str]:
        costs = self.costs
        response = costs.plan.assume.get("response")
        said = f"{response:g} tokens" if response else "the length of their bound"
        yield f"estimated with prompts of {costs.prompt_tokens:g} tokens, responses of {said}; `assume:` changes it"
        yield from search_lines(self.plan)


# ---- JSON ----------------------------------------------------------------------------------------

def explain_json(plan: Plan, cluster: Cluster, seconds: float) -> dict[str, Any]:
    """seconds: that finding the placement took, or reading the plan.

    A plan that was not searched has one allocation, which is feasible.
    """
    costs = CostModel(plan, cluster)
    rows = [row for row in rows_of(plan) if row.section == ITERATION]
    return {
        "format": "rlflow.explain/1", "program": plan.program.name, "plan": plan.digest,
        "estimate": {"iteration_s": iteration_seconds(costs)},
        "groups": [_group_json(group) for group in groups_of(plan)],
        "models": {name: _model_json(plan, costs, name) for name in plan.models},
        "steps": [_step_json(plan, costs, row) for row in rows if not isinstance(row.step, UpdateLoop)],
        "transfers": [_transfer_json(costs, row) for row in rows if row.step.op in MOVES],
        "search": (search_json(plan.search) if plan.search else {"considered": 1, "feasible": 1}) | {"seconds": seconds},
        "alternatives": [_alternative_json(other) for other in runners_up(plan)],
    }


def _group_json(group: GroupSpec) -> dict[str, Any]:
    return {"models": list(group.models), "samplers": list(group.samplers), "devices": group.ranks,
            "first": group.first, "pool": group.pool}


def _alternative_json(other: Alternative) -> dict[str, Any]:
    """stages: seconds, with the weights' way into generation, `transition_s`, as a part of generation."""
    return {"iteration_s": other.iteration_s, "groups": [_group_json(g) for g in other.groups],
            "stages": dict(other.stages), "transition_s": other.transition, "memory_bytes": other.memory}


def _model_json(plan: Plan, costs: CostModel, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"role": plan.models[name].role, "memory_bytes": costs.memory(name).total}
    for stage in ("train", "forward", "generate"):
        spec = plan.layouts.get(f"{name}.{stage}")
        if spec is not None:
            found[stage] = {"tp": spec.tp, "pp": spec.pp, "dp": spec.dp, "engine": engine_of(plan.layouts, f"{name}.{stage}")}
    found.setdefault("forward", found.get("train"))
    return found


def _step_json(plan: Plan, costs: CostModel, row: Row) -> dict[str, Any]:
    step, layout = row.step, layout_of(row.step)
    ranks = list(Tables(plan).ranks_of(step))
    return {"op": step.op, "value": step.name, "model": getattr(step, "model", None), "layout": layout or None,
            "ranks": ranks, "times": row.times, "line": step.line, "ahead": getattr(step, "ahead", 0), "retained": getattr(step, "retained", ""),
            "estimate_s": row.times * costs.seconds(step, row.part)}


def _transfer_json(costs: CostModel, row: Row) -> dict[str, Any]:
    """Bytes of one time, and of the links as `compiler.reading.moves` has it; the estimate is for the iteration.

    Of weights also peak_bytes: of both layouts on the fullest rank, an element in both counted once.
    """
    step, found = row.step, moving(costs, row)
    value = step.name if step.op == "reshard" else ", ".join(v.name for v in step.values)
    told = {"value": value, "from": step.src, "to": step.dst, "times": row.times,
            "bytes_per_rank": round(found.most), "total_bytes": round(found.total),
            "lower_bound_bytes": round(found.least), "estimate_s": row.times * costs.seconds(step, row.part),
            "bytes_within_nodes": round(found.near), "bytes_between_nodes": round(found.far)}
    if found.how == ROWS:
        return told
    return told | {"strategy": found.how, "peak_bytes": found.peak, "redundant_bytes": found.twice}
