"""Tables of the pages on transitions: strategies compared, and protocols as pairs of layouts."""

from __future__ import annotations

from typing import Iterator

from compiler.catalog.models import model_shape
from compiler.layout import ModelLayout
from compiler.resharding.gathers import ALL_GATHER, STRATEGIES, VANILLA, gathered_bytes, transfer_by
from compiler.resharding.protocols import examples, protocol
from compiler.resharding.redistribute import WeightTransfer
from compiler.resharding.transitions import ORDERS
from compiler.shapes import parameters
from compiler.weights import WeightLayout

BF16 = 2
# the layouts of HybridFlow's measurements (arXiv 2409.19256, section 8.4): model, training (tp, pp, dp), generation tp
SETTINGS = (("llama-2-7b", (8, 1, 2), 2), ("llama-2-13b", (8, 1, 2), 4), ("llama-2-70b", (8, 8, 2), 8))


def strategy_rows() -> Iterator[tuple[str, ...]]:
    """Model and layouts, strategy, and in GB of bf16: what a rank receives, the formula, kept twice, peak, totals."""
    for name, degrees, tp in SETTINGS:
        train = ModelLayout(tuple(range(degrees[0] * degrees[1] * degrees[2])), *degrees)
        for strategy in STRATEGIES:
            plan = _plan(name, train, tp, strategy)
            whole = BF16 * parameters(plan.src.shape, "policy")
            most = max(map(plan.bytes_received, plan.ranks))
            # those that gather the model have it whole on each rank, unless it goes by in rounds
            unbounded = whole if strategy in (VANILLA, ALL_GATHER) else max(map(plan.peak_bytes, plan.ranks))
            near, far = plan.bytes_crossing(8)
            yield (
                f"{name}, tp{degrees[0]} pp{degrees[1]} dp{degrees[2]} to tp{tp}", strategy, _gb(most),
                _gb(gathered_bytes(strategy, train, tp, whole)), _gb(max(map(plan.redundant_bytes, plan.ranks))),
                _gb(max(map(plan.peak_bytes, plan.ranks))), _gb(unbounded), _gb(near), _gb(far),
            )


def _plan(model: str, train: ModelLayout, tp: int, strategy: str) -> WeightTransfer:
    shape = model_shape(model)
    src = WeightLayout(shape, "policy", train, "megatron")
    return transfer_by(strategy, src, WeightLayout(shape, "policy", ORDERS[strategy](train, tp), "torch"), BF16)


def protocol_rows() -> Iterator[tuple[str, ...]]:
    for layout, takes, gives, within, distributed, collected in examples().values():
        yield (f"tp{layout.tp} pp{layout.pp} dp{layout.dp}", distributed, " ".join(map(_ranks, takes.parts)),
               collected, _ranks(gives.givers), f"`{protocol(layout, takes, gives, within)}`")


def _ranks(ranks: tuple[int, ...]) -> str:
    return "{" + " ".join(map(str, ranks)) + "}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"
