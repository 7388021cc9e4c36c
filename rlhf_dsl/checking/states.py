"""States: `state x = INIT then NEXT`."""

from __future__ import annotations

from typing import Optional

from rlhf_dsl import ast
from rlhf_dsl.checking.broadcast import NUMBERS, expect
from rlhf_dsl.checking.context import Context
from rlhf_dsl.checking.infer import infer
from rlhf_dsl.diagnostics import Label
from rlhf_dsl.typed import Expr, State, walk


def initial(cx: Context, node: ast.State) -> Optional[Expr]:
    """INIT: a scalar of params and dims."""
    init = infer(cx, node.init)
    if init is None or not expect(cx, (node.init, init), *NUMBERS):
        return None
    cx.tables.state_types[node.name.id] = init.type
    return init


def following(cx: Context, node: ast.State, init: Expr) -> Optional[State]:
    """NEXT: a scalar of rollout values, params and states, after every `keep`."""
    value = infer(cx.at(state=node.name.id), node.next)
    if value is None:
        return None
    if value.type.dims or value.type.elem not in NUMBERS:
        cx.error("E0215", node.next.span, [Label(node.name.span, "the state")], what="a state", type=value.type)
        return None
    if init.type.elem == "bool" and not expect(cx, (node.next, value), "bool"):
        return None
    return State(node.name.id, init, value, node.span)


def report_cycles(cx: Context, states: dict[str, State]) -> None:
    """A state's new value may not need itself."""
    needs = {name: _needed(state.next) for name, state in states.items()}
    reported: set[str] = set()
    for name in states:
        cycle = _cycle(name, needs)
        if cycle is None or reported & set(cycle):
            continue
        reported |= set(cycle)
        labels = [Label(states[other].span, f"`{other}`") for other in cycle[1:-1]]
        path = " needs ".join(f"`next({other})`" for other in cycle)
        cx.error("E0407", states[name].span, labels, name=name, path=path)


def _needed(expr: Expr) -> frozenset[str]:
    return frozenset(e.attr("name") for e in walk(expr) if e.op == "next_state")


def _cycle(start: str, needs: dict[str, frozenset]) -> Optional[list[str]]:
    """A shortest path from a state back to itself."""
    paths, seen = [[start]], set()
    while paths:
        path = paths.pop(0)
        for other in sorted(needs.get(path[-1], ())):
            if other == start:
                return [*path, other]
            if other not in seen:
                seen.add(other)
                paths.append([*path, other])
    return None
