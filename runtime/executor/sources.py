"""The data of a plan, opened: relative paths are looked up beside the program, then in the working directory."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from compiler.plan import DataSpec, Load, Plan
from runtime.data import Field, Stream, open_table


def open_sources(plan: Plan) -> dict[str, Stream]:
    """Root dim → its stream. Every row is checked here, so a bad line ends the run before it begins."""
    return {spec.root: Stream(open_table(spec.kind, locate(spec.path, plan.program.folder), _fields(spec)), spec.root, plan.run.seed)
            for spec in plan.data}


def with_steps(plan: Plan, sources: dict[str, Stream]) -> Plan:
    """The plan with `run.steps` filled in where the program gives `epochs`: passes over the first data that it loads."""
    if plan.run.steps or not plan.run.epochs:
        return plan
    root = next(step.name for step in plan.steps if isinstance(step, Load))
    steps = math.ceil(plan.run.epochs * sources[root].table.size / plan.dims[root].size)
    return dataclasses.replace(plan, run=dataclasses.replace(plan.run, steps=steps))


def locate(path: str, folder: str) -> Path:
    beside = Path(folder) / path
    return beside if beside.exists() or not Path(path).exists() else Path(path)


def _fields(spec: DataSpec) -> list[Field]:
    return [Field(c.field, "text" if c.response else c.elem) for c in spec.columns]
