"""Why a step costs what it costs: its work in FLOP and bytes, and how long each takes at a device's peak rates.

The longest of them decides. An estimate lies above it by what real kernels do not reach and by fixed costs. Products of
matrices count 2 FLOP a parameter and token forward and 6 with backward (Kaplan et al., arXiv 2001.08361, section 2.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator

from compiler.cost import CostModel
from compiler.reading.units import bytes_text, plural, scaled, seconds_text

FLOAT = 4  # bytes
FORWARD, BACKWARD, RECOMPUTED = 2, 6, 8  # FLOP a parameter and token; backward with its forward
ADAM = 7  # weights, gradients and two moments are read, weights and moments written


@dataclass(frozen=True)
class Bound:
    """kind: "computing", "memory", "links" or "latency"; text: what it is made of; seconds: at peak rates, for one time."""

    kind: str
    text: str
    seconds: float


def bounds_of(costs: CostModel, step: Any, part: float = 1.0) -> tuple[Bound, ...]:
    """The bounds of a step that sees the share `part` of the rows, the one that decides first. () for a loop."""
    made = {"forward": _forward, "train": _train, "generate": _generate, "optimizer": _optimizer, "transfer": _moved,
            "reshard": _moved}.get(step.op, _local)
    found = () if step.op == "update" else made(costs, step, part)
    return tuple(sorted(found, key=lambda bound: -bound.seconds))


def _forward(costs: CostModel, step: Any, part: float) -> Iterator[Bound]:
    yield _computing(costs, step.model, step.layout, part * costs.tokens(step.response), FORWARD)
    yield _weights(costs, step.model, step.layout, 1)


def _train(costs: CostModel, step: Any, part: float) -> Iterator[Bound]:
    responses = {costs.plan.exprs[call.expr].args[0] for call in step.calls}
    tokens = part * sum(map(costs.tokens, responses))
    yield _computing(costs, step.model, step.layout, tokens, RECOMPUTED if step.recompute else BACKWARD)
    yield _weights(costs, step.model, step.layout, 2)


def _generate(costs: CostModel, step: Any, part: float) -> Iterator[Bound]:
    dims = costs.plan.exprs[step.expr].dims
    yield _computing(costs, step.model, step.layout, costs.tokens(step.expr), FORWARD)
    yield _weights(costs, step.model, step.layout, costs.response_tokens(dims), "token after token")


def _computing(costs: CostModel, model: str, layout: str, tokens: float, flop: int) -> Bound:
    rate, ranks = costs.cluster.device.flops, costs.plan.layouts[layout].ranks
    total = flop * costs.parameters[model] * tokens
    text = (f"{flop} FLOP x {scaled(costs.parameters[model])} parameters x {tokens:,.0f} tokens = {scaled(total, 'FLOP')}, "
            f"over {plural(ranks, 'rank')} of {scaled(rate, 'FLOP/s')}")
    return Bound("computing", text, total / ranks / rate)


def _weights(costs: CostModel, model: str, layout: str, times: float, how: str = "") -> Bound:
    """A rank reads its shard of the weights `times` times."""
    spec, rate = costs.plan.layouts[layout], costs.cluster.device.memory_bandwidth
    shard = costs.parameters[model] * FLOAT / (spec.tp * spec.pp)
    said = f"{bytes_text(shard)} of weights a rank" + (f", {times:,.0f} times" if times > 1 else "") + (how and f", {how}")
    return Bound("memory", f"{said}, at {bytes_text(rate)}/s", shard * times / rate)


def _optimizer(costs: CostModel, step: Any, part: float) -> Iterator[Bound]:
    spec, rate = costs.plan.layouts[f"{step.model}.train"], costs.cluster.device.memory_bandwidth
    shard = costs.parameters[step.model] * FLOAT / (spec.tp * spec.pp)
    yield Bound("memory", f"weights, gradients and two moments of {bytes_text(shard)} each read, all but gradients written, at "
                f"{bytes_text(rate)}/s", ADAM * shard / rate)
    if spec.dp > 1:
        sent = 2 * (spec.dp - 1) / spec.dp * shard
        yield Bound("links", f"gradients summed over {spec.dp} data shards in a ring: {bytes_text(sent)} a rank, at "
                    f"{bytes_text(costs.bandwidth)}/s", sent / costs.bandwidth)


def _moved(costs: CostModel, step: Any, part: float) -> Iterator[Bound]:
    most = part * costs.moved(step).per_rank
    yield Bound("links", f"{bytes_text(most)} to the rank that gets most, at {bytes_text(costs.bandwidth)}/s",
                most / costs.bandwidth)
    if most:
        yield Bound("latency", "a message from rank to rank", costs.cluster.latency)


def _local(costs: CostModel, step: Any, part: float) -> Iterator[Bound]:
    """Equations and the like read and write each of their values about once, a share on each rank."""
    ids = [v.expr for v in getattr(step, "values", ())]
    ids += [step.expr] if hasattr(step, "expr") else []
    touched = 2 * part * sum(map(costs.value_bytes, ids)) / costs.plan.world
    if touched:
        rate = costs.cluster.device.memory_bandwidth
        yield Bound("memory", f"{bytes_text(touched)} read and written a rank, at {bytes_text(rate)}/s", touched / rate)


def told(bound: Bound) -> str:
    return f"{bound.kind}: {bound.text}: {seconds_text(bound.seconds)}"
