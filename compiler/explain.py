"""A plan for people: every step with what it makes, where it runs, what it costs and what moves."""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator

from compiler.cluster import Cluster
from compiler.cost import CostModel, Memory
from compiler.plan import Plan
from compiler.steps import HOME, UpdateLoop
from compiler.transitions import resolve

COLUMNS = (44, 33, 6)  # widths: step, where, ranks


def explain_text(plan: Plan, cluster: Cluster) -> str:
    return "\n".join(_Text(plan, cluster).lines()) + "\n"


class _Text:
    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self.plan, self.cluster = plan, cluster
        self.costs = CostModel(plan, cluster)
        self.total = sum(map(self.costs.seconds, plan.steps))

    def lines(self) -> Iterator[str]:
        plan = self.plan
        where = "this machine" if self.cluster.is_local else f"cluster {self.cluster.name}"
        yield f"{plan.program.name} on {_plural(plan.world, 'rank')} of {where}: about {_time(self.total)} an iteration"
        yield ""
        yield f"{'step':{COLUMNS[0]}}{'layout':{COLUMNS[1]}}{'ranks':{COLUMNS[2]}}{'estimate':>10}{'share':>7}"
        if plan.setup:
            yield "once"
            yield from self.steps(plan.setup, share=False)
        yield "each iteration"
        yield from self.steps(plan.steps)
        for section in plan.evals:
            due = f"every {_plural(section.every, 'iteration')}" if section.every else "at the start and the end"
            yield f"{section.name}, {due}"
            yield from self.steps(section.steps, share=False)
        yield ""
        yield from self.memory()
        yield ""
        yield from self.reasons()

    def steps(self, steps: Any, indent: int = 1, times: int = 1, part: float = 1.0, share=True) -> Iterator[str]:
        """share: whether the steps are part of an iteration. times, part: as `_flat` gives them."""
        for step in steps:
            yield from self.step(step, indent, times, part, share)
            if isinstance(step, UpdateLoop):
                yield from self.loop(step, indent)

    def step(self, step: Any, indent: int, times: int, part: float, share: bool) -> Iterator[str]:
        margin = "  " * indent
        seconds = times * self.costs.seconds(step, part)
        cost = f"{_time(seconds):>10}" + (f"{seconds / self.total:7.1%}" if share and self.total else "")
        left = f"{margin}{told(step)}"
        if len(left) >= COLUMNS[0]:
            yield left
            left = ""
        yield f"{left:{COLUMNS[0]}}{self.place(step)}{cost}"
        if step.op in ("transfer", "reshard"):
            moved = self.costs.moved(step)
            total, rank, least = (_bytes(part * size) for size in (moved.total, moved.per_rank, moved.lower_bound))
            bound = f"; no plan moves less than {least}" if moved.lower_bound else ""
            yield f"{margin}    {total} in all, at most {rank} to a rank{bound}"

    def loop(self, loop: UpdateLoop, indent: int) -> Iterator[str]:
        if loop.before:
            yield f"{'  ' * (indent + 1)}before it"
            yield from self.steps(loop.before, indent + 2)
        counts = f"{_plural(loop.epochs, 'epoch')} of {_plural(loop.minibatches, 'mini-batch', 'mini-batches')}"
        yield f"{'  ' * (indent + 1)}{counts}"
        yield from self.steps(loop.body, indent + 2, loop.epochs * loop.minibatches, 1 / loop.minibatches)

    def place(self, step: Any) -> str:
        name = layout_of(step) or (f"{step.src} to {step.dst}" if hasattr(step, "src") else HOME)
        spec = self.plan.layouts.get(name)
        degrees = f" tp{spec.tp} pp{spec.pp} dp{spec.dp}" if spec else ""
        last = self.plan.world - 1
        return f"{name + degrees + ' ':{COLUMNS[1]}}{f'0-{last}' if last else '0':{COLUMNS[2]}}"

    def memory(self) -> Iterator[str]:
        parts = [field.name for field in dataclasses.fields(Memory)]
        yield f"{'memory on the fullest rank':28}{'total':>12}" + "".join(f"{name:>13}" for name in parts)
        held = {name: self.costs.memory(name) for name in self.plan.models}
        for name, memory in held.items():
            sizes = (_bytes(getattr(memory, part)) if getattr(memory, part) else "-" for part in parts)
            yield f"  {name:26}{_bytes(memory.total):>12}" + "".join(f"{size:>13}" for size in sizes)
        total = sum(memory.total for memory in held.values())
        yield f"  {'all':26}{_bytes(total):>12} of {_bytes(self.cluster.device.memory)}"

    def reasons(self) -> Iterator[str]:
        costs = self.costs
        response = costs.plan.assume.get("response")
        said = f"{response:g} tokens" if response else "the length of their bound"
        yield f"estimated with prompts of {costs.prompt_tokens:g} tokens, responses of {said}; `assume:` changes it"
        yield "layouts: as `plan:` says; what it leaves open is data parallelism over all ranks"


