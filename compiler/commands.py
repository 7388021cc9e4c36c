"""`rlflowc compile` and `rlflowc explain`: what is read, written and printed around the compiler."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Optional, Sequence

from compiler.cluster import Cluster, local_cluster
from compiler.cluster_file import read_cluster
from compiler.compile import Observer as Watch
from compiler.compile import Placer, compile_program, lower_and_place, program_folder, read_shapes, unobserved
from compiler.explain import explain_json, explain_text
from compiler.ir import FlowGraph
from compiler.passes import NAMES
from compiler.placement import place
from compiler.plan import Plan
from compiler.search.program import placement_on
from compiler.search.report import placement_json, placement_text
from compiler.verify import load_plan
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
        print(_stage(checked, args, observer), end="")
    else:
        plan = compile_program(checked, cluster_of(args), args.ranks, observer)
        write(plan.to_json(), args.output)
    if args.time_passes:
        observer.report()
    return 0


def explain_command(args: Namespace) -> int:
    """Prints what a program's or a plan file's plan does where, with estimates.

    On a described cluster it is the placement that the search finds, unless `--ranks` asks for a plan.
    """
    began = time.perf_counter()
    cluster = cluster_of(args)
    if not cluster.is_local and args.ranks is None and not is_plan(args.program):
        return _explain_placement(args, cluster)
    plan = load_plan(Path(args.program)) if is_plan(args.program) else compile_file(args, args.ranks)[0]
    seconds = time.perf_counter() - began
    if args.json:
        put_json(explain_json(plan, cluster, seconds))
    else:
        print(explain_text(plan, cluster), end="")
    return 0


def _explain_placement(args: Namespace, cluster: Cluster) -> int:
    checked = load_program(args)
    shapes = read_shapes(checked, program_folder(checked.path))
    workload, found = placement_on(checked, shapes, cluster)
    if args.json:
        put_json(placement_json(checked.name, workload, found))
    else:
        print(placement_text(checked.name, cluster.name, workload, cluster.machines, found), end="")
    return 0


def compile_file(args: Namespace, ranks: Optional[int]) -> tuple[Plan, str]:
    """(plan, text) of the program `args.program` on `ranks` ranks, or on a number that fits if None."""
    checked = load_program(args)
    return compile_program(checked, cluster_of(args), ranks), checked.text


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


def _stage(checked: Checked, args: Namespace, observer: "Observer") -> str:
    shapes = read_shapes(checked, program_folder(checked.path))
    placement = place(checked, shapes, cluster_of(args), args.ranks)
    lower_and_place(checked, placement, observer)
    return str(observer.graphs[args.stop_after])


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
