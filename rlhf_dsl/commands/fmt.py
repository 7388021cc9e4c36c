"""`rlflowc fmt`: rewrites programs in their canonical form."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

from rlhf_dsl.diagnostics import DiagnosticError, Diagnostics, fault
from rlhf_dsl.format import format_program
from rlhf_dsl.frontend import read_source
from rlhf_dsl.parser import parse
from rlhf_dsl.source import STDIN, Source
from rlhf_dsl.terminal import show


def fmt_command(args: Namespace) -> int:
    """Exit code 0, 1 for a syntax error or, with --check, a file that would change, 2 for one that cannot be read."""
    return max(_fmt(path, args) for path in dict.fromkeys(args.programs))


def _fmt(path: str, args: Namespace) -> int:
    """A file with an error stays as it is; the others are still formatted."""
    try:
        source = read_source(path)
        text = formatted(source)
        changes = text != source.text
        if args.check and changes:
            print(path)
        elif not args.check and path == STDIN:
            sys.stdout.write(text)
        elif not args.check and changes:
            _replace(Path(path), text)
        return int(args.check and changes)
    except DiagnosticError as error:
        show(error.diagnostics, args.color)
        return error.exit_code


def formatted(source: Source) -> str:
    """The canonical text of a program. Raises DiagnosticError for one with syntax errors."""
    sink = Diagnostics(source)
    program = parse(source, sink)
    sink.raise_errors(exit_code=1)
    return format_program(program, source)


def _replace(path: Path, text: str) -> None:
    """Puts the text in the place of the file at once, with the file's permissions; links stay links."""
    target = path.resolve()
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.chmod(target.stat().st_mode)
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise fault("E0002", path=str(path), reason=error.strerror) from None
