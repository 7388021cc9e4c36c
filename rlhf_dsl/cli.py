"""`rlflowc`, the command line. It alone knows language, compiler and runtime, and imports each when it is asked for."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import sys
import traceback
from typing import Callable, Optional, Sequence

from rlhf_dsl import arguments, terminal
from rlhf_dsl.diagnostics import DiagnosticError
from rlhf_dsl.uncollected import uncollected
from rlhf_dsl.version import VERSION

INTERNAL_ERROR, INTERRUPTED = 70, 130

Command = Callable[[argparse.Namespace], int]
_COMMANDS = {
    "check": "rlhf_dsl.commands.check:check_command",
    "fmt": "rlhf_dsl.commands.fmt:fmt_command",
    "help": "rlhf_dsl.commands.explain_code:help_command",
    "ops": "rlhf_dsl.commands.ops:ops_command",
    "compile": "compiler.commands:compile_command",
    "explain": "compiler.reading.commands:explain_command",
    "diff": "compiler.reading.commands:diff_command",
    "sbatch": "compiler.reading.commands:sbatch_command",
    "graph": "compiler.graph:graph_command",
    "run": "runtime.commands:run_command",
    "resume": "runtime.resume:resume_command",
    "eval": "runtime.feeds.command:eval_command",
    "profile": "runtime.profile.command:profile_command",
}
_PLANNING = frozenset(("compile", "explain", "diff", "graph"))  # what they make stays until they end, soon


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs one command and returns its exit code (`arguments.EXIT_CODES`)."""
    terminal.make_printable([sys.stdout, sys.stderr])
    args = argparse.Namespace(verbose=False, color="auto")
    try:
        arguments.parser().parse_args(argv, args)
        with uncollected() if args.command in _PLANNING else contextlib.nullcontext():
            code = _command(args.command)(args)
        sys.stdout.flush()
        if argv is None:
            gc.freeze()  # the process ends: its last looks for cycles would go through everything
        return code
    except DiagnosticError as error:
        terminal.show(error.diagnostics, args.color)
        if args.verbose and error.exit_code > 2:
            traceback.print_exc()
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `rlflowc ops | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to flush at exit goes nowhere
        return 0
    except SystemExit as end:  # --help and --version
        return int(end.code or 0)
    except Exception as error:
        return _report_internal(error, args.verbose)


def _command(name: str) -> Command:
    module, function = _COMMANDS[name].split(":")
    return getattr(importlib.import_module(module), function)


def _report_internal(error: Exception, verbose: bool) -> int:
    if verbose:
        traceback.print_exception(error)
    text = str(error).split("\n")[0]
    terminal.say(f"internal error in rlflowc {VERSION}: {type(error).__name__}: {text}")
    terminal.say("this is a bug in rlflow, not in your program" + ("" if verbose else "; -v shows where it happened"))
    return INTERNAL_ERROR


if __name__ == "__main__":
    sys.exit(main())
