"""The passes in their order; each is a frozen dataclass in a file of its own, a pure function from graph to graph."""

from __future__ import annotations

from typing import Callable

from compiler.ir import FlowGraph
from compiler.passes.cse import CommonSubexpressions
from compiler.passes.dce import DeadCode
from compiler.passes.fuse import FuseCalls
from compiler.passes.pipeline import Pipeline
from compiler.passes.place import Place
from compiler.passes.reshard import Reshard
from compiler.passes.schedule import Schedule
from compiler.passes.shard import Shard
from compiler.passes.split_reductions import SplitReductions
from compiler.placement import Placement
from rlhf_dsl.typed import Checked, Expr

Pass = Callable[[FlowGraph], FlowGraph]

NAMES = ("cse", "dce", "fuse", "split_reductions", "pipeline", "place", "shard", "reshard", "schedule")


def equation_passes(checked: Checked, wanted: frozenset[Expr] = frozenset()) -> tuple[Pass, ...]:
    """Those that know nothing of ranks. wanted: what is no dead code even if nothing reads it."""
    return CommonSubexpressions(), DeadCode(wanted), FuseCalls(), SplitReductions(checked.dims)


def placement_passes(checked: Checked, placement: Placement) -> tuple[Pass, ...]:
    """Those that follow: where everything lies and what moves."""
    return Pipeline(checked.run.lag), Place(placement), Shard(), Reshard(changing_models(checked)), Schedule()


def changing_models(checked: Checked) -> frozenset[str]:
    """Models whose weights change during a run: trained ones, and those that a copy or a moving average writes to."""
    written = {action.args[1] for action in checked.run.actions if action.kind in ("copy", "ema")}
    return frozenset(m.name for m in checked.models.values() if m.optimizer) | written
