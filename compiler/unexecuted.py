"""What the language has and the runtime does not execute yet: refused with a diagnostic, never run as something else."""

from __future__ import annotations

from typing import Iterator

from compiler.exprs import walk
from rlhf_dsl.diagnostics import fault
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Bind, Checked, Expr, Keep

NAMED = {"call": "a model", "pyop": "a Python op", "state": "a state", "next_state": "a state"}
KNOWN_LATE = frozenset(NAMED)


def refuse(checked: Checked) -> None:
    """Raises P0111 for the first form that no engine executes. `rlflowc eval` evaluates its equations all the same."""
    source = Source(checked.path, checked.text)
    for expr in _generations(checked):
        if expr.attr("env"):
            raise fault("P0111", expr.span, source=source, what="multi-turn generation, `env=`")
    if checked.run.lag:
        _refuse_ahead(checked, source)


def _refuse_ahead(checked: Checked, source: Source) -> None:
    """With `lag = 1` a batch is sampled before its iteration: its prompts hold nothing that only this one knows."""
    for statement in checked.rollout:
        if isinstance(statement, Keep) and statement.refill:
            raise fault("P0111", statement.span, source=source, what="`refill` with `lag = 1`")
    for expr in walk(*(s.expr for s in checked.rollout if isinstance(s, Bind))):
        late = [e for e in walk(*expr.args) if e.op in KNOWN_LATE] if expr.op == "generate" else []
        if late or expr.op == "generate" and expr.attr("keep", 0):
            why = f"prompts that read {NAMED[late[0].op]}" if late else "a response below a `keep`"
            raise fault("P0111", expr.span, source=source, what=f"with `lag = 1`, {why}")


def _generations(checked: Checked) -> Iterator[Expr]:
    sections = (checked.rollout, *(section.body for section in checked.evals))
    binds = [s.expr for section in sections for s in section if isinstance(s, Bind)]
    return (e for e in walk(*binds) if e.op == "generate")
