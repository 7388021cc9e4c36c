"""The command line: exit codes, what goes to which stream, and that files are safe."""

import io
import json
import os
import subprocess
import sys

import pytest

from rlhf_dsl.cli import main
from rlhf_dsl.codes import CODES

GOOD = """dim b = 4
param eps = 0.2 in (0, 1)

rollout:
    metric m = eps * b
"""
BAD = "rollout:\n    a = 1 ^ 2\n"


@pytest.fixture
def file(tmp_path):
    def write(text, name="p.rlflow"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)
    return write


def feed_stdin(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


# ---- check

def test_check_says_so_on_stderr_alone(file, capsys):
    assert main(["check", file(GOOD)]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", "1 program: no errors\n")


def test_check_reports_all_programs(file, capsys):
    good, bad = file(GOOD), file(BAD, "q.rlflow")
    assert main(["check", bad, good]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "error[E0012]" in err and "q.rlflow:2:11" in err and err.endswith("2 programs: 1 error\n")


def test_check_json(file, capsys):
    bad = file(BAD)
    assert main(["check", bad, "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)["files"][0]
    assert err == "" and found["path"] == bad and not found["ok"] and found["diagnostics"][0]["code"] == "E0012"


def test_check_reads_standard_input(monkeypatch, capsys):
    feed_stdin(monkeypatch, BAD)
    assert main(["check", "-"]) == 1
    assert "┌─ -:2:11" in capsys.readouterr().err


def test_overrides_reach_the_checker(file, capsys):
    assert main(["check", file(GOOD), "-s", "eps=0.5", "-s", "b=8"]) == 0
    assert main(["check", file(GOOD), "-s", "eps=3"]) == 1
    assert main(["check", file(GOOD), "--set", "esp=0.5"]) == 1
    assert "did you mean `eps`?" in capsys.readouterr().err


@pytest.mark.parametrize("content, code", [
    (b"\xff\xfe\x00d\x00i", "E0003"), (b"dim b = 4\n\x00", "E0003"), (b"dim b = 4 # caf\xe9\n", "E0003"),
])
def test_what_is_not_text(file, capsys, content, code):
    assert main(["check", file(content)]) == 2
    assert f"error[{code}]" in capsys.readouterr().err


def test_missing_and_unreadable_files(file, tmp_path, capsys):
    assert main(["check", str(tmp_path / "none.rlflow")]) == 2
    assert main(["check", str(tmp_path)]) == 2
    assert main(["check", "a\0b"]) == 2
    err = capsys.readouterr().err
    assert "E0001" in err and "E0002" in err and "Traceback" not in err


def test_windows_newlines_and_a_byte_order_mark(file):
    assert main(["check", file(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())]) == 0


# ---- fmt

def test_fmt_rewrites_a_file_and_keeps_its_mode(file, tmp_path):
    path = file("dim   b=4")
    os.chmod(path, 0o640)
    assert main(["fmt", path]) == 0
    assert open(path).read() == "dim b = 4\n" and os.stat(path).st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["p.rlflow"]


def test_fmt_check_lists_what_would_change(file, capsys):
    good, other = file(GOOD), file("dim   b=4", "q.rlflow")
    assert main(["fmt", "--check", good]) == 0
    assert main(["fmt", "--check", good, other]) == 1
    assert capsys.readouterr().out == f"{other}\n" and open(other).read() == "dim   b=4"


def test_fmt_of_standard_input(monkeypatch, capsys):
    feed_stdin(monkeypatch, "dim   b=4")
    assert main(["fmt", "-"]) == 0
    assert capsys.readouterr().out == "dim b = 4\n"


def test_fmt_leaves_a_program_with_errors_alone(file, capsys):
    bad, other = file(BAD), file("dim   b=4", "q.rlflow")
    assert main(["fmt", bad, other]) == 1
    assert open(bad).read() == BAD and open(other).read() == "dim b = 4\n"


# ---- help, ops, the command line itself

@pytest.mark.parametrize("code", CODES)
def test_help_has_a_page_for_every_code(code, capsys):
    assert main(["help", code.lower()]) == 0
    assert code in capsys.readouterr().out


def test_help_lists_all(capsys):
    assert main(["help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {code}  " in out for code in CODES)


def test_ops(capsys):
    assert main(["ops", "--json"]) == 0
    names = {entry["name"] for entry in json.loads(capsys.readouterr().out)["ops"]}
    assert {"togo", "gae", "logprobs", "whiten", "truncated", "reply"} <= names
    assert main(["ops", "tgo"]) == 2
    assert "did you mean `togo`?" in capsys.readouterr().err


@pytest.mark.parametrize("line, hint", [
    ("", "rlflowc --help"), ("chek p.rlflow", "did you mean `check`?"), ("check", "PROGRAM"),
    ("check p --nope", "--nope"), ("check p -s eps", "`name=value`"), ("run p --ranks 0", "`0`"),
    ("run p --ranks two", "`two`"), ("help E9999", "E9999"), ("check p --color red", "red"), ("eval p", "--feed"),
])
def test_a_bad_command_line_is_a_diagnostic(line, hint, capsys):
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and hint in err and err.startswith("error[E00") and "Traceback" not in err


def test_help_and_version_are_no_errors(capsys):
    assert main(["--help"]) == 0 and main(["run", "--help"]) == 0 and main(["--version"]) == 0
    assert "exit codes:" in capsys.readouterr().out


def test_colour_is_a_choice(file, capsys, monkeypatch):
    bad = file(BAD)
    main(["check", bad])
    assert "\x1b[" not in capsys.readouterr().err
    main(["check", bad, "--color", "always"])
    assert "\x1b[" in capsys.readouterr().err


def test_an_internal_error_says_that_it_is_one(file, capsys, monkeypatch):
    monkeypatch.setattr("rlhf_dsl.commands.check.diagnose", lambda *_: 1 / 0)
    assert main(["check", file(GOOD)]) == 70
    err = capsys.readouterr().err
    assert "bug in rlflow" in err and "ZeroDivisionError" in err and "Traceback" not in err
    assert main(["check", "-v", file(GOOD)]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_an_interruption(file, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr("rlhf_dsl.commands.check.diagnose", interrupt)
    assert main(["check", file(GOOD)]) == 130


def test_a_closed_pipe_is_no_error(file):
    command = f"{sys.executable} -m rlhf_dsl.cli help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_ascii_terminals_get_escapes(file):
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "rlhf_dsl.cli", "check", file(BAD)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "E0012" in done.stderr


def test_check_imports_the_language_alone(file):
    code = "import sys; from rlhf_dsl.cli import main; main(['check', sys.argv[1]]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, file(GOOD)], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {"torch", "numpy", "networkx", "jinja2", "mpi4py", "compiler", "runtime"}
