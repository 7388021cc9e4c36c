"""Nothing of the user's is executed by the commands that only read: whatever stands beside a program stays text."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rlhf_dsl.ops import find_module
from tests.compiling import model_folder
from tests.running import BIN

PLANTED = (
    "rewards/__init__.py", "rewards/deep/__init__.py", "rewards/deep/judge.py", "rewards.py", "judge.py",
    "conftest.py", "sitecustomize.py", "usercustomize.py", "setup.py", "p.py", "__init__.py", "__main__.py", "json.py",
    "lark.py", "torch.py", "jinja2.py", "numpy.py", "networkx.py", "rlhf_dsl.py", "compiler.py", "runtime.py",
    "dataclasses.py", "model/modeling_tiny.py",
)
TRAP = '''
import os, pathlib
pathlib.Path(os.environ["TRAPS"], __name__ + "-" + str(os.getpid())).write_text("ran")

from rlhf_dsl import op

@op(timeout=open(os.environ["TRAPS"] + "/decorator", "w").write("ran"))
def score(response: str, answer: str) -> float:
    return 1.0

@op
def size(response: str = open(os.environ["TRAPS"] + "/default", "w").write("ran")) -> float:
    return 1.0
'''
PROGRAM = """
dim b  = 4
dim t <= 4
data q[b], answer[b] = jsonl("data.jsonl", "prompt", "answer")
from rewards.deep.judge import size
model actor = policy("model") trained by adamw(lr=1e-3)

rollout:
    y[b, t] = actor.generate(q)
    r       = size(y.text)
    metric reward = mean(r)

update:
    train actor to maximize mean(actor.logprobs(y) * r)

run:
    steps = 1
"""
COMMANDS = (
    "check p.rlflow", "check -v p.rlflow", "check --json - < p.rlflow",
    "fmt p.rlflow", "fmt --check p.rlflow", "fmt - < p.rlflow",
    "compile p.rlflow --ranks 2 -o plan.json", "compile p.rlflow --ranks 2 --print-after all",
    "explain p.rlflow --ranks 2", "explain plan.json --json",
    "graph p.rlflow", "graph p.rlflow --format html", "graph p.rlflow --stage plan --format svg",
)


@pytest.fixture
def planted(tmp_path) -> Path:
    """A folder of a program full of modules that leave a trace when they are run."""
    for name in PLANTED:
        file = tmp_path / "work" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(TRAP)
    (tmp_path / "traps").mkdir()
    model_folder(tmp_path / "work" / "model", auto_map={"AutoModelForCausalLM": "modeling_tiny.Tiny"})
    (tmp_path / "work" / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    (tmp_path / "work" / "p.rlflow").write_text(PROGRAM)
    return tmp_path


def traces(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "traps").iterdir())


def test_commands_that_read_run_nothing(planted):
    paths = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "TRAPS": str(planted / "traps"), "HOME": str(planted)}
    for command in COMMANDS:
        done = subprocess.run(["bash", "-c", f"rlflowc {command}"], cwd=planted / "work", env=paths,
                              capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
        assert traces(planted) == [], command
    assert not list((planted / "work").rglob("__pycache__"))


def test_the_traps_work(planted):
    """What leaves no trace must not be a trap that cannot spring."""
    code = "import sys; sys.path.insert(0, 'rewards/deep'); import judge"
    done = subprocess.run([BIN / "python", "-P", "-c", code], cwd=planted / "work", capture_output=True, text=True,
                          env={"TRAPS": str(planted / "traps"), "PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    assert {"decorator", "default"} < set(traces(planted))


def test_a_module_is_found_without_its_parents(planted, monkeypatch):
    """`importlib.util.find_spec("a.b")` would run `a/__init__.py`."""
    monkeypatch.setenv("TRAPS", str(planted / "traps"))
    assert find_module("rewards.deep.judge", planted / "work") == planted / "work" / "rewards" / "deep" / "judge.py"
    assert traces(planted) == []
