"""The data of a plan, opened: relative paths are looked up beside the program, then in the working directory."""

from __future__ import annotations

from pathlib import Path

from compiler.plan import DataSpec, Plan
from runtime.data import Field, Stream, open_table


def open_sources(plan: Plan) -> dict[str, Stream]:
    """Root dim → its stream. Every row is checked here, so a bad line ends the run before it begins."""
    return {spec.root: Stream(open_table(spec.kind, locate(spec.path, plan.program.folder), _fields(spec)), spec.root, plan.run.seed)
            for spec in plan.data}


def locate(path: str, folder: str) -> Path:
    beside = Path(folder) / path
    return beside if beside.exists() or not Path(path).exists() else Path(path)


def _fields(spec: DataSpec) -> list[Field]:
    return [Field(c.field, "text" if c.response else c.elem) for c in spec.columns]
