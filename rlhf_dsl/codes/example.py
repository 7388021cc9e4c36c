"""What the example programs of the table have in common."""

from __future__ import annotations

_DECLARED = 'dim b = 4\ndim g = 2\ndim t <= 8\ndata q[b] = jsonl("q.jsonl", "prompt")\n'
_MODELS = (
    'model actor = policy("builtin:tiny") trained by adamw(lr=1e-4)\n'
    'model reward = scorer("builtin:tiny-reward")\n'
)
_SAMPLE = "    y[b, g, t] = actor.generate(q)\n    r = reward.score(y)\n"


def declared(*lines: str) -> str:
    """Dims, data, and the given lines."""
    return _DECLARED + "\n".join(lines)


def rolled(*lines: str) -> str:
    """A rollout of a policy and a reward with the given lines at its end."""
    return _DECLARED + _MODELS + "rollout:\n" + _SAMPLE + "\n".join(f"    {line}" for line in lines)


def updated(*lines: str, head: str = "update:", before: str = "") -> str:
    """The same rollout, and an update of the given lines; `before` are declarations."""
    body = "\n".join(f"    {line}" for line in lines)
    return _DECLARED + _MODELS + before + "rollout:\n" + _SAMPLE + f"{head}\n{body}"
