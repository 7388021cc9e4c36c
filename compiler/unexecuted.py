"""What the language has and the runtime does not execute yet: refused with a diagnostic, never run as something else."""

from __future__ import annotations

from typing import Iterator

from compiler.exprs import walk
from rlhf_dsl.diagnostics import fault
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Bind, Checked, Expr


def refuse(checked: Checked) -> None:
    """Raises P0111 for the first form that no engine executes. `rlflowc eval` evaluates its equations all the same."""
    source = Source(checked.path, checked.text)
    for expr in _generations(checked):
        if expr.attr("env"):
            raise fault("P0111", expr.span, source=source, what="multi-turn generation, `env=`")
    if checked.run.lag:
        raise fault("P0111", place=checked.path, what="one-step asynchrony, `lag = 1`", help="take it out: `lag = 0` is exact")


def _generations(checked: Checked) -> Iterator[Expr]:
    sections = (checked.rollout, *(section.body for section in checked.evals))
    binds = [s.expr for section in sections for s in section if isinstance(s, Bind)]
    return (e for e in walk(*binds) if e.op == "generate")
