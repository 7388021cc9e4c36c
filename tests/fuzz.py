"""Mutated programs: whatever is read, no traceback, no hang, exit code 0, 1 or 2.

    python -m tests.fuzz --count 100000
    python -m tests.fuzz --count 1000 --processes --save found

Number i of a seed is always the same program. In this process each goes through `check`, `fmt` and, if it is right,
`graph`; with `--processes` each is one `rlflowc check` of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Callable, Iterator, Optional

from rlhf_dsl.cli import main
from rlhf_dsl.codes import CODES

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 2.0
LARGE = 1 << 20  # bytes
FINE = (0, 1, 2)
_TOKEN = re.compile(r"[A-Za-z_]\w*|[0-9.]+(?:e-?[0-9]+)?|\"[^\"\n]*\"|\*\*|[<>=!]=|\n *|[^\s\w]", re.S)
_ODD = "\0\t\r\x0b\x1b\\`'\"{}[]()#^%$@!~|&;:,.=<>+-*/_ \n0eé日𝔸\ufeff\u202e\u2028"
_WORDS = (
    "if", "for", "lambda", "import", "def", "return", "dim", "param", "state", "then", "data", "after", "model",
    "trained", "by", "fn", "from", "rollout:", "update:", "eval:", "plan:", "run:", "metric", "keep", "train", "to",
    "maximize", "every", "in", "sum[t]", "mean", "togo[t]", "next", "stop", "where", "at_end[t]", "gae", "y", "t", "b",
    "1e309", "1e-400", "9" * 400, "0", "-1", "true", "not", "and", "or", "==", "**", "<", "(", ")", "[", "]", "\n",
    "\n    ", "\n        ", '"', '"""', "#", "env=", "temperature=0",
)


@dataclass(frozen=True)
class Found:
    """An input that did not do what it should: why, and what was printed."""

    number: int
    reason: str
    raw: bytes
    printed: str


@cache
def corpus() -> tuple[str, ...]:
    """Programs that are right, and programs that earn each diagnostic."""
    files = [*ROOT.glob("programs/*.rlflow"), *ROOT.glob("tests/golden/*.rlflow"), ROOT / "rlhf_dsl" / "prelude.rlflow"]
    pages = [p.read_text(encoding="utf-8") for p in sorted(ROOT.glob("tests/language/*.md"))]
    blocks = [block for page in pages for block in re.findall(r"^```rlflow[^\n]*\n(.*?)^```", page, re.M | re.S)]
    examples = [text for entry in CODES.values() for text in (entry.wrong, entry.right) if text]
    return (*(p.read_text(encoding="utf-8") for p in sorted(files)), *blocks, *examples)


# ---- mutations: each from (generator of numbers, text) to a text ------------------------------------------

def _tokens(text: str) -> list[str]:
    """Pieces that join to the text, every other one a token."""
    pieces, at = [], 0
    for found in _TOKEN.finditer(text):
        pieces += [text[at:found.start()], found[0]]
        at = found.end()
    return [*pieces, text[at:]]


def _on_token(change: Callable[[random.Random, list[str], int], None]) -> Callable[[random.Random, str], str]:
    def mutate(numbers: random.Random, text: str) -> str:
        pieces = _tokens(text)
        if len(pieces) > 2:
            change(numbers, pieces, numbers.randrange(1, len(pieces), 2))
        return "".join(pieces)
    return mutate


def _drop(numbers, pieces, at):
    pieces[at] = ""


def _double(numbers, pieces, at):
    pieces[at] += numbers.choice(("", " ")) + pieces[at]


def _swap(numbers, pieces, at):
    other = numbers.randrange(1, len(pieces), 2)
    pieces[at], pieces[other] = pieces[other], pieces[at]


def _replace(numbers, pieces, at):
    pieces[at] = numbers.choice(_WORDS)


def _insert(numbers, pieces, at):
    pieces[at] += " " + numbers.choice(_WORDS) + " "


def _nest(numbers, pieces, at):
    depth = numbers.choice((1, 5, 59, 61, 200, 3000))
    left, right = numbers.choice((
        ("(", ")"), ("[", "]"), ("f(", ")"), ("-", ""), ("not ", ""), ("", " ** 2"), ("", " + 1"), ("", "(x)"),
        ("mean(", ")"), ("where(true, ", ", 1)"), ("", " < 1"), ("", ".a"), ("(", ""), ("", ")")))
    pieces[at] = left * depth + pieces[at] + right * depth


def _odd(numbers: random.Random, text: str) -> str:
    at = numbers.randrange(len(text) + 1)
    return text[:at] + numbers.choice(_ODD) * numbers.choice((1, 1, 2, 50)) + text[at:]


