"""`rlflowc graph`: a picture of what a program computes, or of any stage of its compilation."""

from __future__ import annotations

from argparse import Namespace
from typing import Callable

from compiler.commands import STAGES, Observer, check_stage, compile_checked, load_program, placed, write
from compiler.compile import lower_and_place, lower_equations
from compiler.drawing.host_moves import with_host_moves
from compiler.drawing.model import Drawing, drawing_of
from compiler.drawing.text_formats import dot, mermaid
from compiler.drawing.tree import tree
from compiler.ir import FlowGraph
from compiler.passes import NAMES
from rlhf_dsl.typed import Checked

PLAN = "plan"
AFTER = {"placed": "shard", "resharded": "reshard"}  # what is true of a graph, by the pass that makes it so
_BEFORE_PLACEMENT = ("graph", *NAMES[:NAMES.index("place")])


def graph_command(args: Namespace) -> int:
    """Prints the drawing of `args.stage`, or writes it to `args.output`.

    "graph" is what the program says; a pass, what is left after it; "placed", values with their layouts; "resharded",
    moves between them, too; "plan", all that a plan's steps do.
    """
    check_stage("--stage", args.stage, (*STAGES, *AFTER, PLAN))
    checked = load_program(args)
    write(renderer(args.format)(_drawing(checked, args)), args.output)
    return 0


def renderer(format: str) -> Callable[[Drawing], str]:
    """From a drawing to the text of a file. jinja2 is read for pictures alone."""
    if format in ("svg", "html"):
        from compiler.drawing import picture

        return getattr(picture, format)
    return {"tree": tree, "dot": dot, "mermaid": mermaid}[format]


def _drawing(checked: Checked, args: Namespace) -> Drawing:
    if args.stage != PLAN:
        return drawing_of(_graph(checked, args), checked)
    observer = Observer()
    plan = compile_checked(checked, args, args.ranks, observer)
    graph = observer.graphs[NAMES[-1]]
    return with_host_moves(drawing_of(graph, checked), graph, plan, checked)


def _graph(checked: Checked, args: Namespace) -> FlowGraph:
    """Until models are placed, neither their folders nor a cluster are needed."""
    observer, stage = Observer(), AFTER.get(args.stage, args.stage)
    if stage in _BEFORE_PLACEMENT:
        lower_equations(checked, observer)
        return observer.graphs[stage]
    lower_and_place(checked, placed(checked, args), observer)
    return observer.graphs[stage]
