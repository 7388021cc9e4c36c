"""The table of all diagnostics, one module a family."""

from __future__ import annotations

from rlhf_dsl.codes import (
    dims, names, parameters, planning, python_ops, roles, rows, running, syntax, training, warnings,
)
from rlhf_dsl.codes.code import Code

__all__ = ["CODES", "Code"]

_FAMILIES = (syntax, names, dims, roles, training, parameters, python_ops, planning, running, rows, warnings)


def _merge() -> dict[str, Code]:
    table: dict[str, Code] = {}
    for entry in (entry for family in _FAMILIES for entry in family.CODES):
        if entry.code in table:
            raise ValueError(f"diagnostic code {entry.code} stands twice in the table")
        table[entry.code] = entry
    return table


CODES: dict[str, Code] = _merge()
