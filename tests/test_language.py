"""Every program in tests/language/*.md earns exactly the diagnostics that stand below it."""

import re
from pathlib import Path

import pytest
from markdown_cases import cases

from rlhf_dsl.codes import CODES

PAGES = sorted(Path(__file__).with_name("language").glob("*.md"))
ALL = [pytest.param(case, id=case.name) for page in PAGES for case in cases(page)]


@pytest.mark.parametrize("case", ALL)
def test_diagnostics(case):
    assert case.earns() == case.expected


TOO_LARGE = "E0035"  # takes a program that no page can hold: tests/test_fuzz.py
SYNTAX = [c for c in CODES if c.startswith("E00") and CODES[c].exit_code == 1 and c != TOO_LARGE]


@pytest.mark.parametrize("code", SYNTAX)
def test_every_syntax_error_is_on_the_page(code):
    page = next(page for page in PAGES if page.stem == "syntax")
    assert f"error[{code}]" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("case", ALL)
def test_every_diagnostic_names_a_way_out(case):
    for told in re.split(r"\n\n(?=(?:error|warning)\[)", case.expected):
        assert "= help: " in told or not told.startswith(("error[", "warning["))
