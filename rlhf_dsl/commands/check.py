"""`rlflowc check`: all that can be said about programs without running anything."""

from __future__ import annotations

from argparse import Namespace

from rlhf_dsl.diagnostics import Diagnostic, DiagnosticError, Diagnostics
from rlhf_dsl.frontend import diagnose, read_source
from rlhf_dsl.render import to_json
from rlhf_dsl.terminal import put_json, say, show


def check_command(args: Namespace) -> int:
    """Exit code 0, 1 if a program has errors, 2 if a file cannot be read; warnings change nothing."""
    found = {path: _check(path, args.set) for path in dict.fromkeys(args.programs)}
    if args.json:
        files = [{"path": path, "ok": not code, "diagnostics": [to_json(d) for d in items]}
                 for path, (code, items) in found.items()]
        put_json({"format": "rlflow.check/1", "files": files})
    else:
        show([d for _, items in found.values() for d in items], args.color)
        say(_summary([items for _, items in found.values()]))
    return max(code for code, _ in found.values())


def _check(path: str, overrides: dict[str, str]) -> tuple[int, tuple[Diagnostic, ...]]:
    """(exit code, diagnostics) of a file."""
    try:
        source = read_source(path)
    except DiagnosticError as error:
        return error.exit_code, error.diagnostics
    sink = Diagnostics(source)
    diagnose(source, overrides, sink)
    return int(sink.has_errors), sink.sorted()


def _summary(found: list[tuple[Diagnostic, ...]]) -> str:
    severities = [d.severity for items in found for d in items]
    counts = [_count(severities.count(s), s) for s in ("error", "warning") if s in severities]
    return f"{_count(len(found), 'program')}: {', '.join(counts) or 'no errors'}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