def _lines(numbers: random.Random, text: str) -> str:
    lines = text.split("\n")
    at, kind = numbers.randrange(len(lines)), numbers.randrange(5)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(numbers.randrange(len(lines)), lines[at])
    elif kind == 2:
        lines[at] = " " * numbers.choice((1, 3, 4, 8)) + lines[at]
    elif kind == 3:
        lines[at] = lines[at].lstrip()
    else:
        numbers.shuffle(lines)
    return "\n".join(lines)


def _splice(numbers: random.Random, text: str) -> str:
    other = numbers.choice(corpus())
    return text[:numbers.randrange(len(text) + 1)] + other[numbers.randrange(len(other) + 1):]


def _cut(numbers: random.Random, text: str) -> str:
    return text[:numbers.randrange(len(text) + 1)]


MUTATIONS = (*map(_on_token, (_drop, _double, _swap, _replace, _insert, _nest)), _odd, _lines, _splice, _cut)


def _large(numbers: random.Random, text: str) -> bytes:
    """A megabyte of one thing."""
    unit = numbers.choice((
        text or "x", text.replace("\n", " ") or "x", "(", "x = 1\n", "a", "\n", "    ", '"', "#", "1 + ", "-",
        "dim b = 4\n", "    metric m = 1\n", "rollout:\n", "\0", "é", "f(x, ", "[", "x.", "1"))
    whole = unit * (LARGE // len(unit.encode()) + 1)
    return (numbers.choice(("", "rollout:\n    x = ", "param p = ")) + whole).encode()[:LARGE]


def mutated(seed: int, number: int) -> bytes:
    """Program `number` of a seed."""
    numbers = random.Random(f"{seed} {number}")
    text = numbers.choice(corpus())
    if numbers.randrange(2000) == 0:
        return _large(numbers, text)
    for _ in range(numbers.choice((1, 1, 2, 3, 6))):
        text = numbers.choice(MUTATIONS)(numbers, text)
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(numbers.choice((0, 0, 0, 1, 3)) if raw else 0):
        raw[numbers.randrange(len(raw))] ^= 1 << numbers.randrange(8)
    return bytes(raw)


# ---- what happens to them --------------------------------------------------------------------------------

class Hang(BaseException):
    """Raised out of the work after `LIMIT_S` of processor time; the command line does not catch it."""


def _alarm(*_) -> None:
    raise Hang


def run_here(raw: bytes, *arguments: str) -> tuple[Optional[int], str]:
    """(exit code, what was printed) of a command on standard input; None after too long."""
    before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(raw))
    printed = io.StringIO()
    handler = signal.signal(signal.SIGVTALRM, _alarm)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return main([*arguments]), printed.getvalue()
    except Hang:
        return None, printed.getvalue()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        sys.stdin = before


def in_process(number: int, raw: bytes) -> Iterator[Found]:
    """What is wrong with the commands on one input."""
    right = False
    for name in ("check", "fmt", "graph"):
        if name == "graph" and not right:
            continue
        code, printed = run_here(raw, name, "-")
        right = right or code == 0
        reason = _reason(code, printed)
        if reason:
            yield Found(number, f"{name}: {reason}", raw, printed)


def as_process(number: int, raw: bytes) -> Iterator[Found]:
    """What is wrong with `rlflowc check` of one input, as a process."""
    command = [sys.executable, "-m", "rlhf_dsl.cli", "check", "-"]
    try:
        done = subprocess.run(command, input=raw, capture_output=True, timeout=10 * LIMIT_S, cwd=ROOT)
    except subprocess.TimeoutExpired:
        yield Found(number, "check: hangs", raw, "")
        return
    printed = (done.stdout + done.stderr).decode("utf-8", "replace")
    reason = _reason(done.returncode, printed)
    if reason:
        yield Found(number, f"check: {reason}", raw, printed)


def _reason(code: Optional[int], printed: str) -> str:
    if code is None:
        return f"more than {LIMIT_S:g} s"
    if code not in FINE:
        return f"exit code {code}"
    return "a traceback" if "Traceback (most recent call last)" in printed else ""


def campaign(seed: int, numbers: range, run: Callable[[int, bytes], Iterator[Found]] = in_process) -> Iterator[Found]:
    for number in numbers:
        yield from run(number, mutated(seed, number))


def _command_line() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", action="store_true", help="one process each")
    parser.add_argument("--save", metavar="FOLDER", help="where inputs are kept that did not do as they should")
    args = parser.parse_args()
    began, wrong = time.perf_counter(), 0
    run = as_process if args.processes else in_process
    for found in campaign(args.seed, range(args.first, args.first + args.count), run):
        wrong += 1
        print(f"{found.number}: {found.reason}: {found.printed.strip()[-300:]}", flush=True)
        if args.save:
            Path(args.save).mkdir(parents=True, exist_ok=True)
            (Path(args.save) / f"{args.seed}-{found.number}.rlflow").write_bytes(found.raw)
    print(f"{args.count} programs, {wrong} faults, {time.perf_counter() - began:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(_command_line())
