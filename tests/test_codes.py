"""The table of diagnostics against everything that uses it: raise sites, example programs, tests, help texts."""

from __future__ import annotations

import ast
import re
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Optional

import pytest

from rlhf_dsl.codes import CODES, Code
from rlhf_dsl.diagnostics import Diagnostics
from rlhf_dsl.frontend import diagnose
from rlhf_dsl.source import Source

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("rlhf_dsl", "compiler", "runtime")
FAMILY = re.compile(r"[EPRW]0\d\d\d")
NOT_WORDS = {"source", "place", "labels", "help", "exit_code"}
# Raised with the words of a template that are not there yet filled in by who calls them.
FILLED_LATER = {"SignatureError": {"file"}, "_at": {"rank", "iteration", "step"}}
FOR_HELP = {"SignatureError": {"module", "candidates"}}  # from which whoever catches it makes the help
# What no program alone can show: the command line, files, plans, runs. Overrides and imports have tests of their own.
OUTSIDE = {f"E{n:04}" for n in (1, 2, 3, 4, 5, 22, 35, 306, 502, 503, *range(602, 611))}
OUTSIDE |= {code for code in CODES if code[0] in "PR"}


@dataclass(frozen=True)
class Site:
    """A call with a code as its argument. words: keywords given, None if some come as `**words`."""

    where: str
    callee: str
    code: str
    words: frozenset[Optional[str]]


def sites() -> Iterator[Site]:
    for path in (p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py")) if p.parent.name != "codes"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield from _sites(node, f"{path.relative_to(ROOT)}:{node.lineno}")


def _sites(node: ast.Call, where: str) -> Iterator[Site]:
    callee = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    for arg in node.args:
        if isinstance(arg, ast.Constant) and isinstance(arg.value, str) and FAMILY.fullmatch(arg.value):
            yield Site(where, callee, arg.value, frozenset(k.arg for k in node.keywords))


SITES = list(sites())


def fields(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name}


def earned(text: str) -> set[str]:
    sink = Diagnostics(Source("p.rlflow", text))
    diagnose(sink.source, {}, sink)
    return {item.code for item in sink.items}


# ---- raise sites

@pytest.mark.parametrize("site", SITES, ids=lambda site: site.where)
def test_a_site_gives_all_words(site):
    """Every word of the message, and of the table's help unless it brings its own, and no word that nothing reads."""
    assert site.code in CODES
    entry = CODES[site.code]
    if None in site.words:
        return
    needed = fields(entry.message) | (set() if "help" in site.words else fields(entry.help))
    assert needed - FILLED_LATER.get(site.callee, set()) <= site.words
    assert site.words - NOT_WORDS - FOR_HELP.get(site.callee, set()) <= needed | fields(entry.help)


def test_the_scan_sees_the_sites():
    assert len(SITES) > 250 and {site.code for site in SITES} == set(CODES)


@pytest.mark.parametrize("code", CODES)
def test_a_code_has_a_way_out_of_its_own(code):
    """In the table, or at each place that raises it."""
    assert CODES[code].help or all("help" in site.words or None in site.words for site in SITES if site.code == code)


def test_no_two_codes_have_one_explanation():
    texts = [entry.explanation for entry in CODES.values()]
    assert len(texts) == len(set(texts))


# ---- programs

def test_a_program_shows_it_where_one_can():
    assert {code for code, entry in CODES.items() if not entry.wrong} == OUTSIDE
    assert all(entry.right for entry in CODES.values() if entry.wrong and entry.code != "E0601")  # needs a module


@pytest.mark.parametrize("entry", [e for e in CODES.values() if e.wrong], ids=lambda e: e.code)
def test_the_wrong_program_earns_this_alone_and_the_right_one_nothing(entry: Code):
    """Apart from warnings, which short programs earn by being short; an entry for a warning has none beside it."""
    hushed = {c for c in CODES if c.startswith("W")} if entry.severity == "error" else set()
    assert earned(entry.wrong) - hushed == {entry.code}
    assert earned(entry.right) - hushed == set()


# ---- tests

def _shown(pattern: str) -> str:
    pages = (p for p in (ROOT / "tests").rglob(pattern) if p.name not in ("test_codes.py",))
    return "\n".join(page.read_text(encoding="utf-8") for page in sorted(pages))


@pytest.fixture(scope="module")
def shown() -> dict[str, str]:
    return {kind: _shown(f"*.{kind}") for kind in ("md", "py")}


@pytest.mark.parametrize("code", CODES)
def test_a_test_shows_it(code, shown):
    """What a program earns stands on a page with its message; for the rest a test that names the code will do."""
    if CODES[code].wrong:
        assert f"{CODES[code].severity}[{code}]" in shown["md"]
    else:
        assert code in shown["md"] or code in shown["py"]
