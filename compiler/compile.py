"""A checked program becomes a verified plan."""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import Callable, Mapping, Optional

from compiler import unexecuted
from compiler.catalog import PREFIX, model_shape
from compiler.cluster import Cluster
from compiler.cost.caches import with_caches
from compiler.emit import Target, emit
from compiler.ir import FlowGraph
from compiler.local import local_cluster
from compiler.lower import lower
from compiler.passes import Pass, equation_passes, placement_passes
from compiler.placement import Placement, place
from compiler.plan import Plan
from compiler.proof.fits import require_fit
from compiler.proof.verify import verify_plan
from compiler.retained import with_retained
from compiler.shapes import ModelShape, shape_from_config
from compiler.sources import resolve_model
from rlhf_dsl.diagnostics import DiagnosticError, fault
from rlhf_dsl.source import STDIN, Source
from rlhf_dsl.typed import Checked, Expr

Observer = Callable[[str, FlowGraph, float], None]  # (pass, graph after it, its seconds)
Placer = Callable[[Checked, Mapping[str, ModelShape], Cluster, Optional[int]], Placement]  # as `placement.place`


def unobserved(name: str, graph: FlowGraph, seconds: float) -> None:
    """Watches nothing."""


def compile_program(checked: Checked, cluster: Optional[Cluster] = None, ranks: Optional[int] = None,
                    observe: Observer = unobserved, placer: Placer = place) -> Plan:
    """The plan of `checked` on `cluster` (else this machine) and `ranks` (else what constraints and cluster allow).

    placer: `place`, or a `search.program.Searched`

    Raises DiagnosticError: P01 where no plan is possible, R013 for a model's folder, P0202 for a plan without proof,
    P0204 for one that does not fit a described cluster.
    """
    unexecuted.refuse(checked)
    cluster = cluster or local_cluster()
    folder = program_folder(checked.path)
    shapes = read_shapes(checked, folder)
    placement = placer(checked, shapes, cluster, ranks)
    graph = lower_and_place(checked, placement, observe)
    plan = emit(checked, graph, Target(cluster.digest, placement, str(folder), shapes))
    if not cluster.is_local:
        plan = with_caches(plan, cluster)
    plan = with_retained(plan, cluster)
    verify_plan(plan, checked.path)
    if not cluster.is_local:
        require_fit(plan, cluster, checked.path)
    return plan


def lower_equations(checked: Checked, observe: Observer = unobserved,
                    wanted: frozenset[Expr] = frozenset()) -> FlowGraph:
    """The graph after the passes that know nothing of ranks; `wanted` is no dead code even if nothing reads it."""
    return _passed(_observed("graph", lambda: lower(checked), observe), equation_passes(checked, wanted), observe)


def lower_and_place(checked: Checked, placement: Placement, observe: Observer = unobserved,
                    wanted: frozenset[Expr] = frozenset()) -> FlowGraph:
    """The graph after all passes."""
    return _passed(lower_equations(checked, observe, wanted), placement_passes(checked, placement), observe)


def _passed(graph: FlowGraph, passes: tuple[Pass, ...], observe: Observer) -> FlowGraph:
    for one in passes:
        graph = _observed(one.name, functools.partial(one, graph), observe)
    return graph


def _observed(name: str, make: Callable[[], FlowGraph], observe: Observer) -> FlowGraph:
    began = time.perf_counter()
    graph = make()
    observe(name, graph, time.perf_counter() - began)
    wrong = graph.verify()
    if wrong:
        raise fault("P0202", reason=f"after the pass `{name}`, {wrong[0]}")
    return graph


def program_folder(path: str) -> Path:
    """Where relative paths of a program start: its folder, or the working directory for standard input."""
    return Path.cwd() if path == STDIN else Path(path).resolve().parent


def read_shapes(checked: Checked, folder: Path) -> dict[str, ModelShape]:
    """The shape of each model. A folder that cannot be read is reported at the model's line."""
    shapes = {}
    for model in checked.models.values():
        try:
            shapes[model.name] = _shape(model.source, folder)
        except DiagnosticError as error:
            raise _at(error, checked, model.span) from error
    return shapes


def _shape(source: str, folder: Path) -> ModelShape:
    if source.startswith(PREFIX):
        return model_shape(source)
    return shape_from_config(resolve_model(source, folder))


def _at(error: DiagnosticError, checked: Checked, span) -> DiagnosticError:
    source = Source(checked.path, checked.text)
    placed = (d if d.span else dataclasses.replace(d, span=span, source=source) for d in error.diagnostics)
    return DiagnosticError(placed, error.exit_code)
