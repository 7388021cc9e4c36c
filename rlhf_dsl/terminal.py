"""What the command line says to people and to programs: data on standard output, talk on standard error."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any, Iterable, Sequence, TextIO

from rlhf_dsl.diagnostics import Diagnostic
from rlhf_dsl.render import render


def wants_color(choice: str, stream: TextIO) -> bool:
    """choice: "auto", "always" or "never"; "auto" is a terminal without NO_COLOR (https://no-color.org)."""
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def show(diagnostics: Iterable[Diagnostic], color: str = "auto") -> None:
    """Diagnostics on standard error."""
    text = render(diagnostics, wants_color(color, sys.stderr))
    if text:
        print(text, file=sys.stderr)


def say(text: str) -> None:
    print(text, file=sys.stderr)


def put_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def make_printable(streams: Sequence[TextIO]) -> None:
    """A stream whose encoding lacks a character shows an escape in its place."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
