"""Measured constants in the terms of a cluster file."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

from compiler.cost.compute import layer_flops, layer_forward
from compiler.cost.sizes import ACTIVATION, Sizes
from compiler.machine import SINGLE, Engine, Machine, Reached

LEAST_SHARE = 0.01  # what a layer reaches of the rate of large products, at least
LENGTH = 64  # tokens of a sample that is timed
MOST_TOKENS, MOST_FLOP = 2048, 2e10  # of a layer's long forward, so that it ends in a second on a core


def long_batch(sizes: Sizes) -> int:
    """Tokens of the long forward: whole samples, two at least."""
    return max(2, int(min(MOST_TOKENS, MOST_FLOP / (2 * sizes.layer))) // LENGTH) * LENGTH


def machine_of(found: Mapping[str, float], sizes: Sizes, devices: int, memory: float) -> Machine:
    """The machine that was measured, a device a rank.

    found: values by their names in `runtime.profile.rank`; sizes: of the model whose layers were timed
    memory: bytes of a device
    """
    machine = Machine(
        "local", 1, devices, found["flops"], memory, found["memory_bandwidth"],
        intra=found.get("links", found["memory_bandwidth"]), node=found.get("links", found["memory_bandwidth"]),
        host=found.get("host", found["memory_bandwidth"]), intra_latency=found.get("latency", 1e-6),
        inter_latency=found.get("latency", 1e-6), reached=Reached(_reached(found, sizes), 1.0, 1.0, 0.9),
        storage=SINGLE, engine=Engine(1e-9, 0.0, 0.0, 0.0, ahead="host" in found))
    return _with_engine(machine, found, sizes)


def _reached(found: Mapping[str, float], sizes: Sizes) -> float:
    """The share of the products' rate that a long forward reaches, streaming and launching apart."""
    tokens = long_batch(sizes)
    flops = layer_flops(sizes, tokens, LENGTH)
    streamed = 2 * ACTIVATION * SINGLE.weight * sizes.hidden * tokens / found["memory_bandwidth"]
    launching = 0.0 if "host" in found else found["short_forward"]
    left = max(found["long_forward"] - streamed - launching, found["long_forward"] / 4)
    return min(1.0, max(LEAST_SHARE, flops / left / found["flops"]))


def _with_engine(machine: Machine, found: Mapping[str, float], sizes: Sizes) -> Machine:
    """What a short forward takes beside computing is launching."""
    computing = layer_forward(machine, sizes, 1, 2, 2).compute
    launching = found["short_forward"] - computing * (not machine.engine.ahead)
    engine = Engine(max(launching, 1e-6), max(found.get("collective", 0.0), 1e-9), max(found["call"], 1e-6),
                    max(found.get("step", 0.0), 1e-6), machine.engine.ahead)
    return dataclasses.replace(machine, engine=engine)


def cluster_text(machine: Machine, about: str) -> str:
    """The cluster file of a machine."""
    lines = [f"# {about}", f'name = "{machine.name}"', f"nodes = {machine.nodes}",
             f"devices_per_node = {machine.devices_per_node}"]
    for section, rows in _sections(machine).items():
        lines += ["", f"[{section}]", *(f"{key} = {_number(value)}" for key, value in rows.items())]
    return "\n".join(lines) + "\n"


def _sections(machine: Machine) -> dict[str, dict[str, Any]]:
    engine = machine.engine
    return {
        "device": {"tflops": machine.flops / 1e12, "memory_gb": machine.memory / 1e9,
                   "memory_gb_per_s": machine.memory_bandwidth / 1e9, "host_gb_per_s": machine.host / 1e9},
        "links": {"intra_gb_per_s": machine.intra / 1e9, "inter_gb_per_s": machine.node / 1e9,
                  "node_gb_per_s": machine.node / 1e9, "latency_us": machine.intra_latency * 1e6},
        "reached": vars(machine.reached),
        "engine": {"layer_us": engine.layer * 1e6, "collective_us": engine.collective * 1e6,
                   "call_ms": engine.call * 1e3, "step_us": engine.step * 1e6, "ahead": engine.ahead},
        "storage": vars(machine.storage),
    }


def _number(value: Any) -> str:
    """Three digits say all that a measurement knows."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else f"{float(f'{value:.3g}'):g}"
