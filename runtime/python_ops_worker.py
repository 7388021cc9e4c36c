"""The process in which a user's `@op` function runs: a script that `runtime.python_ops` starts.

It speaks lines of JSON over its standard input and output: first the description of the op, answered by
{"ready": true} or {"failed": reason}; then lists of calls, each a list of arguments, answered by one line a call as
soon as it is done: {"value": v}, {"wrong": what it returned} or {"raised": error, "place": "file:line", "traceback":
text}. Whatever the function prints goes to standard error. Start-up counts: nothing but the standard library is
imported here, and what the user's module imports.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, Callable

PR_SET_PDEATHSIG = 1


class Wrong(Exception):
    """A result that is not of the promised type."""


def main() -> None:
    lines, answers = _take_over_pipes()
    spec = json.loads(lines.readline())
    _die_with_parent(spec["parent"])
    try:
        function = load(spec["module"], spec["name"], spec["file"], spec["root"], spec["library"])
    except BaseException as error:  # a module may raise anything, SystemExit too
        _answer(answers, {"failed": _place(error, spec["file"]) + describe(error)})
        return
    _answer(answers, {"ready": True})
    clean = _cleaner(spec["result"], spec["depth"])
    for line in lines:
        for arguments in json.loads(line):
            _answer(answers, run(function, arguments, clean, spec["file"]))


def load(module: str, name: str, file: str, root: str, library: str) -> Callable:
    """The function, from its module imported below the folder `root`; `library` holds `rlhf_dsl`."""
    sys.path.append(library)
    importlib.import_module("rlhf_dsl")  # ours, before a folder of that name beside the user's module can be
    sys.path.insert(0, root)
    loaded = importlib.import_module(module)
    if not os.path.samefile(loaded.__file__ or "", file):
        raise ImportError(f"the name `{module}` belongs to another module, {loaded.__file__}; rename {file}")
    return getattr(loaded, name)


def run(function: Callable, arguments: list, clean: Callable[[Any], Any], file: str) -> dict:
    """The answer to one call."""
    try:
        result = function(*arguments)
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        return {"raised": describe(error), "place": _place(error, file).removesuffix(": "), "traceback": text}
    try:
        return {"value": clean(result)}
    except Wrong:
        return {"wrong": _short(repr(result))}


# ---- results ------------------------------------------------------------------------------------

def _cleaner(result: str, depth: int) -> Callable[[Any], Any]:
    """Checks a result and makes it plain. result: "f32", "bool", "text" or "list"; depth: lists around it."""
    if result == "list":
        return _nested(_number, 1)
    return _nested({"f32": _number, "bool": _boolean, "text": _text}[result], depth)


def _nested(leaf: Callable[[Any], Any], depth: int) -> Callable[[Any], Any]:
    if depth == 0:
        return leaf

    inner = _nested(leaf, depth - 1)

    def clean(value: Any) -> list:
        if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__iter__"):
            raise Wrong
        return [inner(x) for x in value]

    return clean


def _number(value: Any) -> float:
    """Takes what NumPy and torch call a number too."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise Wrong
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise Wrong from error
    if math.isnan(number):
        raise Wrong
    return number


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
        raise Wrong
    return bool(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Wrong
    return value


# ---- errors -------------------------------------------------------------------------------------

def describe(error: BaseException) -> str:
    """`ValueError: no digits`, in one line."""
    text = " ".join(str(error).split())
    return _short(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _place(error: BaseException, file: str) -> str:
    """`file:line: ` of the innermost frame in the user's file, of the syntax error, or of the innermost frame."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: "
    frames = traceback.extract_tb(error.__traceback__)
    frames = [f for f in frames if f.filename != __file__ and "<frozen" not in f.filename]
    own = [f for f in frames if Path(f.filename) == Path(file)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}: " if own else ""


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."


# ---- the process --------------------------------------------------------------------------------

def _take_over_pipes():
    """The two pipes for ourselves; the user's code gets an empty input, and standard error to print to."""
    lines, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    return lines, answers


def _answer(answers: int, message: dict) -> None:
    data = memoryview(json.dumps(message).encode() + b"\n")
    while data:
        data = data[os.write(answers, data):]


def _die_with_parent(parent: int) -> None:
    """Linux: a hanging function must not outlive a rank that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the job is the rank's to handle
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
