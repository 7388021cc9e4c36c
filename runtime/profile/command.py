"""`rlflowc profile`: starts ranks that measure, shows what they find, and writes a cluster file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Iterator, TextIO

from compiler.catalog import PREFIX, model_shape
from compiler.cluster import MOST_LOCAL_RANKS
from compiler.commands import write
from compiler.cost.sizes import sizes_of
from compiler.local import memory, physical_cores
from compiler.reading.units import plural
from compiler.shapes import ModelShape, shape_from_config
from compiler.sources import resolve_model
from rlhf_dsl.diagnostics import fault
from rlhf_dsl.terminal import say
from runtime import launch
from runtime.profile.found import cluster_text, machine_of

GRACE_S = 10
UNITS = {"FLOP/s": (1e9, "GFLOP/s"), "B/s": (1e9, "GB/s"), "s": (1e-6, "us")}


def profile_command(args: Namespace) -> int:
    """args: model, ranks, seconds, output. The table goes to standard error, the cluster file to `output`."""
    ranks = args.ranks or min(physical_cores(), MOST_LOCAL_RANKS)
    launch.check_number(ranks)
    shape = _shape(args.model)
    found: dict[str, float] = {}
    say(f"measuring with {plural(ranks, 'rank')} and the layers of {args.model}; other work on this machine shows")
    for line in _lines(ranks, {"shape": dataclasses.asdict(shape), "seconds": args.seconds}):
        found[line["name"]] = line["value"]
        scale, unit = UNITS[line["unit"]]
        say(f"  {line['about']:64}{line['value'] / scale:10.1f} {unit}")
    write(_text(found, shape, ranks, args.model), args.output)
    return 0


def _text(found: dict[str, float], shape: ModelShape, ranks: int, model: str) -> str:
    devices = max(ranks, physical_cores())
    machine = machine_of(found, sizes_of(shape, "policy"), devices, memory() / devices)
    about = (f"Measured by rlflowc profile with {ranks} ranks and the layers of {model}. "
             f"In bfloat16 products reach {found['flops_bf16'] / 1e12:.3g} TFLOP/s.")
    return cluster_text(machine, about)


def _shape(model: str) -> ModelShape:
    """Of a folder or a model of the catalogue. Raises DiagnosticError R0130 to R0132, P0112."""
    return model_shape(model) if model.startswith(PREFIX) else shape_from_config(resolve_model(model, Path()))


def _lines(ranks: int, request: dict) -> Iterator[dict]:
    """What rank 0 says, as it comes. Raises DiagnosticError R0167 if the ranks fail; an interrupt ends them."""
    scratch = tempfile.mkdtemp(prefix="rlflow-", dir=launch.SHARED_MEMORY if launch.SHARED_MEMORY.is_dir() else None)
    talk = open(Path(scratch) / "talk", "w+", encoding="utf-8", errors="replace")
    process = subprocess.Popen(
        [launch.mpiexec(), "-n", str(ranks), sys.executable, "-P", "-m", "mpi4py", "-m", "runtime.profile.rank",
         json.dumps(request)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=talk, encoding="utf-8", errors="replace",
        env=launch.rank_environment(ranks, scratch), start_new_session=True,
        preexec_fn=lambda: launch.die_with_parent(signal.SIGTERM))
    try:
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if process.wait():
            raise fault("R0167", reason=_last_error(talk) or f"exit code {process.returncode}")
    finally:
        _end(process)
        talk.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _last_error(talk: TextIO) -> str:
    """The line of what ranks said that names an error."""
    talk.seek(0)
    lines = [line.strip() for line in talk if re.match(r"[\w.]+(Error|Exception): ", line)]
    return lines[-1] if lines else ""


def _end(process: subprocess.Popen) -> None:
    """mpiexec takes its ranks along; whatever stays is killed."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
