"""Imports go one way, language, compiler, runtime, and each command loads no more than it needs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest

ROOT = Path(__file__).resolve().parents[1]
# package -> what it may import beside itself and the standard library; None: anything that is not forbidden below
ALLOWED = {
    "rlhf_dsl": {"lark"},
    "compiler": {"rlhf_dsl", "networkx", "jinja2", "rich"},
    "runtime": None,
}
NEVER = {"tests", "programs", "docs"}
FILES = [path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]
HEAVY = {"torch", "networkx", "jinja2", "numpy", "transformers", "mpi4py", "megatron", "pyarrow", "rich"}

REPORT = """
import json, sys
from rlhf_dsl.cli import main
code = main(sys.argv[1:])
print(json.dumps([code, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def imported(file: Path) -> Iterator[tuple[str, int]]:
    """(top-level package, line) of every import in a file, also inside functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0] if not node.level else file.relative_to(ROOT).parts[0], node.lineno


def loaded(*arguments: str) -> set[str]:
    """The top-level packages that a command has loaded at its end. It must succeed."""
    done = subprocess.run([sys.executable, "-P", "-c", REPORT, *arguments], capture_output=True, text=True, cwd=ROOT,
                          env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    code, packages = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return set(packages)


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(file):
    package = file.relative_to(ROOT).parts[0]
    allowed = ALLOWED[package]
    for name, line in imported(file):
        place = f"{file.relative_to(ROOT)}:{line} imports {name}"
        assert name not in NEVER, place
        if allowed is not None:
            assert name == package or name in allowed or name in sys.stdlib_module_names, place


def test_check_loads_the_language_alone():
    programs = map(str, sorted((ROOT / "programs").glob("*.rlflow")))
    assert loaded("check", *programs) & (HEAVY | {"compiler", "runtime", "rewards"}) == set()


def test_compile_loads_no_torch(tmp_path):
    packages = loaded("compile", str(ROOT / "programs" / "ppo.rlflow"), "--ranks", "2", "-o", str(tmp_path / "plan.json"))
    assert packages & {"torch", "transformers", "mpi4py", "megatron", "runtime", "rewards"} == set()
