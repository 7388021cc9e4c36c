"""Runs of `rlflowc` as a person starts them: real processes, in a folder that holds modules of the project's names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Optional

import psutil

from runtime.launch import MPI_ENVIRONMENT
from runtime.run_folder import RunFolder

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[1]
ENDS_WITHIN_S = 15
STARTS_WITHIN_S = 240  # on a machine that has much else to do

PROGRAM = '''"""Groups of responses, judged by a Python function; the critic learns to foresee the judge."""

dim b  = 8
dim g  = 2
dim t <= 4

param base = "builtin:tiny"
param lr   = 1e-4
param wait = 0.0                  # seconds that the judge takes for a response

data prompts[b], answer[b] = jsonl("data.jsonl", "prompt", "answer")

from judge import judge

model actor  = policy(base) trained by adamw(lr=lr)
model critic = value("builtin:tiny") trained by adamw(lr=1e-3)

rollout:
    y[b, g, t] = actor.generate(prompts, temperature=1.0)
    logp_old   = actor.logprobs(y)
    r          = judge(y.text, answer, wait)
    adv        = r - mean[g](r)

    metric reward = mean(r)

update:
    ratio = exp(actor.logprobs(y) - logp_old)
    v     = critic.last_value(y)
    train actor to maximize mean(ratio * adv)
    train critic to minimize mean((v - r) * (v - r))

run:
    steps = 4
    every 4: save(actor), save(critic)
'''
JUDGE = '''import time

from rlhf_dsl import op


@op(timeout=60)
def judge(response: str, answer: str, wait: float) -> float:
    time.sleep(wait)
    return float(response.strip() == answer) + len(response)
'''


def make_desk(folder: Path) -> Path:
    """A working directory with a program, its data, and packages whose import fails, named as ours."""
    for name in ("compiler", "runtime", "rlhf_dsl", "tests", "grammars", "programs"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise RuntimeError('this module belongs to the user')\n")
    (folder / "small.rlflow").write_text(PROGRAM)
    (folder / "judge.py").write_text(JUDGE)
    rows = ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6))
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def environment(**more: str) -> dict[str, str]:
    """That of a person: nothing that points to the project. One thread a process, as tests share the machine."""
    rest = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "NO_COLOR")}
    return rest | {"OMP_NUM_THREADS": "1"} | more


def rlflowc(*arguments: object, cwd: Path, **options) -> subprocess.CompletedProcess:
    """Runs a command to its end."""
    command = [str(BIN / "rlflowc"), *map(str, arguments)]
    options = {"env": environment(), "stdin": subprocess.DEVNULL, "timeout": 300} | options
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, **options)


class Job:
    """A run in the background. run_dir: its run folder."""

    def __init__(self, command: list[str], cwd: Path, run_dir: Path, mpi: bool = False) -> None:
        self.folder = RunFolder(run_dir)
        self.process = subprocess.Popen(
            command, cwd=cwd, env=environment(**(MPI_ENVIRONMENT if mpi else {})), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        self.seen: dict[int, psutil.Process] = {}

    def until(self, condition: Callable[[], bool], seconds: float = STARTS_WITHIN_S) -> None:
        """Waits, and remembers every process of the job that it sees."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "it takes too long"
            time.sleep(0.05)
        self.seen |= {p.pid: p for p in self._children()}

    def _children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def iterations(self) -> int:
        """Lines of `metrics.jsonl` so far."""
        return len(self.folder.metrics.read_text().splitlines()) if self.folder.metrics.exists() else 0

    def judging(self) -> bool:
        """Every rank waits for its Python op in an iteration."""
        workers = sum("python_ops_worker" in " ".join(_command(p)) for p in self._children())
        reached = [self.folder.position_of(rank) for rank in (0, 1)]
        return workers == 2 and all(iteration == 1 and step == judge_step(self.folder) for iteration, step in reached)

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank."""
        return next(p for p in self._children() if _is_rank(p, number))

    def end(self, seconds: float = 120) -> tuple[int, str]:
        """(exit code, standard error) once it has ended."""
        _, talk = self.process.communicate(timeout=seconds)
        return self.process.returncode, talk

    def left(self, seconds: float = ENDS_WITHIN_S) -> list[psutil.Process]:
        """Processes of the job that still live after `seconds`."""
        return psutil.wait_procs(list(self.seen.values()), timeout=seconds)[1]

    def scratch(self) -> Path:
        """The folder for the shared memory of the ranks."""
        return Path(self.rank(0).environ()["OMPI_MCA_btl_sm_backing_directory"])


def judge_step(folder: RunFolder) -> int:
    """The place of the Python op in the list of steps."""
    from compiler.proof.verify import load_plan, walk

    return next(i for i, step in enumerate(walk(load_plan(folder.plan))) if step.op == "pyop")


def start(cwd: Path, run_dir: str, *arguments: object) -> Job:
    """`rlflowc run small.rlflow` on two ranks."""
    command = [str(BIN / "rlflowc"), "run", "small.rlflow", "--ranks", "2", "--run-dir", run_dir, *map(str, arguments)]
    return Job(command, cwd, cwd / run_dir)


def start_mpiexec(cwd: Path, run_dir: str, ranks: int, plan: str) -> Job:
    """`mpiexec -n RANKS rlflowc run PLAN`, as a person types it who has an MPI of their own."""
    command = [str(BIN / "mpiexec"), "-n", str(ranks), str(BIN / "rlflowc"), "run", plan, "--run-dir", run_dir]
    return Job(command, cwd, cwd / run_dir, mpi=True)


def metrics(run_dir: Path) -> list[dict]:
    """What each iteration recorded, without times."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _is_rank(process: psutil.Process, number: int) -> bool:
    try:
        known: Optional[str] = process.environ().get("OMPI_COMM_WORLD_RANK")
    except psutil.Error:
        return False
    return known == str(number) and "python_ops_worker" not in " ".join(_command(process))
