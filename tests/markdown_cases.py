"""Programs with the diagnostics they earn, as Markdown.

A case is a fenced `rlflow` block and the `text` block after it: "ok", or all diagnostics exactly as they are printed. Its name is
the heading above it. Overrides stand behind the language (```` ```rlflow -s b=8 ````); a Python module that the program imports
stands in a `python` block with its path (```` ```python rewards/math.py ````) before it.

    python tests/markdown_cases.py tests/language/*.md

writes the diagnostics of today into the files: read the difference before you keep it.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

from rlhf_dsl.diagnostics import Diagnostics
from rlhf_dsl.frontend import diagnose
from rlhf_dsl.render import render
from rlhf_dsl.source import Source

PROGRAM = "program.rlflow"
_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$|^#+ (?P<heading>[^\n]*)$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Case:
    """`expected` stands at `span` of the Markdown text; `files` are (path, text) pairs."""

    name: str
    program: str
    overrides: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, str], ...]
    expected: str
    span: tuple[int, int]


def cases(text: str) -> Iterator[Case]:
    """The cases of a Markdown text in order. Raises ValueError for a program without expectation."""
    heading, program, overrides, files = "", None, (), ()
    for block in _FENCE.finditer(text):
        if block["heading"] is not None:
            heading, files = block["heading"].replace("`", ""), ()
            continue
        language, *words = block["info"].split()
        if language == "python" and words:
            files += ((words[0], block["body"]),)
        elif language == "rlflow":
            if program is not None:
                raise ValueError(f"{heading}: a program without expected diagnostics")
            program, overrides = block["body"], tuple(tuple(w.split("=", 1)) for w in words if w != "-s")
        elif language == "text" and program is not None:
            yield Case(heading, program, overrides, files, block["body"].rstrip("\n"), block.span("body"))
            program = None
    if program is not None:
        raise ValueError(f"{heading}: a program without expected diagnostics")


def result(case: Case, folder: Path) -> str:
    """What the program earns, with `folder` as working directory."""
    for name, text in case.files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    before = os.getcwd()
    os.chdir(folder)
    try:
        sink = Diagnostics(Source(PROGRAM, case.program))
        diagnose(sink.source, dict(case.overrides), sink)
    finally:
        os.chdir(before)
    return render(sink.sorted()).rstrip("\n") or "ok"


def update(path: Path) -> None:
    """Writes the diagnostics of today into a file."""
    text = path.read_text(encoding="utf-8")
    for case in reversed(list(cases(text))):
        with tempfile.TemporaryDirectory() as folder:
            start, end = case.span
            text = text[:start] + result(case, Path(folder)) + "\n" + text[end:]
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        update(Path(name))
