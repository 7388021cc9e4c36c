"""A program's head to test with, and what a checked program binds."""

from __future__ import annotations

from rlhf_dsl.diagnostics import Diagnostics
from rlhf_dsl.frontend import diagnose, loads
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Checked, Expr

HEAD = """
dim b = 4
dim g = 2
dim t <= 8
param eps = 0.2 in (0, 1)
data prompts[b], answers[b] = jsonl("prompts.jsonl", "prompt", "answer")
model actor = policy("builtin:tiny") trained by adamw(lr=1e-4)
model critic = value("builtin:tiny") trained by adamw(lr=1e-4)
model ref = policy("builtin:tiny")
model reward = scorer("builtin:tiny-reward")
"""


def program(body: str, overrides=None) -> Checked:
    return loads(HEAD + body, overrides)


def values(checked: Checked) -> dict[str, Expr]:
    """What rollout and updates bind, by name; those of the second update as "1.name"."""
    found = {line.name: line.expr for line in checked.rollout if hasattr(line, "expr")}
    for update in checked.updates:
        prefix = f"{update.index}." if update.index else ""
        found.update({prefix + line.name: line.expr for line in update.body if hasattr(line, "name")})
    return found


def codes(text: str, overrides=None) -> list[str]:
    sink = Diagnostics(Source("x.rlflow", text))
    diagnose(sink.source, overrides or {}, sink)
    return [d.code for d in sink.sorted()]


def walk(expr: Expr) -> list[Expr]:
    return [expr, *(e for arg in expr.args for e in walk(arg))]
