"""Places in the program of a plan, for messages: a plan carries the text of the lines that its steps come from."""

from __future__ import annotations

from typing import Any

from compiler.plan import Plan
from rlhf_dsl.ast import Span
from rlhf_dsl.source import Source


def place_of(plan: Plan, line: int) -> tuple[Span | None, dict[str, Any]]:
    """(span, keywords) for `fault` and `diagnostic`: the statement in a line, or the file where the plan lacks the line."""
    text = plan.line_text(line)
    if not text.strip():
        return None, {"place": f"{plan.program.path}:{line}" if line else plan.program.path}
    start = line - 1  # the lines before it, empty here, are a newline each
    span = Span(start + len(text) - len(text.lstrip()), start + len(_code(text).rstrip()))
    return span, {"source": Source(plan.program.path, "\n" * start + text)}


def _code(text: str) -> str:
    """The line without its comment."""
    quoted = False
    for i, char in enumerate(text):
        quoted ^= char == '"'
        if char == "#" and not quoted:
            return text[:i]
    return text
