"""Calls of users' `@op` functions. They run in a worker process, never in a rank, so that none can hang or crash it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

import rlhf_dsl
from rlhf_dsl.diagnostics import DiagnosticError, fault
from rlhf_dsl.ops import annotation_dims
from rlhf_dsl.typed import PyOp

IMPORT_LIMIT_S = 120.0
_WORKER = Path(__file__).with_name("python_ops_worker.py")
_WANTED = {"f32": "a number", "bool": "True or False", "text": "a str", "list": "a list of numbers"}
_LAUNCHER = ("OMPI_", "PMIX_", "PRTE_", "PMI_")  # a function that uses MPI must not take itself for a rank


class OpRunner:
    """One Python op and its worker, which starts here and imports the user's module while the caller does other work.

    Make it in a thread that lives as long as the worker: the system ends the worker with that thread.
    replaced: how many failed calls got the value of `on_error` so far; `last_failure` says why the last one failed
    """

    def __init__(self, op: PyOp) -> None:
        self.op = op
        self.replaced, self.last_failure = 0, ""
        self._worker: Optional[_Worker] = _Worker(op)

    def call(self, columns: Sequence[Sequence[Any]], rows: Optional[Sequence[int]] = None,
             lengths: Optional[Sequence[int]] = None) -> list:
        """Calls the function once for each row, in order, and returns what it gave.

        columns: for each argument its value in every row: str, float, bool, a list of floats (one per own token), or,
        for a batched op, nested lists
        rows: what messages call the rows, by default 0, 1, ..; an op without arguments is called once for each
        lengths: for `-> list[float]`, how many values each row must give; by default those of the first list argument
        Each result is a float, bool, str, a list of floats, or, for a batched op, nested lists of them.
        Raises R0320 if the module cannot be imported; R0321 (raised), R0322 (time limit), R0323 (NaN or another type)
        or R0324 (its process died) for the first row that fails, unless the op's `on_error` gives it a value.
        """
        calls = list(zip(*columns)) if columns else [()] * len(rows)
        rows = range(len(calls)) if rows is None else rows
        results: list = []
        while len(results) < len(calls):
            for answer in self._answers(calls[len(results):]):
                i = len(results)
                results.append(self._result(answer, calls[i], rows[i], None if lengths is None else lengths[i]))
        return results

    def close(self) -> None:
        """Ends the worker. A later call starts another."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _answers(self, calls: list[tuple]) -> Iterator[dict]:
        """Answers to the calls in order; they end early after one whose worker had to be ended."""
        if self._worker is not None and not self._worker.alive:
            self.close()
        if self._worker is None:
            self._worker = _Worker(self.op)
        try:
            self._worker.wait_until_ready()
            self._worker.send(calls)
            for _ in calls:
                yield self._worker.receive(self.op.timeout)
        except _Lost as lost:
            self.close()
            yield {"lost": lost}

    def _result(self, answer: dict, arguments: tuple, row: int, length: Optional[int]) -> Any:
        shape = self._shape(arguments, length)
        if "value" in answer:
            if _fits(answer["value"], shape):
                return answer["value"]
            answer = {"wrong": f"{_WANTED[self.op.result]} of another length"}
        error = self._fault(answer, row)
        if self.op.on_error is None or shape is _UNKNOWN:
            self.close()  # what it still answers to this batch is nobody's
            raise error
        self.replaced, self.last_failure = self.replaced + 1, str(error)
        return _filled(shape, self.op.on_error)

    def _shape(self, arguments: tuple, length: Optional[int]) -> Any:
        """The lists that a result must consist of, nested, with None at their ends; _UNKNOWN if nothing says it."""
        dims = [annotation_dims(annotation) for _, annotation in self.op.args]
        if self.op.batched:
            want = self.op.result_dims
            like = (a for a, names in zip(arguments, dims) if names[:len(want)] == want)
            return next((_outline(a, len(want)) for a in like), _UNKNOWN)
        if self.op.result != "list":
            return None
        if length is None:
            length = next((len(a) for a in arguments if isinstance(a, list)), None)
        return _UNKNOWN if length is None else [None] * length

    def _fault(self, answer: dict, row: int) -> DiagnosticError:
        op, place = self.op, f"{self.op.file}:{self.op.line}"
        if "raised" in answer:
            error = fault("R0321", place=answer["place"] or place, op=op.name, error=answer["raised"], row=row)
            error.__cause__ = OpError(answer["traceback"])
            return error
        if "wrong" in answer:
            wanted = _WANTED[op.result]
            return fault("R0323", place=place, op=op.name, value=answer["wrong"], row=row, wanted=wanted)
        if answer["lost"].reason:
            return fault("R0324", place=place, op=op.name, row=row, reason=answer["lost"].reason)
        return fault("R0322", place=place, op=op.name, timeout=op.timeout, row=row)


class OpError(Exception):
    """What the user's function raised, with its traceback as text."""


class _Lost(Exception):
    """The worker gives no more answers. reason: how it died, "" if it took too long."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class _Worker:
    """The process, and lines of JSON to and from it."""

    def __init__(self, op: PyOp) -> None:
        self._op, self._ready, self._buffer = op, False, b""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
            start_new_session=True)  # so that what the function started ends with it
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        with contextlib.suppress(_Lost):  # the first answer tells
            self._write({
                "module": op.module, "name": op.name, "file": os.path.abspath(op.file), "root": str(_package_root(op)),
                "library": str(Path(rlhf_dsl.__file__).resolve().parents[1]), "result": op.result,
                "depth": len(op.result_dims), "parent": os.getpid()})

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Raises R0320 if the module cannot be imported."""
        if self._ready:
            return
        try:
            answer = self.receive(IMPORT_LIMIT_S)
        except _Lost as lost:
            answer = {"failed": lost.reason or f"its module took more than {IMPORT_LIMIT_S:g} s to import"}
        if "failed" in answer:
            self.end()
            place = f"{self._op.file}:{self._op.line}"
            raise fault("R0320", place=place, op=self._op.name, reason=answer["failed"])
        self._ready = True

    def send(self, calls: list[tuple]) -> None:
        self._write(calls)

    def receive(self, timeout: float) -> dict:
        """The next answer. Raises _Lost after `timeout` seconds, or if the process has died."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise _Lost()
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise _Lost(self._death())
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def end(self) -> None:
        """Ends the process and everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._selector.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()

    def _write(self, message: Any) -> None:
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise _Lost(self._death()) from error

    def _death(self) -> str:
        code = self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _package_root(op: PyOp) -> Path:
    """The folder from which `op.module` is imported."""
    file, parts = Path(op.file).absolute(), op.module.count(".")
    return file.parents[parts + 1 if file.name == "__init__.py" else parts]


# ---- nested lists -------------------------------------------------------------------------------

_UNKNOWN = object()


def _outline(value: Any, depth: int) -> Any:
    return [_outline(x, depth - 1) for x in value] if depth else None


def _fits(value: Any, shape: Any) -> bool:
    """Whether a nested list has the given outline."""
    if shape is _UNKNOWN or shape is None:
        return True
    return len(value) == len(shape) and all(_fits(v, s) for v, s in zip(value, shape))


def _filled(shape: Any, value: Any) -> Any:
    return value if shape is None else [_filled(s, value) for s in shape]
