"""`rlflowc explain --why X`: why a value, model, layout or step is where it is and costs what it costs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable, Iterable, Iterator, Optional

from compiler.cluster import Cluster
from compiler.cost import CostModel, iteration_seconds
from compiler.groups import groups_of
from compiler.layout import generation_layout
from compiler.plan import GroupSpec, Plan
from compiler.proof.wellformed import shape_of
from compiler.reading.moves import HOW, ROWS, move_lines, moving
from compiler.reading.searched import runner_up_lines, size_lines
from compiler.reading.tables import ITERATION, SETUP, Row, Tables, layout_of, rows_of
from compiler.reading.units import bytes_text, degrees_text, plural, ranks_text, scaled, seconds_text, share_text
from compiler.resharding.transitions import ORDERS, weight_transfer
from compiler.steps import HOME, UpdateLoop
from rlhf_dsl.diagnostics import did_you_mean, fault

MARGIN = 12  # width of the labels


@dataclass(frozen=True)
class Answer:
    """kind: "value", "model", "layout" or "step"; facts: (label, line), a label stands once above its lines."""

    kind: str
    name: str
    title: str
    facts: tuple[tuple[str, str], ...]


def why(plan: Plan, cluster: Cluster, name: str) -> Answer:
    """Raises DiagnosticError P0301 if nothing in the plan has that name."""
    return _Why(plan, cluster).answer(name)


def why_text(answer: Answer) -> str:
    lines, last = [answer.title], ""
    for label, line in answer.facts:
        lines.append(f"  {'' if label == last else label:{MARGIN}}{line}".rstrip())
        last = label
    return "\n".join(lines) + "\n"


def why_json(answer: Answer) -> dict[str, Any]:
    facts: dict[str, list[str]] = {}
    for label, line in answer.facts:
        facts.setdefault(label, []).append(line)
    return {"format": "rlflow.why/1", "kind": answer.kind, "name": answer.name, "title": answer.title, "facts": facts}


Facts = Iterator[tuple[str, str]]


class _Why:
    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self.plan, self.cluster = plan, cluster
        self.costs, self.tables = CostModel(plan, cluster), Tables(plan)

    def answer(self, name: str) -> Answer:
        found = self.known.get(name) or self._by_last_part(name)
        if found is None:
            raise fault("P0301", name=name, help=did_you_mean(name, self.known))
        kind, make = found
        title, *facts = make()
        return Answer(kind, name, title[1], tuple(facts))

    @cached_property
    def known(self) -> dict[str, tuple[str, Callable[[], Facts]]]:
        """By name, what it is and how it is explained: a model before a value of its name, a value before its step."""
        found: dict[str, tuple[str, Callable[[], Facts]]] = {}
        for name in self.plan.models:
            found[name] = "model", lambda name=name: self.model(name)
        for name in self.plan.layouts:
            found[name] = "layout", lambda name=name: self.layout(name)
        for name, expr in self.tables.values.items():
            found.setdefault(name, ("value", lambda name=name, expr=expr: self.value(name, expr)))
        for row in self.tables.rows:
            for name in (row.title, row.step.name):
                found.setdefault(name, ("step", lambda row=row: self.step(row)))
        return found

    def _by_last_part(self, name: str) -> Optional[tuple[str, Callable[[], Facts]]]:
        """`ratio` for the value `update/ratio`, if no other section has one."""
        found = [entry for full, entry in self.known.items() if full.rpartition("/")[2] == name]
        best = [entry for entry in found if entry[0] == found[0][0]]
        return best[0] if len(best) == 1 else None

    # ---- values

    def value(self, name: str, expr: int) -> Facts:
        row = self.plan.exprs[expr]
        yield "", f"{name}: {row.elem}{'[' + ', '.join(row.dims) + ']' if row.dims else ''}"
        makers = self.tables.makers(expr)
        line = makers[0].step.line if makers else row.line
        yield from self._source(line or row.line)
        for maker in makers[:1]:
            yield "made by", f"{maker.title}, {self.tables.where(maker.step)}"
        if row.op == "state":
            yield "is", "a state: every rank knows it throughout the iteration"
        for maker in makers[:1]:
            yield from self._place(maker)
            yield from self._listed("reads", sorted(self.tables.inputs(maker.step) - {expr}))
        yield from self._readers(expr)
        for mover in self.tables.movers(expr):
            yield "moved", f"{mover.step.src} to {mover.step.dst}{self._when(mover)}"
        yield "size", f"about {bytes_text(self.costs.value_bytes(expr))} over all rows"
        for maker in makers[:1]:
            yield from self.cost(maker)

    def _listed(self, label: str, exprs: Iterable[int]) -> Facts:
        names = [self.tables.names[e] for e in exprs]
        if names:
            yield label, ", ".join(names)

    def _readers(self, expr: int) -> Facts:
        readers = self.tables.readers(expr)
        for reader in readers:
            yield "read by", f"{reader.title}{_at(reader.step.line)}{self._when(reader)}"
        if not readers:
            yield "read by", "nothing else"

    def _when(self, row: Row) -> str:
        if row.section != ITERATION:
            return f", {row.section}"
        return f", {row.times} times an iteration" if row.times > 1 else ""

    # ---- models and layouts

    def model(self, name: str) -> Facts:
        spec, shape = self.plan.models[name], self.plan.models[name].shape
        yield "", f"{name}: a {spec.role}, {'trained' if spec.optimizer else 'frozen'}"
        yield from self._source(spec.line)
        yield "sizes", (f"{scaled(self.costs.parameters[name])} parameters, {plural(shape['layers'], 'layer')} of width "
                        f"{shape['hidden']}, vocabulary of {shape['vocab']}")
        group = next(g for g in groups_of(self.plan) if name in g.models)
        yield "devices", self._sharing(group, name)
        for apart in (g for g in groups_of(self.plan) if f"{name}.generate" in g.samplers):
            yield "devices", f"it samples on {self._sharing(apart, f'{name}.generate')}"
        yield from (("devices", line) for line in size_lines(self.plan, name))
        for layout in self._layouts(name):
            yield "layouts", f"{layout} {degrees_text(self.plan.layouts[layout])}"
        for layout in self._layouts(name):
            yield from (("because", f"{layout}: {line}") for line in self._reasons(layout))
        yield from self._model_costs(name)
        memory = self.costs.memory(name)
        parts = {f.name: getattr(memory, f.name) for f in dataclasses.fields(memory)}
        yield "memory", f"{bytes_text(memory.total)} on the fullest rank, of {bytes_text(self.costs.machine(name).memory)}"
        yield from (("", f"{bytes_text(size)} {part}") for part, size in parts.items() if size)
        if spec.offload:
            yield "memory", "while idle it lies in the host's memory"
        for line in runner_up_lines(self.plan):
            yield "runners-up", line

    @staticmethod
    def _sharing(group: GroupSpec, name: str) -> str:
        others = [m for m in group.members if m != name]
        sharing = f"shared with {', '.join(others)}" if others else "for it alone"
        return f"{ranks_text(range(group.first, group.last + 1))}, {sharing}"

    def _layouts(self, model: str) -> list[str]:
        return [layout for layout in self.plan.layouts if layout.rpartition(".")[0] == model]

    def _model_costs(self, name: str) -> Facts:
        rows = [r for r in self.tables.rows if r.section == ITERATION and _model_of(self.plan, r.step) == name]
        spent = {id(r): r.times * self.costs.seconds(r.step, r.part) for r in rows}
        yield "estimate", f"{seconds_text(sum(spent.values()))} of work in an iteration of {seconds_text(self.total)}"
        for row in sorted(rows, key=lambda r: -spent[id(r)]):
            if spent[id(row)] >= self.total / 1000:
                share = share_text(spent[id(row)], self.total)
                yield "", f"{seconds_text(spent[id(row)]):>10} {share:>7}  {row.title}{_at(row.step.line)}"

    def layout(self, name: str) -> Facts:
        spec, model = self.plan.layouts[name], name.rpartition(".")[0]
        yield "", f"{name}: {degrees_text(spec)} on {ranks_text(self.tables.ranks(name))}"
        yield from (("because", line) for line in self._reasons(name))
        cut = [f"each layer over {spec.tp} ranks"] * (spec.tp > 1) + [f"the layers over {spec.pp} stages"] * (spec.pp > 1)
        yield "cuts", f"{' and '.join(cut) or 'no weight'}, the rows over {plural(spec.dp, 'data shard')}"
        if spec.within:
            yield "order", self._order(name)
        for row in self.tables.rows:
            if layout_of(row.step) == name:
                yield "used by", f"{row.title}{_at(row.step.line)}{self._when(row)}"
        for row in (r for r in self.tables.rows if r.step.op == "reshard" and name in (r.step.src, r.step.dst)):
            yield "weights", f"{row.step.src} to {row.step.dst}{self._when(row)}: {HOW[row.step.strategy]}"
            yield from (("weights", f"  {line}") for line in move_lines(moving(self.costs, row)))
        if model in self.plan.models:
            yield "see also", f"--why {model}"

    def _order(self, name: str) -> str:
        """How a generation layout takes the ranks of training, and what of their shards it contains."""
        spec = self.plan.layouts[name]
        at = "at intervals" if ORDERS[spec.strategy] is generation_layout else "one after another"
        shape, role = shape_of(self.plan, name.rpartition(".")[0]), self.plan.models[name.rpartition(".")[0]].role
        transfer = weight_transfer(shape, role, self.plan.layouts, spec.within, name)
        beside = max(map(transfer.redundant_bytes, transfer.ranks))
        inside = f"up to {bytes_text(beside)} of a rank's shard there are no part of its shard here, and stay beside it"
        if not beside:
            inside = "each rank's shard there is part of its shard here"
        return f"a replica takes the ranks of {spec.within} {at}: {inside}"

    def _reasons(self, layout: str) -> Iterator[str]:
        lines = self.plan.constraints.get(layout, ())
        for line in lines:
            yield f"line {line} asks for it: {self.plan.line_text(line).strip()}"
        if self.plan.search:
            model = layout.rpartition(".")[0]
            yield f"the search found it; --why {model} says beside what" + ("; the line above bound it" if lines else "")
        elif not lines:
            spec = self.plan.layouts[layout]
            yield f"`plan:` leaves it open: data parallelism over {plural(spec.ranks, 'rank')}"

    # ---- steps

    def step(self, row: Row) -> Facts:
        yield "", f"{row.title}, {self.tables.where(row.step)}"
        yield from self._source(row.step.line)
        yield from self._place(row)
        yield from self._listed("reads", sorted(self.tables.inputs(row.step)))
        if row.step.op in ("transfer", "reshard"):
            yield from self._move(row)
        yield "when", f"{row.section}{f', {row.times} times' if row.times > 1 else ''}"
        yield from self.cost(row)

    def _move(self, row: Row) -> Facts:
        found = moving(self.costs, row)
        yield from (("moves", line) for line in move_lines(found))
        if found.how != ROWS:
            yield "moves", HOW[found.how]
        for value in getattr(row.step, "values", ()):
            readers = [r for r in self.tables.readers(value.expr) if _needs(r.step, row.step.dst)]
            if readers:
                yield "moves", f"{value.name}, for {', '.join(dict.fromkeys(r.title for r in readers))}"

    def _place(self, row: Row) -> Facts:
        """Why a step runs where it runs."""
        step, layout = row.step, layout_of(row.step)
        if step.op == "reshard":
            yield "because", self._changed(row)
        elif step.op in ("reload", "offload"):
            yield "because", self._offloaded(step)
        elif step.op == "transfer":
            yield "because", "values lie at home, where equations are evaluated, and models take rows in their layouts"
        elif layout:
            model = layout.rpartition(".")[0]
            yield "because", f"{model} computes in {layout} ({degrees_text(self.plan.layouts[layout])}); --why {layout}"
            yield from self._retained(step)
        else:
            yield "because", f"at home every rank evaluates its share of the rows, 1 of {self.plan.world}"

    def _retained(self, step: Any) -> Facts:
        """What a forward keeps for a training."""
        if getattr(step, "retained", ""):
            yield "goes on", f"from the activations of forward {step.retained}: its own forward need not be computed"
        for row in rows_of(self.plan):
            if getattr(row.step, "retained", "") == step.name:
                yield "keeps", f"its activations, for {row.title}"

    def _offloaded(self, step: Any) -> str:
        where = f"{step.model} lies in the host's memory while others work; {', '.join(step.parts)}"
        if not step.bytes:
            return f"{where} {'get memory again' if step.op == 'reload' else 'give up their memory, unchanged'}"
        return f"{where} {'come back' if step.op == 'reload' else 'leave'}, {bytes_text(step.bytes)} at most on a rank"

    def _changed(self, row: Row) -> str:
        step, trained = row.step, self.plan.models[row.step.model].optimizer is not None
        kept = step.src.rpartition(".")[2]
        other = f"{step.model} generates in another layout than it {'trains' if kept == 'train' else 'scores'} in"
        if row.section == SETUP:
            return f"{other}; its weights never change, so once is enough"
        return f"{other}; its weights may have changed since" if trained else f"{other}; its weights may be other ones"

    # ---- costs

    @cached_property
    def total(self) -> float:
        return iteration_seconds(self.costs)

    def cost(self, row: Row) -> Facts:
        each = self.costs.seconds(row.step, row.part)
        spent = row.times * each
        times = f" ({row.times} times {seconds_text(each)})" if row.times > 1 else ""
        of = f", {share_text(spent, self.total)} of an iteration's {seconds_text(self.total)}" if row.section == ITERATION else ""
        yield "estimate", f"{seconds_text(spent)}{times}{of}"
        if isinstance(row.step, UpdateLoop):
            yield "", "the sum of what it does; --why with a step of it says more"
            return
        parts = self.costs.estimate(row.step, row.part).parts
        for part in sorted(parts, key=lambda p: -p.seconds):
            yield "made of", f"{seconds_text(part.seconds):>10} {share_text(part.seconds, each):>7}  {part.why}"

    def _source(self, line: int) -> Facts:
        text = self.plan.line_text(line).strip()
        if line and text:
            yield f"line {line}", text


def _at(line: int) -> str:
    return f" (line {line})" if line else ""


def _needs(step: Any, place: str) -> bool:
    """Whether a step takes its inputs at `place`."""
    return (layout_of(step) or HOME) == place


def _model_of(plan: Plan, step: Any) -> str:
    """The model that a step works for, or "": rows that move belong to the model of the layout."""
    if step.op == "transfer":
        return next(p for p in (step.src, step.dst) if p != HOME).rpartition(".")[0]
    return getattr(step, "model", "")
