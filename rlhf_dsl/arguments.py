"""What the commands of `rlflowc` take, and how they explain themselves."""

from __future__ import annotations

import argparse
import math
import re
from typing import Callable, NoReturn

from rlhf_dsl.diagnostics import closest, fault
from rlhf_dsl.version import VERSION

EXIT_CODES = """exit codes:
  0    done
  1    the program has errors (or `fmt --check` or `diff` found differences)
  2    a bad command line, or a file that cannot be read
  3    there is no feasible plan
  4    the run failed
  70   an internal error: a bug in rlflow
  130  interrupted"""
_EXAMPLES = {
    "": """examples:
  rlflowc check ppo.rlflow                     is it a program?
  rlflowc explain ppo.rlflow --ranks 4         what would run where, and what would move
  rlflowc run ppo.rlflow --ranks 2 -s b=32     train
  rlflowc help E0202                           what does this error mean?""",
    "check": """examples:
  rlflowc check programs/*.rlflow
  rlflowc check ppo.rlflow -s b=128 -s eps=0.1
  rlflowc check -v ppo.rlflow                  types, and which models values differentiate into
  rlflowc check - --json < ppo.rlflow""",
    "fmt": """examples:
  rlflowc fmt programs/*.rlflow                rewrite the files
  rlflowc fmt --check programs/*.rlflow        list those that would change, exit code 1 if there are any
  rlflowc fmt - < ppo.rlflow                   print the result""",
    "compile": """examples:
  rlflowc compile ppo.rlflow --ranks 4 -o ppo.plan.json
  rlflowc compile ppo.rlflow --print-after all --time-passes""",
    "explain": """examples:
  rlflowc explain ppo.rlflow --ranks 4
  rlflowc explain ppo.plan.json --json
  rlflowc explain ppo.rlflow --why actor       its layouts and their reasons, its estimates, its memory
  rlflowc explain ppo.rlflow --cluster a100.toml --format html -o report.html
  rlflowc explain --analyze runs/ppo-20260101-120000""",
    "diff": """examples:
  rlflowc diff old.plan.json ppo.rlflow --ranks 4     exit code 0 if both do the same, 1 if not
  rlflowc diff a.plan.json b.plan.json --json""",
    "sbatch": """examples:
  rlflowc sbatch ppo.plan.json --cluster a100.toml --gpus --time 04:00:00 -o ppo.sh && sbatch ppo.sh""",
    "graph": """examples:
  rlflowc graph ppo.rlflow
  rlflowc graph ppo.rlflow --format html -o ppo.html
  rlflowc graph ppo.rlflow --stage plan --ranks 4 --format dot | dot -Tpdf > ppo.pdf""",
    "run": """examples:
  rlflowc run ppo.rlflow                       compile for this machine and start the ranks
  rlflowc run ppo.rlflow -s run.steps=10 --run-dir runs/try
  mpiexec -n 4 rlflowc run ppo.plan.json       each of four ranks runs its part of the plan""",
    "resume": """examples:
  rlflowc resume runs/ppo-20260101-120000
  rlflowc resume runs/ppo-20260101-120000 --ranks 4 -s run.steps=200""",
    "eval": """examples:
  rlflowc eval grpo.rlflow --feed case.json --dp 2 --json
  rlflowc eval grpo.rlflow --feed case.json --check-grad""",
    "profile": """examples:
  rlflowc profile -o here.toml
  rlflowc explain ppo.rlflow --ranks 2 --cluster here.toml
  rlflowc profile --model catalog:qwen2.5-0.5b --ranks 2 -o here.toml""",
    "ops": """examples:
  rlflowc ops                                  everything that a program may use
  rlflowc ops togo""",
    "help": """examples:
  rlflowc help                                 all codes
  rlflowc help E0202""",
}


