"""`rlflowc check`: all that can be said about programs without running anything."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, Optional

from rlhf_dsl.commands.values import values, values_text
from rlhf_dsl.diagnostics import Diagnostic, DiagnosticError, Diagnostics
from rlhf_dsl.frontend import diagnose, read_source
from rlhf_dsl.render import to_json
from rlhf_dsl.terminal import put_json, say, show
from rlhf_dsl.typed import Checked


def check_command(args: Namespace) -> int:
    """Exit code 0, 1 if a program has errors, 2 if a file cannot be read; warnings change nothing."""
    found = {path: _check(path, args.set) for path in dict.fromkeys(args.programs)}
    if args.json:
        files = [_to_json(path, *result, args.verbose) for path, result in found.items()]
        put_json({"format": "rlflow.check/1", "files": files})
        return max(code for code, _, _ in found.values())
    if args.verbose:
        print("\n".join(values_text(checked) for _, _, checked in found.values() if checked is not None), end="")
    show([d for _, items, _ in found.values() for d in items], args.color)
    say(_summary([items for _, items, _ in found.values()]))
    return max(code for code, _, _ in found.values())


def _check(path: str, overrides: dict[str, str]) -> tuple[int, tuple[Diagnostic, ...], Optional[Checked]]:
    """(exit code, diagnostics, program unless it has errors) of a file."""
    try:
        source = read_source(path)
    except DiagnosticError as error:
        return error.exit_code, error.diagnostics, None
    sink = Diagnostics(source)
    checked = diagnose(source, overrides, sink)
    return int(sink.has_errors), sink.sorted(), checked


def _to_json(path: str, code: int, items: tuple[Diagnostic, ...], checked: Optional[Checked],
             verbose: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"path": path, "ok": not code, "diagnostics": [to_json(d) for d in items]}
    if verbose and checked is not None:
        found["values"] = values(checked)
    return found


def _summary(found: list[tuple[Diagnostic, ...]]) -> str:
    severities = [d.severity for items in found for d in items]
    counts = [_count(severities.count(s), s) for s in ("error", "warning") if s in severities]
    return f"{_count(len(found), 'program')}: {', '.join(counts) or 'no errors'}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
