"""How long `rlflowc check` and `fmt` take, as whole processes: `python benchmarks/startup.py`.

In processor time, which a loaded machine does not stretch as it does the clock, and the best of some runs. Exit code 1
where a command takes longer than the project promises.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RLFLOWC = Path(sysconfig.get_path("scripts")) / "rlflowc"
PAGE = ROOT / "programs" / "safe_rlhf.rlflow"  # the longest of those that ship
RUNS = 5
HEAD = """\
dim b  = 4
dim t <= 8
data p[b] = jsonl("p.jsonl", "prompt")
model a = policy("builtin:tiny")
model r = scorer("builtin:tiny-reward")

rollout:
    y[b, t] = a.generate(p)
    x0 = r.score(y)
"""


def long_program() -> str:
    """2,000 lines, each of which reads the one above."""
    lines = [f"    x{i} = x{i - 1} * 0.5 + mean(x{i - 1}) - r.score(y)" for i in range(1, 1991)]
    return HEAD + "\n".join([*lines, "    metric m = mean(x1990)"]) + "\n"


def seconds(*arguments: str) -> float:
    return min(_once(arguments) for _ in range(RUNS))


def _once(arguments: tuple[str, ...]) -> float:
    before = os.times()
    done = subprocess.run([RLFLOWC, *arguments], capture_output=True, cwd=ROOT)
    after = os.times()
    if done.returncode not in (0, 1):
        sys.exit(done.stderr.decode())
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> int:
    table = Table("command", "input", "seconds", "limit")
    slow = False
    with tempfile.TemporaryDirectory() as folder:
        long = Path(folder) / "long.rlflow"
        long.write_text(long_program())
        wrong = Path(folder) / "wrong.rlflow"
        wrong.write_text(long_program() + "    z = 1 +\n" * 40)
        lines = len(PAGE.read_text(encoding="utf-8").splitlines())
        for arguments, name, limit in (
            (("check", str(PAGE)), f"{lines} lines", 0.4),
            (("check", "-v", str(PAGE)), f"{lines} lines", 0.4),
            (("fmt", "--check", str(PAGE)), f"{lines} lines", 0.4),
            (("check", *map(str, sorted(ROOT.glob("programs/*.rlflow")))), "all programs", 0.6),
            (("check", str(long)), "2,000 lines", 3.0),
            (("fmt", "--check", str(long)), "2,000 lines", 3.0),
            (("check", str(wrong)), "2,000 lines and 40 errors", 3.0),
        ):
            took = seconds(*arguments)
            slow = slow or took > limit
            table.add_row(" ".join(a for a in arguments if not a.endswith(".rlflow")), name, f"{took:.2f}", f"{limit:g}")
    Console().print(table)
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
