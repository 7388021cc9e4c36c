"""Every program in tests/language/*.md earns exactly the diagnostics that stand below it."""

from pathlib import Path

import pytest
from markdown_cases import cases, result

FOLDER = Path(__file__).with_name("language")
ALL = [
    pytest.param(case, id=f"{path.stem}: {case.name}")
    for path in sorted(FOLDER.glob("*.md")) for case in cases(path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("case", ALL)
def test_diagnostics(case, tmp_path):
    assert result(case, tmp_path) == case.expected


def test_a_program_without_expectation_is_refused():
    with pytest.raises(ValueError, match="without expected"):
        list(cases("# one\n```rlflow\ndim b = 1\n```\n"))
