"""The pages say what is so: links lead somewhere, programs check, transcripts and tables are those of today."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from markdown_cases import cases

from compiler import steps
from compiler.passes import NAMES
from rlhf_dsl.arguments import parser
from rlhf_dsl.builtins import BUILTINS, FIELDS, OPERATIONS, PRIMITIVES
from rlhf_dsl.check import prelude
from rlhf_dsl.cli import main
from rlhf_dsl.codes import CODES
from rlhf_dsl.frontend import loads

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TUTORIAL = DOCS / "tutorial"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE_LIKE_A_LINK = re.compile(r"`[^`\n]*\]\([^`\n]*`")  # `sum[t](x)`
_FENCE = re.compile(r"^```(?P<language>[^\n]*)\n(?P<body>.*?)^```$", re.M | re.S)
_FILE = re.compile(r"`((?:rlhf_dsl|compiler|runtime|programs|tests|grammars|docs)/[\w./*-]+)`")

sys.path.insert(0, str(DOCS))
import generate  # noqa: E402 - it stands beside the pages


def page_id(page: Path) -> str:
    return page.stem


@cache
def anchors(page: Path) -> frozenset[str]:
    """The headings of a page as links name them."""
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", prose, re.M)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


def blocks(page: Path, language: str) -> list[str]:
    found = _FENCE.finditer(page.read_text(encoding="utf-8"))
    return [block["body"] for block in found if block["language"] == language]


# ---- what pages refer to

@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    prose = _CODE_LIKE_A_LINK.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))
    for target in _LINK.findall(prose):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_that_are_named_exist(page):
    for name in _FILE.findall(page.read_text(encoding="utf-8")):
        assert any(ROOT.glob(name.rstrip("/"))), name


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_that_are_named_exist(page):
    known = parser().format_help()
    for command in re.findall(r"rlflowc ([a-z]+)\b", page.read_text(encoding="utf-8")):
        assert re.search(rf"^ +{command} ", known, re.M), command


def test_make_targets_of_the_readme_exist():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    named = re.findall(r"`make (\w+)`|^make (\w+)", (ROOT / "README.md").read_text(), re.M)
    assert named and {a or b for a, b in named} <= set(targets)


# ---- programs

@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for page in PAGES for case in cases(page)])
def test_programs_earn_what_is_shown(case):
    assert case.earns() == case.expected


def test_the_readme_shows_ppo():
    (shown,) = blocks(ROOT / "README.md", "python")
    assert shown in (ROOT / "programs" / "ppo.rlflow").read_text()


def test_the_tutorial_shows_its_files():
    page = DOCS / "tutorial.md"
    files = "\n".join(path.read_text() for path in sorted(TUTORIAL.iterdir()) if path.is_file())
    shown = [body for language in ("", "python", "json") for body in blocks(page, language)]
    program = (TUTORIAL / "rloo.rlflow").read_text()
    for body in shown:
        if body.startswith("plan:"):
            loads(f"{program}\n{body}", path=str(TUTORIAL / "rloo.rlflow"))
        else:
            assert body in files, body


# ---- what is made from the code

def test_tables_and_transcripts_are_those_of_today():
    changed = [str(page.relative_to(ROOT)) for page, _ in generate.outdated()]
    assert changed == [], "`python docs/generate.py` brings them up to date"


def test_every_operation_has_its_row():
    text = (DOCS / "language.md").read_text()
    forms = [entry.signature for entry in (*BUILTINS.values(), *OPERATIONS)] + [f"y.{name}" for name in FIELDS]
    assert [form for form in forms if f"`{form}`" not in text] == []
    assert [name for name in prelude() if f"| `{name}(" not in text] == []


def test_every_code_and_primitive_has_its_row():
    text = (DOCS / "language.md").read_text()
    assert [code for code in CODES if f"| {code} |" not in text] == []
    text = (DOCS / "architecture.md").read_text()
    assert [name for name in PRIMITIVES if f"| `{name}` |" not in text] == []


def test_every_pass_and_step_has_its_row():
    text = (DOCS / "architecture.md").read_text()
    names = [*NAMES, *(kind.op for kind in vars(steps).values() if isinstance(getattr(kind, "op", None), str))]
    assert "generate" in names and [name for name in names if f"`{name}`" not in text] == []


# ---- the tutorial's numbers

@pytest.mark.parametrize("split", [(), ("--dp", "2"), ("--micro-batch", "1"), ("--dp", "2", "--micro-batch", "1")])
@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_the_tutorials_program_is_rloo(beta, split, capsys):
    """Advantages and gradients by the equation of arXiv 2402.14740, in plain loops."""
    feed = TUTORIAL / "feed.json"
    assert main(["eval", str(TUTORIAL / "rloo.rlflow"), "--feed", str(feed), "-s", f"beta={beta}", "--json", *split]) == 0
    answer = json.loads(capsys.readouterr().out)
    calls = json.loads(feed.read_text())["calls"]["rollout"]
    (step,) = answer["train"]["actor"]
    gradient = step["grad"]["actor.logprobs(y)"]
    for row, scores in enumerate(calls["correct(y.text, answer)"]):
        pairs = zip(scores, calls["actor.logprobs(y)"][row], calls["ref.logprobs(y)"][row])
        rewards = [score - beta * (sum(logp) - sum(ref)) for score, logp, ref in pairs]
        for i, reward in enumerate(rewards):
            others = rewards[:i] + rewards[i + 1:]
            advantage = reward - sum(others) / len(others)
            assert answer["rollout"]["adv"][row][i] == pytest.approx(advantage, abs=1e-12)
            assert gradient[row][i] == pytest.approx([advantage / 6] * len(gradient[row][i]), abs=1e-12)
