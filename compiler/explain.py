"""A plan for people: every step with what it makes, where it runs, what it costs and what moves."""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator, Mapping

from compiler.cluster import Cluster
from compiler.cost import CostModel, Memory, iteration_seconds, timeline
from compiler.groups import groups_of
from compiler.plan import GroupSpec, Plan
from compiler.proof.wellformed import shape_of
from compiler.reading.runners_up import groups_text, runners_up
from compiler.reading.tables import ITERATION, Row, Tables, layout_of, rows_of, title_of
from compiler.reading.units import bytes_text, degrees_text, plural, ranks_text, seconds_text
from compiler.resharding.transitions import engine_of, resolve, weight_transfer
from compiler.steps import HOME, UpdateLoop

COLUMNS = (44, 33, 6)  # widths: step, where, ranks


def explain_text(plan: Plan, cluster: Cluster) -> str:
    return "\n".join(_Text(plan, cluster).lines()) + "\n"


class _Text:
    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self.plan, self.cluster = plan, cluster
        self.costs, self.tables = CostModel(plan, cluster), Tables(plan)
        self.spans = {id(span.step): span for span in timeline(self.costs)}
        self.total = max((span.end for span in self.spans.values()), default=0.0)

    def lines(self) -> Iterator[str]:
        plan = self.plan
        where = "this machine" if self.cluster.is_local else f"cluster {self.cluster.name}"
        yield f"{plan.program.name} on {plural(plan.world, 'rank')} of {where}: about {seconds_text(self.total)} an iteration"
        yield ""
        yield f"{'step':{COLUMNS[0]}}{'layout':{COLUMNS[1]}}{'ranks':{COLUMNS[2]}}{'estimate':>10}{'share':>7}"
        if plan.setup:
            yield "once"
            yield from self.steps(plan.setup, share=False)
        yield "each iteration"
        yield from self.steps(plan.steps)
        for section in plan.evals:
            due = f"every {plural(section.every, 'iteration')}" if section.every else "at the start and the end"
            yield f"{section.name}, {due}"
            yield from self.steps(section.steps, share=False)
        yield ""
        yield from self.memory()
        yield ""
        yield from self.reasons()

    def steps(self, steps: Any, indent: int = 1, times: int = 1, part: float = 1.0, share=True) -> Iterator[str]:
        """share: whether the steps are part of an iteration. times, part: as in `tables.Row`."""
        for step in steps:
            yield from self.step(step, indent, times, part, share)
            if isinstance(step, UpdateLoop):
                yield from self.loop(step, indent)

    def step(self, step: Any, indent: int, times: int, part: float, share: bool) -> Iterator[str]:
        margin = "  " * indent
        seconds = times * self.costs.seconds(step, part)
        if isinstance(step, UpdateLoop):
            seconds = self.spans[id(step)].end - self.spans[id(step)].start
        cost = f"{seconds_text(seconds):>10}" + (f"{seconds / self.total:7.1%}" if share and self.total else "")
        left = f"{margin}{told(step)}"
        if len(left) >= COLUMNS[0]:
            yield left
            left = ""
        yield f"{left:{COLUMNS[0]}}{self.place(step)}{cost}"
        if step.op in ("transfer", "reshard"):
            moved = self.costs.moved(step)
            total, rank, least = (bytes_text(part * size) for size in (moved.total, moved.per_rank, moved.lower_bound))
            bound = f"; no plan moves less than {least}" if moved.lower_bound else ""
            yield f"{margin}    {total} in all, at most {rank} to a rank{bound}"

    def loop(self, loop: UpdateLoop, indent: int) -> Iterator[str]:
        if loop.before:
            yield f"{'  ' * (indent + 1)}before it"
            yield from self.steps(loop.before, indent + 2)
        counts = f"{plural(loop.epochs, 'epoch')} of {plural(loop.minibatches, 'mini-batch', 'mini-batches')}"
        yield f"{'  ' * (indent + 1)}{counts}"
        yield from self.steps(loop.body, indent + 2, loop.epochs * loop.minibatches, 1 / loop.minibatches)

    def place(self, step: Any) -> str:
        name = layout_of(step) or (f"{step.src} to {step.dst}" if hasattr(step, "src") else HOME)
        spec = self.plan.layouts.get(name)
        ranks = ranks_text(self.tables.ranks(name if spec else HOME)).split(" ", 1)[1]
        return f"{name + (f' {degrees_text(spec)}' if spec else '') + ' ':{COLUMNS[1]}}{ranks:{COLUMNS[2]}}"

    def memory(self) -> Iterator[str]:
        parts = [field.name for field in dataclasses.fields(Memory)]
        yield f"{'memory on the fullest rank':28}{'total':>12}" + "".join(f"{name:>13}" for name in parts)
        for group in groups_of(self.plan):
            held = {name: self.costs.memory(name) for name in group.members}
            for name, memory in held.items():
                sizes = (bytes_text(getattr(memory, part)) if getattr(memory, part) else "-" for part in parts)
                yield f"  {name:26}{bytes_text(memory.total):>12}" + "".join(f"{size:>13}" for size in sizes)
            ranks = ranks_text(range(group.first, group.first + group.ranks))
            most, capacity = self.costs.peak(group.members), self.costs.machine(group.members[0]).memory
            yield f"  {f'at once on {ranks}':26}{bytes_text(most):>12} of {bytes_text(capacity)}"

    def reasons(self) -> Iterator[str]:
        costs = self.costs
        response = costs.plan.assume.get("response")
        said = f"{response:g} tokens" if response else "the length of their bound"
        yield f"estimated with prompts of {costs.prompt_tokens:g} tokens, responses of {said}; `assume:` changes it"
        if not self.plan.alternatives:
            yield "layouts: as `plan:` says; what it leaves open is data parallelism over all ranks"
            return
        yield f"layouts: found by the search; the runners-up beside {groups_text(groups_of(self.plan))}"
        yield from (f"  {line}" for line in runners_up(self.plan))


