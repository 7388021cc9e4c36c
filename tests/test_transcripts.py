"""Transcripts of the command line: pages of Markdown whose commands are run, with what they must print.

A page is one working directory, in its order. A block ```` ```python judge.py ```` writes a file into it. In a
```` ```console ```` block a line `$ COMMAND`, with the `> ` lines that go on, is run by a shell, and the lines below it
are all that it prints, standard error with standard output; `exit: N` closes it where N is not 0. In them `...` stands
for any text in a line, and a line `...` for any lines.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import pytest

from tests.running import BIN, environment

PAGES = sorted((Path(__file__).parent / "transcripts").glob("*.md"))
SLOW = ("ops", "runs")  # pages that start ranks
LIMIT_S = 180
_BLOCK = re.compile(r"^```(?P<kind>\w+)(?: (?P<file>\S+))?\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Command:
    """line: in the page; code: the exit code that it must have."""

    line: int
    command: str
    expected: str
    code: int


def commands(text: str, first: int) -> Iterator[Command]:
    """The commands of a console block that starts in line `first`."""
    lines = text.split("\n")
    starts = [i for i, line in enumerate(lines) if line.startswith("$ ")]
    for start, stop in zip(starts, [*starts[1:], len(lines)]):
        more = 1
        while lines[start + more].startswith("> "):
            more += 1
        command = "\n".join(line[2:] for line in lines[start:start + more])
        body = "\n".join(lines[start + more:stop]).strip("\n")
        found = re.search(r"(?:^|\n)exit: (\d+)$", body)
        expected = (body[:found.start()] if found else body).strip("\n")
        yield Command(first + start, command, expected, int(found[1]) if found else 0)


def matches(expected: str, printed: str) -> bool:
    """Whether a command printed what it should."""
    pattern = ""
    for line in expected.split("\n"):
        words = "[^\n]*".join(map(re.escape, line.split("...")))
        pattern += "(?:[^\n]*\n)*" if line == "..." else words + "\n"
    return re.fullmatch(pattern, printed.strip("\n") + "\n") is not None


def run(command: str, folder: Path) -> tuple[int, str]:
    """(exit code, what was printed) of a shell command in its own process group, of which nothing may be left."""
    paths = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(["bash", "-c", command], cwd=folder, env=environment(PATH=paths), stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        printed, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return process.returncode, printed


@pytest.mark.parametrize("page", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.stem in SLOW)) for p in PAGES])
def test_transcript(page, tmp_path):
    wrong = [told for told, holds in _results(page, tmp_path) if not holds]
    assert not wrong, "\n\n".join(wrong)


def _results(page: Path, folder: Path) -> Iterator[tuple[str, bool]]:
    text = page.read_text(encoding="utf-8")
    for block in _BLOCK.finditer(text):
        if block["file"]:
            (folder / block["file"]).parent.mkdir(parents=True, exist_ok=True)
            (folder / block["file"]).write_text(block["text"], encoding="utf-8")
        elif block["kind"] == "console":
            first = text.count("\n", 0, block.start("text")) + 1
            for one in commands(block["text"], first):
                code, printed = run(one.command, folder)
                told = f"{page.name}:{one.line}: $ {one.command}\n{printed.rstrip()}\nexit: {code}"
                yield told, code == one.code and matches(one.expected, printed) and "Traceback" not in printed


def write_down(page: Path, folder: Path) -> None:
    """Prints what the commands of a page print today."""
    for told, holds in _results(page, folder):
        print(f"{'' if holds else 'DIFFERS '}{told}\n")


if __name__ == "__main__":
    import tempfile

    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as place:
            write_down(Path(name), Path(place))
