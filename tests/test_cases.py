"""Numeric cases: small programs, fed numbers, and what must come out, computed by plain loops; a JSON file each.

title, kind: of the case and of the mistake; program: its lines; feed: `rlflow.feed/1`; args: of `rlflowc eval`
expect: compared on its keys; tolerance: |got - want| <= tolerance max(1, |want|)
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any, Optional

import pytest

from rlhf_dsl.cli import main

CASES = sorted(Path(__file__).with_name("cases").glob("*.json"))


def difference(want: Any, got: Any, tolerance: float, path: str = "") -> Optional[str]:
    """The first place where `got` is not `want`, or None. Objects compare on the keys of `want`."""
    if isinstance(want, dict) and isinstance(got, dict):
        pairs = [(f"{path}.{key}", value, got.get(key)) for key, value in want.items()]
    elif isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        pairs = [(f"{path}[{i}]", *pair) for i, pair in enumerate(zip(want, got))]
    else:
        return None if _equal(want, got, tolerance) else f"{path}: {want} is expected, found {got}"
    return next(filter(None, (difference(w, g, tolerance, place) for place, w, g in pairs)), None)


def _equal(want: Any, got: Any, tolerance: float) -> bool:
    if want is None or isinstance(want, (bool, str)):
        return got == want and isinstance(got, type(want))
    number = isinstance(got, (int, float)) and not isinstance(got, bool) and math.isfinite(got)
    return number and abs(got - want) <= tolerance * max(1.0, abs(want))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path, tmp_path):
    case = json.loads(path.read_text())
    program, feed = tmp_path / f"{path.stem}.rlflow", tmp_path / "feed.json"
    program.write_text("\n".join(case["program"]) + "\n")
    feed.write_text(json.dumps({"format": "rlflow.feed/1", **case["feed"]}))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["eval", str(program), "--feed", str(feed), "--json", *case["args"]])
    assert code == 0, err.getvalue()
    assert difference(case["expect"], json.loads(out.getvalue()), case["tolerance"]) is None


def test_comparison_sees_differences():
    assert difference({"a": [1.0, None]}, {"a": [1.0 + 1e-7, None], "b": 2}, 1e-6) is None
    for got in ({"a": [1.1, None]}, {"a": [1.0, 0]}, {"a": [1.0]}, {"a": [math.nan, None]}, {"a": [True, None]}, {}, []):
        assert difference({"a": [1.0, None]}, got, 1e-6) is not None
