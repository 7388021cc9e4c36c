"""What the search found as the placement of a plan: numbers of devices become ranks, choices become layouts."""

from __future__ import annotations

import functools
from typing import Optional, Sequence

from compiler.constraints import FORWARD, GENERATE, TRAIN, Stage, asked_of_stages
from compiler.cost.training import FORWARD_TOKENS
from compiler.execution import executed
from compiler.machine import Machine
from compiler.placement import Batching, Placement
from compiler.plan import GroupSpec, LayoutSpec
from compiler.search.fronts import Fronts
from compiler.search.options import Choice
from compiler.search.placement import Found, Group
from compiler.search.told import runner_up, search_told
from rlhf_dsl.typed import Checked


def placement_of(checked: Checked, fronts: Fronts, found: Found, objective: str,
                 ranks: Optional[int] = None) -> Placement:
    """ranks: how many are started; only those that have a model unless given."""
    machines = fronts.machines
    groups = ranks_of(machines, found.groups)
    world = ranks or max(group.first + group.ranks for group in groups)
    choices = {m.model: m.choice for group in found.groups for m in group.models}
    stages = asked_of_stages(checked)
    usual = {m.model: machines[group.pool].storage for group in found.groups for m in group.models}
    layouts = {stage.target: executed(_layout(stage, choices[stage.model], groups, stages), stage, stages,
                                      usual[stage.model]) for stage in stages}
    batching = {stage.target: _batching(stage, choices[stage.model]) for stage in stages}
    others = tuple(runner_up(fronts, other, functools.partial(ranks_of, machines)) for other in found.alternatives)
    offload = frozenset(model for model, choice in choices.items() if choice.offload)
    return Placement(world, layouts, batching, groups, others, offload, search_told(fronts, found, objective))


def ranks_of(machines: Sequence[Machine], groups: Sequence[Group]) -> tuple[GroupSpec, ...]:
    """The ranks of each group, so that none that could lie in a node crosses two.

    Ranks follow the parts of the cluster in their order, and each part begins on a node of its own.
    """
    placed: dict[int, GroupSpec] = {}
    first = 0
    for pool, machine in enumerate(machines):
        mine = [i for i, group in enumerate(groups) if group.pool == pool]
        starts = packed(machine, [groups[i].devices for i in mine])
        name = machine.name if len(machines) > 1 else ""
        for i, start in zip(mine, starts):
            models = tuple(m.model for m in groups[i].models)
            placed[i] = GroupSpec(models, first + start, groups[i].devices, name)
        first += max((start + groups[i].devices for i, start in zip(mine, starts)), default=0)
    return tuple(placed[i] for i in range(len(groups)))


def packed(machine: Machine, sizes: Sequence[int]) -> list[int]:
    """Where runs of devices begin: whole nodes first, then parts of nodes, the largest first, in the first with room.

    Runs that do not fit so follow one another, across nodes.
    """
    each, starts = machine.devices_per_node, [0] * len(sizes)
    whole = [i for i, size in enumerate(sizes) if size % each == 0]
    nodes = 0
    for i in whole:
        starts[i] = nodes * each
        nodes += sizes[i] // each
    filled: list[int] = []
    for i in sorted(set(range(len(sizes))) - set(whole), key=lambda i: (-sizes[i], i)):
        node = next((n for n, used in enumerate(filled) if used + sizes[i] <= each), len(filled))
        filled += [0] * (node == len(filled))
        starts[i] = (nodes + node) * each + filled[node]
        filled[node] += sizes[i]
    if nodes + len(filled) <= machine.nodes:
        return starts
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _layout(stage: Stage, choice: Choice, groups: Sequence[GroupSpec], stages: Sequence[Stage]) -> LayoutSpec:
    group = next(g for g in groups if stage.model in g.models)
    if stage.stage != GENERATE:
        return LayoutSpec(group.ranks, *choice.layout, group.first)
    within = next(s.target for s in stages if s.model == stage.model and s.stage in (TRAIN, FORWARD))
    tp = choice.generate.tp if choice.generate else choice.layout.tp  # no choice: it samples in evaluations alone
    return LayoutSpec(group.ranks, tp, 1, group.ranks // tp, group.first, within, stage.engine)


def _batching(stage: Stage, choice: Choice) -> Batching:
    """A model that trains scores in the micro-batches of training."""
    samples, tokens = stage.items.get("micro_batch", 0), stage.items.get("tokens", 0)
    if choice.micro:
        return Batching(choice.micro.samples, tokens, choice.micro.recompute)
    return Batching(samples, tokens or (0 if samples else FORWARD_TOKENS))
