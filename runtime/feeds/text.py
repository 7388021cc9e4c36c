"""The answer of `rlflowc eval` for people."""

from __future__ import annotations

from typing import Any


def answer_text(answer: dict[str, Any]) -> str:
    """One line a value, with lists shortened to six significant digits."""
    lines = []
    for section in ("rollout", "update", "metrics", "state", "kept"):
        for name, value in answer[section].items():
            lines.append(f"{section:<8} {name} = {_short(value)}")
    for model, steps in answer["train"].items():
        for i, step in enumerate(steps, 1):
            lines.append(f"train    {model} step {i}: objective {_short(step['objective'])}")
            lines += [f"           d/d {call} = {_short(grad)}" for call, grad in step["grad"].items()]
    if answer["skipped"]:
        lines.append("nothing was kept: no model, no state changes")
    return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "null" if value is None else str(value)