def layout_of(step: Any) -> str:
    """The layout in which a step works, "" for those at home and for moves."""
    return f"{step.model}.train" if step.op == "optimizer" else getattr(step, "layout", "")


def told(step: Any) -> str:
    """`forward logp_old`, with what is worth saying of it."""
    words = {"load": f"load {step.name}: " + ", ".join(getattr(step, "columns", ())), "reshard": step.name,
             "transfer": f"transfer {step.name}", "record": f"metric {step.name}", "update": step.name,
             "optimizer": step.name, "train": step.name, "action": step.name, "commit_states": "commit states",
             "next_state": f"state {step.name}", "statistics": step.name}
    return words.get(step.op, f"{step.op} {step.name}")


# ---- JSON ----------------------------------------------------------------------------------------

def explain_json(plan: Plan, cluster: Cluster, seconds: float) -> dict[str, Any]:
    """seconds: that making the plan took."""
    costs = CostModel(plan, cluster)
    rows = list(_flat(plan.steps))
    return {
        "format": "rlflow.explain/1", "program": plan.program.name, "plan": plan.digest,
        "estimate": {"iteration_s": sum(map(costs.seconds, plan.steps))},
        "groups": [{"models": list(plan.models), "devices": plan.world}],
        "models": {name: _model_json(plan, costs, name) for name in plan.models},
        "steps": [_step_json(plan, costs, *row) for row in rows if not isinstance(row[0], UpdateLoop)],
        "transfers": [_transfer_json(costs, *row) for row in rows if row[0].op in ("transfer", "reshard")],
        "search": {"considered": 1, "feasible": 1, "seconds": seconds},
        "alternatives": [],
    }


def _flat(steps: Any, times: int = 1, part: float = 1.0) -> Iterator[tuple[Any, int, float]]:
    """(step, how often an iteration runs it, the share of rows that it sees)."""
    for step in steps:
        yield step, times, part
        if isinstance(step, UpdateLoop):
            yield from _flat(step.before)
            yield from _flat(step.body, step.epochs * step.minibatches, 1 / step.minibatches)


def _model_json(plan: Plan, costs: CostModel, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"role": plan.models[name].role, "memory_bytes": costs.memory(name).total}
    for stage in ("train", "forward", "generate"):
        spec = plan.layouts.get(f"{name}.{stage}")
        if spec is not None:
            found[stage] = {"tp": spec.tp, "pp": spec.pp, "dp": spec.dp}
    found.setdefault("forward", found.get("train"))
    return found


def _step_json(plan: Plan, costs: CostModel, step: Any, times: int, part: float) -> dict[str, Any]:
    layout = layout_of(step)
    ranks = sorted(resolve(plan.layouts, layout).ranks) if layout else list(range(plan.world))
    return {"op": step.op, "value": step.name, "model": getattr(step, "model", None), "layout": layout or None,
            "ranks": ranks, "times": times, "line": step.line, "estimate_s": times * costs.seconds(step, part)}


def _transfer_json(costs: CostModel, step: Any, times: int, part: float) -> dict[str, Any]:
    """Bytes of one time; the estimate is for the iteration."""
    moved = costs.moved(step)
    value = step.name if step.op == "reshard" else ", ".join(v.name for v in step.values)
    return {"value": value, "from": step.src, "to": step.dst, "times": times,
            "bytes_per_rank": round(moved.per_rank * part), "total_bytes": round(moved.total * part),
            "lower_bound_bytes": round(moved.lower_bound * part), "estimate_s": times * costs.seconds(step, part)}


# ---- units ---------------------------------------------------------------------------------------

def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-5 else f"{seconds * 1e6:.1f} us"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _plural(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
