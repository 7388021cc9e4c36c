"""Programs with the diagnostics they earn, as Markdown pages.

A case is a fenced `rlflow` block and the `text` block right after it, which holds all its diagnostics exactly as they
are printed, or "ok"; without one the program earns nothing. Its name is the heading above it. Overrides stand behind
the language, as in ```` ```rlflow -s b=8 ````; modules that a program imports stand beside the pages.

    python -m tests.markdown_cases tests/language/*.md

writes the diagnostics of today into the pages: read the difference before you keep it.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

from rlhf_dsl.diagnostics import Diagnostics
from rlhf_dsl.frontend import diagnose
from rlhf_dsl.render import render
from rlhf_dsl.source import Source

OK = "ok"
_CASE = re.compile(
    r"^```rlflow(?P<options>[^\n]*)\n(?P<program>.*?)^```\n(?:\n```text\n(?P<expected>.*?)\n```\n)?", re.M | re.S)
_HEADING = re.compile(r"^#+ (.*)$", re.M)


@dataclass(frozen=True)
class Case:
    """name: page, line and heading; path: of the program, as if it stood beside the page; overrides: pairs."""

    name: str
    path: Path
    program: str
    overrides: tuple[tuple[str, str], ...]
    expected: str

    def earns(self) -> str:
        """What the program earns, with the page's folder as working directory."""
        before = os.getcwd()
        os.chdir(self.path.parent)
        try:
            sink = Diagnostics(Source(self.path.name, self.program))
            diagnose(sink.source, dict(self.overrides), sink)
        finally:
            os.chdir(before)
        return render(sink.sorted()).strip("\n") or OK


def cases(page: Path) -> Iterator[Case]:
    """The cases of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return (_case(page, text, found) for found in _CASE.finditer(text))


def _case(page: Path, text: str, found: re.Match) -> Case:
    heading = _HEADING.findall(text, 0, found.start())[-1].replace("`", "")
    line = text.count("\n", 0, found.start()) + 1
    overrides = tuple(tuple(pair.split("=", 1)) for pair in re.findall(r"-s (\S+)", found["options"]))
    name = f"{page.stem}:{line} {heading}"
    return Case(name, page.with_suffix(".rlflow"), found["program"], overrides, found["expected"] or OK)


def update(page: Path) -> None:
    """Writes the diagnostics of today into a page."""
    text = page.read_text(encoding="utf-8")

    def with_diagnostics(found: re.Match) -> str:
        earned = _case(page, text, found).earns()
        block = f"\n```text\n{earned}\n```\n" if earned != OK or found["expected"] else ""
        return f"```rlflow{found['options']}\n{found['program']}```\n{block}"

    page.write_text(_CASE.sub(with_diagnostics, text), encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        update(Path(name))
