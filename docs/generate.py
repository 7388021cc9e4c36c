"""Writes into the pages what can be known from the code: reference tables, and what commands print.

    python docs/generate.py            rewrites the pages that are out of date
    python docs/generate.py --check    names them instead, exit code 1 if there are any

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. A fenced block `console` is a transcript: lines that
begin with `$ rlflowc` are commands, run in the folder that has the page's name, and what follows them is what they print.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Callable, Iterable, Iterator

from compiler.resharding import transition_tables
from rlhf_dsl import ast
from rlhf_dsl.builtins import BUILTINS, FIELDS, OPERATIONS, PRIMITIVES
from rlhf_dsl.check import prelude
from rlhf_dsl.cli import main as rlflowc
from rlhf_dsl.codes import CODES
from rlhf_dsl.commands.explain_code import FAMILIES
from rlhf_dsl.diagnostics import Diagnostics
from rlhf_dsl.frontend import read_source
from rlhf_dsl.parser import parse

DOCS = Path(__file__).resolve().parent
PROMPT = "$ rlflowc "
_TABLE = re.compile(r"(?P<begin><!-- table: (?P<name>[\w.]+) -->\n).*?(?P<end><!-- end -->)", re.S)
_TRANSCRIPT = re.compile(r"(?P<begin>^```console\n)(?P<body>.*?)(?P<end>^```$)", re.M | re.S)


# ---- tables --------------------------------------------------------------------------------------

def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


def builtins(*kinds: str) -> str:
    entries = (entry for entry in BUILTINS.values() if entry.kind in kinds)
    return table(("form", "meaning"), ((f"`{entry.signature}`", entry.meaning) for entry in entries))


def fields() -> str:
    return table(("form", "meaning"), ((f"`y.{name}`", meaning) for name, meaning in FIELDS.items()))


def operations() -> str:
    return table(("role", "operation", "one value", "meaning"), (
        (entry.role, f"`{entry.signature}`", f"per {entry.per}", entry.meaning) for entry in OPERATIONS))


def prelude_functions() -> str:
    return table(("function", "meaning"), ((f"`{_signature(fn)}`", fn.doc) for fn in prelude().values()))


def _signature(fn: ast.Fn) -> str:
    formals = (f.name.id + (f"[{', '.join(d.id for d in f.dims)}]" if f.dims else "") for f in fn.formals)
    return f"{fn.name.id}({', '.join(formals)})"


def primitives() -> str:
    return table(("primitive", "kind", "signature", "gradient", "meaning"), (
        (f"`{p.name}`", p.kind, f"`{p.signature}`", "yes" if p.differentiable else "no", p.meaning)
        for p in PRIMITIVES.values()))


def programs() -> str:
    """The programs that come with the package, by the first sentence of their documentation."""
    files = sorted((DOCS.parent / "programs").glob("*.rlflow"))
    return table(("program", "algorithm"), (
        (f"[`{file.stem}`](programs/{file.name})", _first_sentence(file)) for file in files))


def _first_sentence(file: Path) -> str:
    source = read_source(file)
    doc = " ".join(parse(source, Diagnostics(source)).doc.split())
    return re.split(r"(?<=\w{3}\.)\s", doc)[0]


def codes() -> str:
    """All codes, family by family."""
    return "\n".join(f"**{title}**\n\n{_family(prefix)}" for prefix, title in FAMILIES.items())


def _family(prefix: str) -> str:
    entries = [entry for entry in CODES.values() if entry.code.startswith(prefix)]
    return table(("code", "message", "exit code"), (
        (entry.code, re.sub(r"{[\w:]+}", "…", entry.message), str(entry.exit_code)) for entry in entries))


def strategies() -> str:
    head = ("model and layouts", "strategy", "received", "formula", "kept twice", "peak", "unbounded", "within nodes",
            "between nodes")
    return table(head, transition_tables.strategy_rows())


def protocols() -> str:
    head = ("layout", "a call takes", "who gets the same", "it gives", "who gives", "protocol")
    return table(head, transition_tables.protocol_rows())


TABLES: dict[str, Callable[[], str]] = {
    "elementwise": lambda: builtins("elementwise"),
    "reductions": lambda: builtins("reduction", "choice"),
    "ragged": lambda: builtins("ragged"),
    "responses": lambda: builtins("response"),
    "fields": fields,
    "operations": operations,
    "prelude": prelude_functions,
    "primitives": primitives,
    "codes": codes,
    "programs": programs,
    "strategies": strategies,
    "protocols": protocols,
}


# ---- transcripts ---------------------------------------------------------------------------------

def transcript(body: str, folder: Path) -> str:
    """The commands of a transcript, each with what it prints today."""
    commands = [line for line in body.splitlines() if line.startswith(PROMPT)]
    return "\n".join(f"{line}\n{printed(shlex.split(line)[2:], folder)}" for line in commands)


def printed(arguments: list[str], folder: Path) -> str:
    """Standard error and standard output of `rlflowc`, as they come."""
    stream, before = io.StringIO(), os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            rlflowc(arguments)
    finally:
        os.chdir(before)
    return stream.getvalue()


# ---- pages ---------------------------------------------------------------------------------------

def pages() -> list[Path]:
    return [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]


def rewritten(page: Path) -> str:
    """The page with its tables and transcripts of today."""
    def with_table(found: re.Match) -> str:
        return f"{found['begin']}{TABLES[found['name']]()}{found['end']}"

    def with_transcript(found: re.Match) -> str:
        return f"{found['begin']}{transcript(found['body'], page.with_suffix(''))}{found['end']}"

    text = _TABLE.sub(with_table, page.read_text(encoding="utf-8"))
    return _TRANSCRIPT.sub(with_transcript, text)


def outdated() -> Iterator[tuple[Path, str]]:
    """(page, its text of today) of each page that differs from it."""
    for page in pages():
        text = rewritten(page)
        if text != page.read_text(encoding="utf-8"):
            yield page, text


def main(arguments: list[str]) -> int:
    found = list(outdated())
    for page, text in found:
        print(page.relative_to(DOCS.parent))
        if "--check" not in arguments:
            page.write_text(text, encoding="utf-8")
    return int("--check" in arguments and bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
