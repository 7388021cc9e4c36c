"""Signatures of Python ops: read from source, never by running it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_dsl import F32, Text, op
from rlhf_dsl.diagnostics import DiagnosticError
from rlhf_dsl.frontend import load
from rlhf_dsl.ops import SignatureError, annotation_dims, annotation_element, find_module, options_of, read_op

PROGRAM = """
dim b = 4
dim t <= 8
data prompts[b] = jsonl("prompts.jsonl", "prompt")
from {module} import f
model actor = policy("builtin:tiny")
rollout:
    y[b, t] = actor.generate(prompts)
    metric r = mean(f(y.text))
"""
GOOD = "from rlhf_dsl import op\n@op\ndef f(response: str) -> float:\n    return 1.0\n"


def read(tmp_path: Path, text: str):
    file = tmp_path / "m.py"
    file.write_text(text)
    return read_op("f", "m", file)


def fails(tmp_path: Path, text: str) -> str:
    with pytest.raises(SignatureError) as caught:
        read(tmp_path, text)
    return caught.value.code


def test_a_plain_signature(tmp_path):
    found = read(tmp_path, GOOD)
    assert found.args == (("response", "str"),) and found.result == "f32"
    assert not found.batched and found.on_error is None and found.line == 3


@pytest.mark.parametrize("head", [
    "from rlhf_dsl import op as reward\n@reward", "import rlhf_dsl\n@rlhf_dsl.op", "from rlhf_dsl.ops import op\n@op()",
    "import rlhf_dsl as r\n@r.op(timeout=5)",
])
def test_the_mark_under_other_names(tmp_path, head):
    assert read(tmp_path, f"{head}\ndef f(a: int, c: bool, d: list[float]) -> list[float]: ...\n").result == "list"


def test_options_and_batched_annotations(tmp_path):
    found = read(tmp_path, """
from rlhf_dsl import op, Text, F32
@op(batched=True, timeout=30, on_error=-1.0)
def f(responses: Text["b g"], weight: "F32['b']") -> F32["b g"]: ...
""")
    assert found.batched and found.timeout == 30 and found.on_error == -1.0
    assert found.result == "f32" and found.result_dims == ("b", "g")
    assert [annotation_dims(a) for _, a in found.args] == [("b", "g"), ("b",)]
    assert [annotation_element(a) for _, a in found.args] == ["text", "f32"]


def test_arguments_that_a_call_may_leave_out(tmp_path):
    found = read(tmp_path, GOOD.replace("response: str", "response: str, n: int = 3, /, x: str = 'a', *, k=0"))
    assert [name for name, _ in found.args] == ["response", "n", "x"] and found.defaults == ("3", "'a'")
    assert fails(tmp_path, GOOD.replace("response: str", "response: str, *, k")) == "E0604"


@pytest.mark.parametrize("text, code", [
    ("", "E0602"),
    ("def f(a: str) -> float: ...\n", "E0603"),
    ("def op(g): return g\n@op\ndef f(a: str) -> float: ...\n", "E0603"),
    (GOOD.replace("def f", "async def f"), "E0603"),
    (GOOD.replace(": str", ""), "E0604"),
    (GOOD.replace(" -> float", ""), "E0604"),
    (GOOD.replace("response: str", "*responses: str"), "E0604"),
    (GOOD.replace("str", "bytes"), "E0605"),
    (GOOD.replace("float", "dict"), "E0605"),
    (GOOD.replace("@op", "@op(batched=True)"), "E0605"),
    (GOOD.replace("str", "Text['b']"), "E0605"),
    (GOOD.replace("@op", "@op(timeout=later())"), "E0606"),
    (GOOD.replace("@op", "@op(timeout=-1)"), "E0606"),
    (GOOD.replace("@op", "@op(retries=3)"), "E0606"),
    ("def f(:\n", "E0607"),
    ("\0", "E0607"),
])
def test_signatures_that_programs_cannot_use(tmp_path, text, code):
    assert fails(tmp_path, text) == code


def test_modules_are_found_beside_the_program_first_then_among_those_installed(tmp_path):
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "decoder.py").write_text(GOOD)
    assert find_module("json.decoder", tmp_path) == tmp_path / "json" / "decoder.py"
    assert find_module("json.decoder", tmp_path / "elsewhere").name == "decoder.py"
    assert find_module("json", tmp_path / "elsewhere").name == "__init__.py"
    assert find_module("json.no_such_part", tmp_path) is None
    assert find_module("no_such_module.at_all", tmp_path) is None


def test_checking_runs_nothing_of_the_users(tmp_path):
    """Neither the module, nor its package, nor the package beside it."""
    trap = f"open({str(tmp_path / 'ran')!r}, 'w').write('ran')\n"
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text(trap)
    (tmp_path / "pkg" / "rewards.py").write_text(trap + GOOD)
    (tmp_path / "p.rlflow").write_text(PROGRAM.format(module="pkg.rewards"))
    script = "import sys; from rlhf_dsl.frontend import load; load(sys.argv[1])"
    for folder in (tmp_path, Path("/")):  # as a program's folder, and as an importable one
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "p.rlflow")], check=True, cwd=folder,
                       env={"PYTHONPATH": f"{Path(__file__).parents[1]}:{tmp_path}"})
    assert not (tmp_path / "ran").exists()


def test_the_diagnostic_names_the_line_of_the_file(tmp_path):
    (tmp_path / "rewards.py").write_text("def f(a: str) -> float:\n    return 1.0\n")
    (tmp_path / "p.rlflow").write_text(PROGRAM.format(module="rewards"))
    with pytest.raises(DiagnosticError) as caught:
        load(tmp_path / "p.rlflow")
    (found,) = caught.value.diagnostics
    assert found.code == "E0603" and "line 1" in found.help and "rewards.py" in found.help


def test_the_mark_leaves_the_function_as_it_is():
    @op
    def plain(a: str) -> float:
        return 2.0

    @op(batched=True, timeout=3, on_error=0.0)
    def whole(a: Text["b g"]) -> F32["b g"]:
        return a

    assert plain("x") == 2.0 and options_of(plain).timeout == 60
    assert options_of(whole).batched and options_of(whole).on_error == 0.0
    assert options_of(len) is None