def parser() -> argparse.ArgumentParser:
    """The whole command line. It raises DiagnosticError E0005 for one that it does not understand."""
    top = _Parser(prog="rlflowc", description="Equations of RLHF, compiled to plans that run on MPI ranks.",
                  epilog=f"{_EXAMPLES['']}\n\n{EXIT_CODES}")
    top.add_argument("--version", action="version", version=f"rlflowc {VERSION}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for name, (text, declare) in _COMMANDS.items():
        one = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=_EXAMPLES[name])
        declare(one)
        one.add_argument("--color", choices=("auto", "always", "never"), default="auto",
                         help="colours in messages; auto: on a terminal, unless NO_COLOR is set")
        more = "show the type of every value and what it differentiates into; " if name == "check" else ""
        one.add_argument("-v", "--verbose", action="store_true", help=f"{more}show tracebacks of failures")
    return top


class _Parser(argparse.ArgumentParser):
    """Faults are diagnostics; options are never abbreviated, so that a new one breaks no script."""

    def __init__(self, **options):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise fault("E0005", reason=message.split(" (choose from")[0], help=_way_out(self.prog, message))


def _way_out(prog: str, message: str) -> str:
    """The closest command or option to the one that is not known, or where to read on."""
    words = re.findall(r"'([^']*)'", message) if "invalid choice" in message else []
    near = closest(words[0], words[1:]) if words else None
    return f"did you mean `{near}`?" if near else f"`{prog} --help` shows what there is"


class _Set(argparse.Action):
    """`-s name=value`, as often as wanted, into a dict; the last of a name counts."""

    def __call__(self, parser, namespace, values, option_string=None):
        name, equals, value = values.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", name.strip()):
            raise fault("E0004", given=values, option="-s", form="`name=value`")
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), name.strip(): value.strip()})


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number from 1 up")
    return int(text)


def _limit(text: str) -> str:
    if not re.fullmatch(r"\d{1,6}|\d{1,6}:\d\d(:\d\d)?|\d{1,4}-\d{1,2}(:\d\d){0,2}", text):
        raise argparse.ArgumentTypeError(f"`{text}` is no time of Slurm: minutes, HH:MM:SS or days-HH:MM:SS")
    return text


def _slurm_name(text: str) -> str:
    if not re.fullmatch(r"[\w.,@+-]+", text):
        raise argparse.ArgumentTypeError(f"`{text}` is not a name")
    return text


def _program(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("program", metavar="PROGRAM", help=f"{help}; - reads a program from standard input")


def _programs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("programs", metavar="PROGRAM", nargs="+", help="a .rlflow file; - reads standard input")


def _overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-s", "--set", metavar="name=value", action=_Set, default={},
                        help="a value for a param, a dim, or a setting as in -s run.steps=10; may be repeated")


