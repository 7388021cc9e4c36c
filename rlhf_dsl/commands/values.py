"""What `rlflowc check -v` says of a program: the type of every named value, and which models it differentiates into."""

from __future__ import annotations

from typing import Any, Iterable, Iterator

from rlhf_dsl.typed import Bind, Checked


def values(checked: Checked) -> list[dict[str, Any]]:
    """section, name, type and gradient of each value, in the source's order; gradient: models, as they are declared."""
    return list(_values(checked))


def _values(checked: Checked) -> Iterator[dict[str, Any]]:
    for source in checked.data:
        yield from (_value("data", column.name, str(column.type)) for column in source.columns)
    for state in checked.states.values():
        yield _value("state", state.name, str(state.init.type))
    yield from _bound(checked, "rollout", checked.rollout)
    for kind, sections in (("update", checked.updates), ("eval", checked.evals)):
        for index, section in enumerate(sections):
            yield from _bound(checked, f"{kind} {index + 1}" if len(sections) > 1 else kind, section.body)


def _bound(checked: Checked, section: str, body: Iterable) -> Iterator[dict[str, Any]]:
    for line in body:
        if isinstance(line, Bind):
            models = [name for name in checked.models if name in line.expr.grad]
            yield _value(section, line.name, str(line.expr.type), models)


def _value(section: str, name: str, type: str, gradient: Iterable[str] = ()) -> dict[str, Any]:
    return {"section": section, "name": name, "type": type, "gradient": list(gradient)}


def values_text(checked: Checked) -> str:
    """A heading for each section, a line for each value: `ratio: f32[b, t]  d/d actor`."""
    table = values(checked)
    names = max((len(row["name"]) for row in table), default=0) + 2
    types = max((len(row["type"]) for row in table), default=0) + 2
    lines, section = [checked.path], ""
    for row in table:
        if row["section"] != section:
            section = row["section"]
            lines.append(f"  {section}")
        slopes = "  ".join(f"d/d {model}" for model in row["gradient"])
        lines.append(f"    {row['name'] + ':':{names}}{row['type']:{types}}{slopes}".rstrip())
    return "\n".join(lines) + "\n"
