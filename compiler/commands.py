"""`rlflowc compile` and `rlflowc explain`: what is read, written and printed around the compiler."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Optional, Sequence

from compiler.cluster import Cluster
from compiler.cluster_file import read_cluster
from compiler.compile import Observer as Watch
from compiler.compile import Placer, compile_program, lower_and_place, program_folder, read_shapes, unobserved
from compiler.explain import explain_json, explain_text
from compiler.ir import FlowGraph
from compiler.local import local_cluster
from compiler.passes import NAMES
from compiler.placement import Placement, place
from compiler.plan import Plan
from compiler.proof.fits import require_fit
from compiler.proof.verify import load_plan
from compiler.search.placement import TIME, Found
from compiler.search.program import Searched, Told, untold
from compiler.search.progress import ShownProgress
from rlhf_dsl.diagnostics import did_you_mean, fault
from rlhf_dsl.frontend import load
from rlhf_dsl.source import STDIN
from rlhf_dsl.terminal import put_json, say, show
from rlhf_dsl.typed import Checked

STAGES = ("graph", *NAMES)  # those before the plan


def compile_command(args: Namespace) -> int:
    """Writes the plan to `args.output`, or prints it; `args.stop_after` prints an earlier stage."""
    check_stage("--stop-after", args.stop_after, (*STAGES, "plan"))
    check_stage("--print-after", args.print_after, (*STAGES, "all"))
    checked = load_program(args)
    observer = Observer(args.print_after)
    if args.stop_after in STAGES:
        lower_and_place(checked, placed(checked, args), observer)
        print(observer.graphs[args.stop_after], end="")
    else:
        write(compile_checked(checked, args, args.ranks, observer).to_json(), args.output)
    if args.time_passes:
        observer.report()
    return 0


def explain_command(args: Namespace) -> int:
    """Prints what a program's or a plan file's plan does where, with estimates."""
    began = time.perf_counter()
    plan, searched = _plan_to_explain(args)
    if args.json:
        put_json(explain_json(plan, cluster_of(args), searched or time.perf_counter() - began))
    else:
        print(explain_text(plan, cluster_of(args)), end="")
    return 0


def _plan_to_explain(args: Namespace) -> tuple[Plan, float]:
    """(plan, seconds of its search); 0 where nothing was searched."""
    if is_plan(args.program):
        return load_fitting(args), 0.0
    found: list[Found] = []
    plan = compile_checked(load_program(args), args, args.ranks, told=found.append)
    return plan, sum(one.search_s for one in found)


def load_fitting(args: Namespace) -> Plan:
    """The plan in the file `args.program`. Raises DiagnosticError P0204 if it does not fit `args.cluster`."""
    plan, cluster = load_plan(Path(args.program)), cluster_of(args)
    if not cluster.is_local:
        require_fit(plan, cluster, args.program)
    return plan


def compile_file(args: Namespace, ranks: Optional[int]) -> tuple[Plan, str]:
    """(plan, text) of the program `args.program` on `ranks` ranks, or on a number that fits if None."""
    checked = load_program(args)
    return compile_checked(checked, args, ranks), checked.text


def compile_checked(checked: Checked, args: Namespace, ranks: Optional[int], observe: Watch = unobserved,
                    told: Told = untold) -> Plan:
    """The plan as `args.cluster` and `args.objective` ask for it."""
    with _placer(args, told) as placer:
        return compile_program(checked, cluster_of(args), ranks, observe, placer)


def placed(checked: Checked, args: Namespace) -> Placement:
    """Where models run, as `compile_checked` has it."""
    with _placer(args) as placer:
        return placer(checked, read_shapes(checked, program_folder(checked.path)), cluster_of(args), args.ranks)


@contextmanager
def _placer(args: Namespace, told: Told = untold) -> Iterator[Placer]:
    """On a described cluster a search, which shows its progress."""
    if cluster_of(args).is_local:
        if args.objective:
            raise fault("E0005", reason="--objective says what a search shall find", help="give a `--cluster FILE`")
        yield place
        return
    with ShownProgress() as progress:
        yield Searched(args.objective or TIME, progress, told)


def is_plan(path: str) -> bool:
    """Whether the command line means a plan file: by its name."""
    return path != STDIN and path.endswith(".json")


def load_program(args: Namespace) -> Checked:
    """The checked program; its warnings go to standard error."""
    checked = load(args.program, dict(args.set))
    show(checked.warnings, args.color)
    return checked


def cluster_of(args: Namespace) -> Cluster:
    """The cluster of `--cluster`, or this machine."""
    return read_cluster(Path(args.cluster)) if args.cluster else local_cluster()


def check_stage(option: str, given: Optional[str], known: Sequence[str]) -> None:
    """Raises E0005 for a stage that is not known."""
    if given and given not in known:
        raise fault("E0005", reason=f"{option}: unknown stage `{given}`", help=did_you_mean(given, known))


def write(text: str, output: Optional[str]) -> None:
    """Beside its place, then renamed: a file of that name is a whole plan."""
    if not output or output == STDIN:
        sys.stdout.write(text)
        return
    path = Path(output)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise fault("P0110", place=output, reason=error.strerror or str(error)) from None
    say(f"wrote {output}")


class Observer:
    """Shows graphs after passes as they come, and keeps their times."""

    def __init__(self, wanted: Optional[str] = None) -> None:
        self.wanted = wanted
        self.graphs: dict[str, FlowGraph] = {}
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, graph: FlowGraph, seconds: float) -> None:
        self.graphs[name], self.seconds[name] = graph, seconds
        if self.wanted in ("all", name):
            say(f"# after {name}\n{graph}")

    def report(self) -> None:
        for name, seconds in self.seconds.items():
            say(f"{name:18}{seconds * 1e3:8.2f} ms")
        say(f"{'all':18}{sum(self.seconds.values()) * 1e3:8.2f} ms")