def _placement(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", metavar="FILE", help="the cluster to plan for (TOML); this machine unless given")
    parser.add_argument("--ranks", metavar="N", type=_count, help="the number of ranks to use")
    parser.add_argument("--objective", choices=("time", "device-hours"),
                        help="what a search on --cluster finds the least of, in an iteration; time unless given")


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")


def _check(parser: argparse.ArgumentParser) -> None:
    _programs(parser)
    _overrides(parser)
    _json(parser)


def _fmt(parser: argparse.ArgumentParser) -> None:
    _programs(parser)
    parser.add_argument("--check", action="store_true", help="change nothing; list the files that would change")


def _compile(parser: argparse.ArgumentParser) -> None:
    _program(parser, "a .rlflow file")
    _overrides(parser)
    _placement(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write the plan; standard output unless given")
    parser.add_argument("--stop-after", metavar="STAGE", help="print what this stage makes, and stop")
    parser.add_argument("--print-after", metavar="PASS", help="print the graph after this pass, or after all")
    parser.add_argument("--time-passes", action="store_true", help="print how long each pass takes")


def _explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", metavar="PROGRAM", nargs="?", help="a .rlflow file or a plan; - reads a program from standard input")
    _overrides(parser)
    _placement(parser)
    _json(parser)
    parser.add_argument("--why", metavar="NAME", help="why a value, model, layout or step is where it is and costs what it costs")
    parser.add_argument("--format", choices=("text", "html"), default="text",
                        help="text: for the terminal; html: a page with timeline, device map, memory, transfers and program")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write the page; standard output unless given")
    parser.add_argument("--analyze", metavar="RUN", help="the folder of a run: what its steps took beside what was estimated")


def _diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", help="a .rlflow file or a plan")
    parser.add_argument("after", metavar="B", help="another one")
    _overrides(parser)
    _placement(parser)
    _json(parser)


def _sbatch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="a plan file, as it will lie where the job runs")
    parser.add_argument("--cluster", metavar="FILE", help="the cluster that the plan was made for; this machine unless given")
    parser.add_argument("--time", metavar="TIME", type=_limit, help="the job's limit, as Slurm writes it: 90, 04:00:00, 2-12:00:00")
    parser.add_argument("--partition", metavar="NAME", type=_slurm_name, help="Slurm's partition; its default unless given")
    parser.add_argument("--account", metavar="NAME", type=_slurm_name, help="the account that pays; the default unless given")
    parser.add_argument("--gpus", action="store_true", help="ask for a GPU for each rank")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write the script; standard output unless given")


def _graph(parser: argparse.ArgumentParser) -> None:
    _program(parser, "a .rlflow file")
    _overrides(parser)
    _placement(parser)
    parser.add_argument("--stage", metavar="STAGE", default="graph",
                        help="graph: what the program says; placed: with layouts; resharded: with moves between them; "
                             "plan: all that a plan does; or the name of a pass")
    parser.add_argument("--format", choices=("tree", "dot", "mermaid", "svg", "html"), default="tree",
                        help="tree: for the terminal; dot: for Graphviz; html: a page with the program beside the picture")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write it; standard output unless given")


def _run(parser: argparse.ArgumentParser) -> None:
    _program(parser, "a .rlflow file or a plan")
    _overrides(parser)
    _placement(parser)
    parser.add_argument("--run-dir", metavar="DIR", help="the folder of the run; a new one in runs/ unless given")
    parser.add_argument("--tensorboard", action="store_true", help="write the metrics for TensorBoard too, into the run folder")


def _resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder of the run")
    _overrides(parser)
    _placement(parser)


def _eval(parser: argparse.ArgumentParser) -> None:
    _program(parser, "a .rlflow file")
    parser.add_argument("--feed", metavar="FEED", required=True, help="the numbers (JSON, rlflow.feed/1)")
    _overrides(parser)
    parser.add_argument("--dp", metavar="N", type=_count, default=1, help="split the rows over N shards")
    parser.add_argument("--micro-batch", metavar="ROWS", type=_count, help="rows of a micro-batch; all unless given")
    parser.add_argument("--no-shuffle", action="store_true", help="take mini-batches in the order of the rows")
    parser.add_argument("--check-grad", action="store_true", help="compare every gradient with finite differences")
    parser.add_argument("--dtype", choices=("f64", "f32"), default="f64", help="the arithmetic")
    _json(parser)


def _profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", default="builtin:tiny",
                        help="whose layers to time: a folder with a config.json, builtin:NAME or catalog:NAME")
    parser.add_argument("--ranks", metavar="N", type=_count, help="ranks that measure together; a core each, four at most, unless given")
    parser.add_argument("--seconds", metavar="S", type=_seconds, default=1.0, help="about how long one measurement takes; 1 unless given")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write the cluster file; standard output unless given")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1000:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of seconds above 0 and below 1000")
    return value


def _ops(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="one operation")
    _json(parser)


def _help(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", metavar="CODE", nargs="?", help="a code such as E0202; all codes unless given")


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "check": ("check programs without running anything", _check),
    "fmt": ("rewrite programs in their canonical form", _fmt),
    "compile": ("compile a program to a plan", _compile),
    "explain": ("show what a plan does, where, and what it moves", _explain),
    "diff": ("say how two plans differ in what they do", _diff),
    "sbatch": ("write the job script that has Slurm run a plan", _sbatch),
    "graph": ("draw what a program computes from what", _graph),
    "run": ("run a program or a plan", _run),
    "resume": ("go on with a run from its last checkpoint", _resume),
    "eval": ("evaluate a program's equations on given numbers, without any model", _eval),
    "profile": ("measure this machine, and write it as a cluster file", _profile),
    "ops": ("list the operations that programs may use", _ops),
    "help": ("explain a diagnostic", _help),
}
