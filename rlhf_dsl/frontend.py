"""From a file to a checked program: the door for everything that starts with a program."""

from __future__ import annotations

import codecs
import os
import sys
from pathlib import Path
from typing import Mapping, Optional, Union

from rlhf_dsl.check import check
from rlhf_dsl.diagnostics import Diagnostics, diagnostic, fault
from rlhf_dsl.parser import parse
from rlhf_dsl.source import STDIN, Source
from rlhf_dsl.typed import Checked

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

Overrides = Mapping[str, str]


def load(path: Union[str, Path], overrides: Optional[Overrides] = None) -> Checked:
    """The checked program of a file, or of standard input for "-".

    overrides: values of dims, params and settings by name, as written on the command line: {"eps": "0.1"}
    Raises DiagnosticError with all diagnostics: exit code 1 for faults of the program, 2 for an unreadable file.
    """
    return check_source(read_source(path), overrides)


def loads(text: str, overrides: Optional[Overrides] = None, path: str = "program.rlflow") -> Checked:
    """As `load`, of a program's text; `path` names it in messages and is where relative paths start."""
    return check_source(Source(path, text), overrides)


def check_source(source: Source, overrides: Optional[Overrides] = None) -> Checked:
    """Parses and checks. Raises DiagnosticError (exit code 1) with all diagnostics, warnings among them."""
    sink = Diagnostics(source)
    checked = diagnose(source, overrides or {}, sink)
    sink.raise_errors(exit_code=1)
    return checked


def diagnose(source: Source, overrides: Overrides, sink: Diagnostics) -> Optional[Checked]:
    """The checked program, or None with the reasons in `sink`. A program with syntax errors is not checked further."""
    try:
        program = parse(source, sink)
        return None if sink.has_errors else check(program, source, dict(overrides), sink)
    except RecursionError:  # values built on values, each on the last, deeper than any single expression
        sink.add(diagnostic("E0022", place=source.path))
        return None


def read_source(path: Union[str, Path]) -> Source:
    """The text of a file, or of standard input for "-". Raises DiagnosticError (exit code 2) if it cannot be read."""
    name = os.fspath(path)
    try:
        raw = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except FileNotFoundError:
        raise fault("E0001", path=name, help=_similar(Path(name))) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise fault("E0002", path=name, reason=getattr(error, "strerror", None) or str(error)) from None
    return Source(name, _decode(raw, name))


def _decode(raw: bytes, name: str) -> str:
    """Text with newlines as "\\n" and without a byte order mark."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        help = "convert it: `iconv -f utf-16 -t utf-8`" if raw.startswith(_UTF_16) else None
        raise fault("E0003", path=name, place=f"{name}:{line}", help=help) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise fault("E0003", path=name, place=f"{name}:{line}", help="it holds a null byte; is it a program at all?")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _similar(path: Path) -> str:
    """Programs beside a path that is not there."""
    try:
        names = sorted(p.name for p in path.parent.glob("*.rlflow"))
    except OSError:
        return ""
    near = [name for name in names if Path(name).stem == path.stem] or names[:5]
    return f"in that folder: {', '.join(near)}" if near else ""
