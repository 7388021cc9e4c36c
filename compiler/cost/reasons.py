"""What each part of an estimate is made of, for people."""

from __future__ import annotations

import math

from compiler.cost.compute import bandwidth, layer_flops, matmul_rate
from compiler.cost.estimate import Estimate, estimate
from compiler.cost.generation import GenerateTime
from compiler.cost.layouts import Degrees
from compiler.cost.sizes import Sizes
from compiler.cost.training import PassTime, StepTime
from compiler.cost.workload import Call
from compiler.machine import Machine
from compiler.reading.units import bytes_text, plural, scaled


class Reasons:
    """For one model on one machine in one layout."""

    def __init__(self, machine: Machine, sizes: Sizes, degrees: Degrees) -> None:
        self.machine, self.sizes, self.degrees = machine, sizes, degrees

    def passes(self, found: PassTime, rows: int, length: float, passes: int, *more: tuple[float, str]) -> Estimate:
        """rows: of the data shard that has most; passes: forwards that the computing amounts to"""
        return estimate(
            (found.compute, self._products(passes * self._flops(rows, length))),
            (found.tensor, self._collectives()), (found.host, self._host()),
            (found.bubble, f"{plural(self.degrees.pp, 'stage')} of a pipeline that wait for one another"), *more,
        )

    def generate(self, found: GenerateTime, call: Call, sequences: int, *more: tuple[float, str]) -> Estimate:
        rows, degrees = math.ceil(call.rows / self.degrees.dp), self.degrees
        width, context = self.machine.storage.weight, call.prompt + call.response / 2
        weights = bytes_text(width * self.sizes.held(degrees.tp, degrees.pp))
        cache = bytes_text(width * sequences * context * self.sizes.cached(degrees.tp, degrees.pp))
        waves = plural(math.ceil(rows / sequences), "wave")
        return estimate(
            (found.prefill, "prompts: " + self._products(self._flops(math.ceil(rows / call.samples), call.prompt))),
            (found.compute, f"reads {weights} of weights and {cache} of keys and values "
                            f"{self._steps(call, rows, sequences):,.0f} times for {sequences} of {plural(rows, 'row')} "
                            f"at once, {waves}, at {self._memory()}"),
            (found.tensor, self._collectives()), (found.host, self._host()),
            (found.handed, f"tokens through {plural(degrees.pp, 'stage')}"), *more,
        )

    def _steps(self, call: Call, rows: int, sequences: int) -> float:
        """Decoding steps of all waves: the last waits for the longest."""
        return (math.ceil(rows / sequences) - 1) * call.response + call.steps

    def optimizer(self, found: StepTime) -> Estimate:
        held = self.sizes.held(self.degrees.tp, self.degrees.pp)
        ring = self.link(self.degrees.dp, self.degrees.tp)
        return estimate(
            (found.gradients, f"sums gradients of {scaled(held)} parameters in a ring of {self.degrees.dp} {ring}"),
            (found.optimizer, f"streams the optimizer's states at {self._memory()}"),
        )

    def transition(self, seconds: float, received: float) -> Estimate:
        return estimate((seconds, f"{bytes_text(received)} to each rank at {bytes_text(self._intra)}/s"))

    def link(self, size: int, stride: int) -> str:
        inside = (size - 1) * stride < self.machine.devices_per_node
        return "over links inside a node" if inside else "over links between nodes"

    def _flops(self, rows: int, length: float) -> float:
        """Of a forward of `rows` rows, on each device."""
        tokens, degrees = rows * length, self.degrees
        layers = self.sizes.stage_layers(degrees.pp) * layer_flops(self.sizes, tokens, length)
        return (layers + tokens * self.sizes.head_flops) / degrees.tp

    def _products(self, flops: float) -> str:
        return f"{scaled(flops, 'FLOP')} a rank at {scaled(matmul_rate(self.machine), 'FLOP/s')}"

    def _collectives(self) -> str:
        return f"all-reduces of layers in rings of {self.degrees.tp} {self.link(self.degrees.tp, 1)}"

    def _host(self) -> str:
        engine = self.machine.engine
        return f"launching layers, {engine.layer * 1e6:.0f} us each"

    def _memory(self) -> str:
        return f"{bytes_text(bandwidth(self.machine))}/s"

    @property
    def _intra(self) -> float:
        return self.machine.intra * self.machine.reached.links


def fetches(size: float, back: bool) -> str:
    return f"{bytes_text(size)} {'from' if back else 'to'} the host's memory"
