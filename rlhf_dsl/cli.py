"""`rlflowc`, the command line. It alone knows language, compiler and runtime, and imports each when it is asked for."""

from __future__ import annotations

import argparse
import sys
import traceback
from typing import Callable, NoReturn, Optional, Sequence

from rlhf_dsl import arguments, terminal
from rlhf_dsl.diagnostics import DiagnosticError
from rlhf_dsl.version import VERSION

INTERNAL_ERROR, INTERRUPTED = 70, 130

Command = Callable[[argparse.Namespace], int]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs one command and returns its exit code: see `arguments.EXIT_CODES`."""
    terminal.make_printable([sys.stdout, sys.stderr])
    args = argparse.Namespace(verbose=False, color="auto")
    try:
        arguments.parser().parse_args(argv, args)
        return _command(args.command)(args)
    except DiagnosticError as error:
        terminal.show(error.diagnostics, args.color)
        if args.verbose and error.exit_code > 2:
            traceback.print_exc()
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `rlflowc ops | head`
        sys.stderr.close()
        return 0
    except SystemExit as end:  # --help and --version
        return int(end.code or 0)
    except Exception as error:
        return _report_internal(error, args.verbose)


def _command(name: str) -> Command:
    if name in ("check", "fmt", "help", "ops"):
        return _language_command(name)
    if name in ("compile", "explain"):
        from compiler import commands as compiler_commands
        return {"compile": compiler_commands.compile_command, "explain": compiler_commands.explain_command}[name]
    if name == "run":
        from runtime.commands import run_command
        return run_command
    from runtime.feeds.command import eval_command
    return eval_command


def _language_command(name: str) -> Command:
    if name == "check":
        from rlhf_dsl.commands.check import check_command
        return check_command
    if name == "fmt":
        from rlhf_dsl.commands.fmt import fmt_command
        return fmt_command
    if name == "help":
        from rlhf_dsl.commands.explain_code import help_command
        return help_command
    from rlhf_dsl.commands.ops import ops_command
    return ops_command


def _report_internal(error: Exception, verbose: bool) -> int:
    if verbose:
        traceback.print_exception(error)
    text = str(error).split("\n")[0]
    terminal.say(f"internal error in rlflowc {VERSION}: {type(error).__name__}: {text}")
    terminal.say("this is a bug in rlflow, not in your program" + ("" if verbose else "; -v shows where it happened"))
    return INTERNAL_ERROR


def entry() -> NoReturn:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    entry()
