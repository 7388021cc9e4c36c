"""Python ops in their worker: values, failures, and that neither takes anything else along."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rlhf_dsl.diagnostics import DiagnosticError
from rlhf_dsl.ops import read_op
from runtime.python_ops import OpError, OpRunner

SOURCE = '''
import os, sys, time
from rlhf_dsl import op, Text, F32, Bool
from rewards.helper import half

print("chatter at import")

@op
def score(response: str, weight: float, good: bool) -> float:
    print("chatter", input() if False else "")
    return len(response) * weight + half(good)

@op
def level(weight: float = 2.0, *, shift: float = 0.5) -> float:
    return weight + shift

@op
def shout(x: str) -> str:
    return x.upper()

@op
def same(x: str) -> bool:
    return x == "a"

@op
def tokens(x: str, values: list[float]) -> list[float]:
    return values if x != "short" else values[1:]

@op(timeout=0.5)
def moody(x: str) -> float:
    if x == "raise":
        return half("no number")
    if x == "hang":
        time.sleep(60)
    if x == "die":
        os._exit(3)
    if x == "kill":
        os.kill(os.getpid(), 9)
    if x == "exit":
        sys.exit("enough")
    return {"nan": float("nan"), "none": None, "text": "1.0", "pid": float(os.getpid())}.get(x, 1.0)

@op(timeout=0.5, on_error=-1.0)
def tolerant(x: str) -> float:
    return moody(x)

@op(on_error=0.5)
def tolerant_tokens(values: list[float]) -> list[float]:
    return [v / v for v in values]

@op(batched=True)
def lengths(xs: Text["b g"], w: F32["b"]) -> F32["b g"]:
    return [[len(x) * v for x in row] for row, v in zip(xs, w)]

@op(batched=True, on_error=7.0)
def ragged(xs: Text["b g"]) -> F32["b"]:
    return [1.0 / (len(row) - 1) for row in xs]

@op(timeout=5)
def slow_child(x: str) -> float:
    import subprocess
    subprocess.Popen(["sleep", "317"])
    os._exit(1)

@op(timeout=300)
def hang(file: str) -> float:
    with open(file, "w") as out:
        out.write(str(os.getpid()))
    time.sleep(300)

@op
def modules(x: str) -> str:
    return " ".join(sorted(m for m in sys.modules if m in ("torch", "numpy", "transformers", "lark")))
'''


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("program") / "rewards"
    folder.mkdir()
    (folder / "math.py").write_text(SOURCE)
    (folder / "helper.py").write_text("def half(x):\n    return x / 2\n")
    (folder / "broken.py").write_text(textwrap.dedent('''
        from rlhf_dsl import op
        import a_module_that_is_not_there

        @op
        def f(x: str) -> float:
            return 1.0
    '''))
    return folder


@pytest.fixture()
def runner(package):
    made = []

    def start(name, module="math"):
        made.append(OpRunner(read_op(name, f"rewards.{module}", package / f"{module}.py")))
        return made[-1]

    yield start
    for each in made:
        each.close()


def failure(runner, columns, **more):
    with pytest.raises(DiagnosticError) as caught:
        runner.call(columns, **more)
    [one] = caught.value.diagnostics
    assert caught.value.exit_code == 4 and one.help
    return one


def test_values(runner):
    score = runner("score")
    assert score.call([["abc", "", "é"], [2.0, 1.0, 0.5], [True, False, True]]) == [6.5, 0.0, 1.0]
    assert score.call([["ab"], [1], [False]]) == [2.0]
    assert score.call([[], [], []]) == []


def test_arguments_that_are_left_out_have_their_defaults(runner):
    assert runner("level").call([[1.0, 2.0]]) == [1.5, 2.5]
    assert runner("level").call([], [7, 9]) == [2.5, 2.5]
    assert runner("shout").call([["a\n\"ß\u2028", "\ud800"]]) == ["A\n\"SS\u2028", "\ud800"]
    assert runner("same").call([["a", "b"]]) == [True, False]
    assert runner("tokens").call([["x", "y"], [[1.0, 2.0], [3.0]]]) == [[1.0, 2.0], [3.0]]


def test_the_worker_stays_light(runner):
    assert runner("modules").call([["x"]]) == [""]


def test_batched(runner):
    call = [["a", "bb"], ["ccc"]], [1.0, 2.0]
    assert runner("lengths").call([[call[0], [["d"]]], [call[1], [3.0]]]) == [[[1.0, 2.0], [6.0]], [[3.0]]]
    ragged = runner("ragged")
    assert ragged.call([[[["a", "b"], ["c", "d", "e"]], [["a"], ["b"]]]]) == [[1.0, 0.5], [7.0, 7.0]]
    assert ragged.replaced == 1 and "ZeroDivisionError" in ragged.last_failure


@pytest.mark.parametrize("word, code, words", [
    ("raise", "R0321", "`moody` raised TypeError: unsupported operand type(s) for /: 'str' and 'int' on row 12"),
    ("exit", "R0321", "`moody` raised SystemExit: enough on row 12"),
    ("hang", "R0322", "`moody` took more than 0.5 s on row 12"),
    ("nan", "R0323", "`moody` returned nan on row 12, not a number"),
    ("none", "R0323", "`moody` returned None on row 12, not a number"),
    ("text", "R0323", "`moody` returned '1.0' on row 12, not a number"),
    ("die", "R0324", "the worker of `moody` died on row 12 (exit code 3)"),
    ("kill", "R0324", "the worker of `moody` died on row 12 (signal SIGKILL)"),
])
def test_failures_name_the_row_and_the_line(runner, package, word, code, words):
    moody = runner("moody")
    one = failure(moody, [["a", "b", word, "c", "raise"]], rows=[10, 11, 12, 13, 14])
    assert (one.code, one.message) == (code, words)
    line = {"raise": "return half(", "exit": "sys.exit("}.get(word, "def moody")
    number = next(i for i, text in enumerate(SOURCE.split("\n"), 1) if line in text)
    assert one.place == f"{package / 'math.py'}:{number}"
    assert moody.call([["a", "b"]]) == [1.0, 1.0]  # and the next call finds a worker


def test_the_traceback_is_kept(runner):
    with pytest.raises(DiagnosticError) as caught:
        runner("moody").call([["raise"]])
    assert isinstance(caught.value.__cause__, OpError) and "helper.py" in str(caught.value.__cause__)


def test_on_error_shifts_and_drops_nothing(runner):
    tolerant = runner("tolerant")
    words = ["a", "raise", "b", "hang", "nan", "c", "die", "none", "die", "d"]
    assert tolerant.call([words]) == [1.0, -1.0, 1.0, -1.0, -1.0, 1.0, -1.0, -1.0, -1.0, 1.0]
    assert tolerant.replaced == 6
    assert tolerant.call([["a"]]) == [1.0]


def test_one_value_for_each_own_token(runner):
    one = failure(runner("tokens"), [["x", "short"], [[1.0], [1.0, 2.0]]])
    assert one.code == "R0323" and "row 1" in one.message and "another length" in one.message
    assert failure(runner("tokens"), [["x"], [[1.0]]], lengths=[2]).code == "R0323"
    assert runner("tolerant_tokens").call([[[1.0, 2.0], [1.0, 0.0]]]) == [[1.0, 1.0], [0.5, 0.5]]


def test_a_module_that_does_not_load(runner, package):
    one = failure(runner("f", "broken"), [["a"]])
    assert one.code == "R0320" and "a_module_that_is_not_there" in one.message and "broken.py:3" in one.message


def test_rows_run_in_one_worker_until_it_is_lost(runner):
    moody = runner("moody")
    first = moody.call([["pid", "pid"]])
    assert len(set(first)) == 1 and moody.call([["pid"]]) == first[:1] != [float(os.getpid())]
    os.kill(int(first[0]), 9)  # between two calls
    assert eventually(lambda: not moody._worker.alive)
    assert moody.call([["a"]]) == [1.0]


def eventually(condition, seconds=10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_hanging_worker_dies_with_its_rank(package, tmp_path):
    note = tmp_path / "pid"
    code = f"""
from pathlib import Path
from rlhf_dsl.ops import read_op
from runtime.python_ops import OpRunner
OpRunner(read_op("hang", "rewards.math", Path({str(package / "math.py")!r}))).call([[{str(note)!r}]])
"""
    root = str(Path(__file__).resolve().parents[1])
    rank = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root})
    assert eventually(lambda: note.exists() and note.read_text(), 60)
    worker = Path("/proc") / note.read_text()
    assert worker.exists()
    rank.kill()
    rank.wait()
    assert eventually(lambda: not worker.exists())


def test_what_the_function_started_ends_with_it(runner):
    child = runner("slow_child")
    failure(child, [["x"]])
    assert eventually(lambda: not sleeping(317))


def sleeping(seconds: int) -> bool:
    """Whether a process `sleep SECONDS` is left."""
    commands = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(entry.read_bytes())
        except OSError:
            continue
    return f"sleep\0{seconds}\0".encode() in commands


def test_many_rows_are_quick(runner):
    same = runner("same")
    same.call([["a"]])
    start = time.perf_counter()
    same.call([["a"] * 2000])
    assert time.perf_counter() - start < 5