def told(step: Any) -> str:
    """`forward logp_old`, with what is worth saying of it."""
    title = f"load {step.name}: {', '.join(step.columns)}" if step.op == "load" else title_of(step)
    return f"{title}, of the next iteration" if getattr(step, "ahead", 0) else title


# ---- JSON ----------------------------------------------------------------------------------------

def explain_json(plan: Plan, cluster: Cluster, searched: Mapping[str, float]) -> dict[str, Any]:
    """searched: numbers of allocations considered and of feasible divisions of the models, and seconds."""
    costs = CostModel(plan, cluster)
    rows = [row for row in rows_of(plan) if row.section == ITERATION]
    return {
        "format": "rlflow.explain/1", "program": plan.program.name, "plan": plan.digest,
        "estimate": {"iteration_s": iteration_seconds(costs)},
        "groups": [_group_json(group) for group in groups_of(plan)],
        "models": {name: _model_json(plan, costs, name) for name in plan.models},
        "steps": [_step_json(plan, costs, row) for row in rows if not isinstance(row.step, UpdateLoop)],
        "transfers": [_transfer_json(costs, row) for row in rows if row.step.op in ("transfer", "reshard")],
        "search": dict(searched),
        "alternatives": [{"iteration_s": other.iteration_s, "groups": [_group_json(g) for g in other.groups]}
                         for other in plan.alternatives],
    }


def _group_json(group: GroupSpec) -> dict[str, Any]:
    return {"models": list(group.models), "samplers": list(group.samplers), "devices": group.ranks,
            "first": group.first, "pool": group.pool}


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
    ranks = sorted(resolve(plan.layouts, layout).ranks) if layout else list(range(plan.world))
    return {"op": step.op, "value": step.name, "model": getattr(step, "model", None), "layout": layout or None,
            "ranks": ranks, "times": row.times, "line": step.line, "ahead": getattr(step, "ahead", 0),
            "estimate_s": row.times * costs.seconds(step, row.part)}


def _transfer_json(costs: CostModel, row: Row) -> dict[str, Any]:
    """Bytes of one time; the estimate is for the iteration."""
    step, part = row.step, row.part
    moved = costs.moved(step)
    value = step.name if step.op == "reshard" else ", ".join(v.name for v in step.values)
    told = {"value": value, "from": step.src, "to": step.dst, "times": row.times,
            "bytes_per_rank": round(moved.per_rank * part), "total_bytes": round(moved.total * part),
            "lower_bound_bytes": round(moved.lower_bound * part), "estimate_s": row.times * costs.seconds(step, part)}
    return told | (_transition_json(costs, step) if step.op == "reshard" else {})


def _transition_json(costs: CostModel, step: Any) -> dict[str, Any]:
    """peak_bytes: weights of both layouts on the fullest rank, an element in both counted once; links by nodes."""
    plan = costs.plan
    shape, role = shape_of(plan, step.model), plan.models[step.model].role
    transfer = weight_transfer(shape, role, plan.layouts, step.src, step.dst)
    near, far = transfer.bytes_crossing(costs.cluster.devices_per_node)
    return {"strategy": step.strategy, "peak_bytes": max(map(transfer.peak_bytes, transfer.ranks)),
            "redundant_bytes": max(map(transfer.redundant_bytes, transfer.ranks)),
            "bytes_within_nodes": near, "bytes_between_nodes": far}
