"""Starts the ranks of a run, passes on what they say, and turns however they end into one report.

The launcher sets what MPI needs (root, oversubscription, yielding, threads), so that nobody types it. It takes no part
in the run: ranks execute their own part of the plan. Measured facts behind the settings: waiting ranks of Open MPI spin
unless told to yield, binding several ranks of a small machine to one core starves them, and so do waiting OpenMP threads
that spin: a step took 30 times longer on a busy machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

from rlhf_dsl.diagnostics import fault
from runtime.run_folder import RunFolder

MPI_ENVIRONMENT = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
UNDER_LAUNCHER = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK")
SHARED_MEMORY = Path("/dev/shm")
PR_SET_PDEATHSIG = 1
GRACE_S = 10
RANKS_A_CORE = 16


@dataclass(frozen=True)
class Ended:
    """How the ranks ended. rank, signal: the one that died of a signal, where mpiexec could tell."""

    code: int
    rank: Optional[int] = None
    signal: Optional[int] = None
    output: str = ""


def is_rank() -> bool:
    """True in a process that mpiexec or srun started as one of several."""
    return any(name in os.environ for name in UNDER_LAUNCHER)


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Linux: this process gets `sig` when its parent ends, however that ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, sig)


def mpiexec() -> str:
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if not found:
        raise fault("R0110")
    return found


def check_number(ranks: int) -> None:
    """Raises DiagnosticError R0111 for more ranks than this machine can hold."""
    cores = os.cpu_count() or 1
    if ranks > RANKS_A_CORE * cores:
        raise fault("R0111", ranks=ranks, cores=cores, most=RANKS_A_CORE * cores)


def job_name(scratch: str) -> str:
    """What ranks name shared memory by that cannot lie in the job's folder."""
    return scratch.strip("/").replace("/", "-")


def rank_environment(ranks: int, scratch: str) -> dict[str, str]:
    """What every rank starts with; a number of threads that the user set stays."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    return {**{name: str(threads) for name in THREADS}, "OMP_WAIT_POLICY": "PASSIVE", **os.environ, **MPI_ENVIRONMENT,
            "PRTE_MCA_prte_tmpdir_base": scratch, "OMPI_MCA_btl_sm_backing_directory": scratch, "PYTHONUNBUFFERED": "1",
            "RLFLOW_JOB": job_name(scratch)}


def _event(line: str) -> Optional[dict]:
    """A line as an event; None for what something below the ranks printed."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "event" in value else None


class Ranks:
    """The running ranks of one job. start: the checkpoint to go on from."""

    def __init__(self, ranks: int, folder: RunFolder, on_event: Callable[[dict], None], start: Optional[Path] = None) -> None:
        self._on_event = on_event
        self._scratch = tempfile.mkdtemp(prefix="rlflow-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
        # -P: nothing from the working directory may shadow the project's own packages
        command = [mpiexec(), "-n", str(ranks), sys.executable, "-P", "-m", "mpi4py", "-m", "runtime.rank", str(folder.path),
                   *([str(start)] if start else [])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace",
            env=rank_environment(ranks, self._scratch), start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM))
        self._said: list[str] = []
        self._readers = [threading.Thread(target=self._read_events, daemon=True),
                         threading.Thread(target=self._read_talk, daemon=True)]
        for reader in self._readers:
            reader.start()

    def _read_events(self) -> None:
        for line in self._process.stdout:
            event = _event(line)
            if event is not None:
                self._on_event(event)

    def _read_talk(self) -> None:
        self._said.extend(self._process.stderr)

    def wait(self) -> Ended:
        code = self._process.wait()
        for reader in self._readers:
            reader.join(timeout=GRACE_S)
        self._sweep()
        text = "".join(self._said)
        died = re.search(r"process rank (\d+) .*?exited on\s+signal (\d+)", text, re.S)
        if code and died:
            return Ended(code, int(died[1]), int(died[2]), text)
        return Ended(code, output=text)

    def kill(self) -> None:
        """Ends every rank now: mpiexec is asked first, so that it takes its ranks along. Does not wait for the end."""
        self._process.terminate()
        last_resort = threading.Timer(GRACE_S, self._kill_group)
        last_resort.daemon = True
        last_resort.start()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _sweep(self) -> None:
        """Removes what a killed job leaves behind: its session folder, and shared memory that could not lie there."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        for left in SHARED_MEMORY.glob(f"{job_name(self._scratch)}-*"):
            left.unlink(missing_ok=True)
