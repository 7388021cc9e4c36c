"""Estimates for the steps of a plan, by the functions with which the search places models."""

from __future__ import annotations

from typing import Any, Iterable

from compiler.cost import generation, memory, training, transition
from compiler.cost.calls import host_time
from compiler.cost.compute import stream
from compiler.cost.estimate import Estimate, estimate
from compiler.cost.memory import Memory
from compiler.cost.moved import Moved, moved
from compiler.cost.reasons import Reasons, fetches
from compiler.cost.setting import Setting
from compiler.machine import Machine
from compiler.proof.wellformed import shape_of
from compiler.reading.units import bytes_text
from compiler.resharding.transitions import weight_transfer
from compiler.steps import UpdateLoop


class CostModel(Setting):
    """Estimates for the steps of `plan` on `cluster`, with the lengths that the plan assumes."""

    def seconds(self, step: Any, part: float = 1.0) -> float:
        """Of one time. part: the share of the iteration's rows that the step sees, 1 / minibatches inside an update.

        What a call of a model costs once an iteration is spread over the mini-batches of a loop.
        """
        return self.estimate(step, part).seconds

    def reason(self, step: Any, part: float = 1.0) -> str:
        """What the seconds are made of, the longest first: `1.2 TFLOP a rank at 50.0 GFLOP/s (80 %); ...`."""
        return self.estimate(step, part).reason

    def estimate(self, step: Any, part: float = 1.0) -> Estimate:
        made = {"generate": self._generate, "forward": self._forward, "train": self._train, "update": self._update,
                "optimizer": self._optimizer, "transfer": self._transfer, "reshard": self._reshard,
                "reload": self._hosted, "offload": self._hosted}
        return made.get(step.op, self._local)(step, part)

    def _update(self, loop: UpdateLoop, part: float) -> Estimate:
        times = loop.epochs * loop.minibatches
        before = [(self.seconds(s), s.name) for s in loop.before]
        return estimate(*before, *((times * self.seconds(s, 1 / loop.minibatches), s.name) for s in loop.body))

    # ---- calls of models

    def _generate(self, step: Any, part: float) -> Estimate:
        placed, call, at_once = self.placed(step.layout), self.call(step, part), self.sequences(step)
        found = generation.generate_time(*placed, call, at_once)
        return Reasons(*placed).generate(found, call, at_once, self._around(step, placed[0]))

    def _forward(self, step: Any, part: float) -> Estimate:
        placed, call = self.placed(step.layout), self.call(step, part)
        found = training.forward_time(*placed, call, self.samples(step, call))
        rows = training.minibatch_rows(placed[2], call)
        return Reasons(*placed).passes(found, rows, call.length, 1, self._around(step, placed[0]))

    def _train(self, step: Any, part: float) -> Estimate:
        """Forward and backward; data shards sum gradients in the optimizer's step."""
        placed, call = self.placed(step.layout), self.call(step, part)
        rows, micro = training.minibatch_rows(placed[2], call), self.micro(step, call)
        found = training.passes_time(*placed, rows, micro, call.length)
        return Reasons(*placed).passes(found, rows, call.length, 2 + micro.forwards, self._around(step, placed[0]))

    def _around(self, step: Any, machine: Machine) -> tuple[float, str]:
        """What the host does for a call, once an iteration and each time."""
        return machine.engine.call / self.times(step) + machine.engine.step, "dispatching and collecting a call"

    def _optimizer(self, step: Any, part: float) -> Estimate:
        placed = self.placed(f"{step.model}.train")
        return Reasons(*placed).optimizer(training.step_time(*placed))

    # ---- moves, and what is computed at home

    def _reshard(self, step: Any, part: float) -> Estimate:
        machine, sizes, train = placed = self.placed(step.src)
        if self.is_apart(step.dst):
            most, crossing = self.moved(step).per_rank, self._crossing(step, machine)
            return Reasons(*placed).transition(transition.passing(machine, most, crossing), most)
        generate, way = self.placed(step.dst)[2], self.way(step.dst)
        received = transition.transition_bytes(sizes, train, generate, machine.storage.weight, way)
        return Reasons(*placed).transition(transition.transition_time(*placed, generate, way), received)

    def _hosted(self, step: Any, part: float) -> Estimate:
        return estimate((host_time(self.placed(step.layout)[0], step.bytes), fetches(step.bytes, step.op == "reload")))

    def _crossing(self, step: Any, machine: Machine) -> int:
        """Bytes of a move of weights over the link of a node that carries most."""
        shape, role = shape_of(self.plan, step.model), self.plan.models[step.model].role
        transfer = weight_transfer(shape, role, self.plan.layouts, step.src, step.dst)
        return 0 if self.cluster.is_local else transfer.busiest_node(machine.devices_per_node)

    def _transfer(self, step: Any, part: float) -> Estimate:
        most, machine = part * self.moved(step).per_rank, self.machine()
        latency = machine.inter_latency if self._crosses_nodes else machine.intra_latency
        what = f"{bytes_text(most)} to the rank that gets most at {bytes_text(self.bandwidth)}/s"
        return estimate((most / self.bandwidth, what), (latency + machine.engine.step, "a message and its handling"))

    def _local(self, step: Any, part: float) -> Estimate:
        """Equations and the like, which read and write each of their values about once."""
        ids = [v.expr for field in ("values", "exprs") for v in getattr(step, field, ())]
        ids += [step.expr] if hasattr(step, "expr") else []
        touched, machine = 2 * part * sum(map(self.value_bytes, ids)) / self.plan.world, self.machine()
        return estimate((stream(machine, touched), f"{bytes_text(touched)} read and written a rank"),
                        (machine.engine.step if ids else 0.0, "evaluating an equation"))

    @property
    def _crosses_nodes(self) -> bool:
        return self.plan.world > self.machine().devices_per_node

    @property
    def bandwidth(self) -> float:
        """bytes/s that a rank gets of the slowest link that a plan of this size crosses."""
        machine = self.machine()
        rate = machine.node / machine.devices_per_node if self._crosses_nodes else machine.intra
        return rate * machine.reached.links

    # ---- bytes

    def moved(self, step: Any) -> Moved:
        """Bytes of a transfer of rows (over the iteration) or of weights."""
        return moved(self.lengths, step)

    def memory(self, member: str) -> Memory:
        """Of a member of a group."""
        return memory.memory(self, member)

    def peak(self, members: Iterable[str]) -> float:
        """Bytes on the fullest rank of what shares ranks."""
        return memory.peak(self, members)

    def sequences(self, step: Any) -> int:
        """Rows of a replica that a Generate step has at once."""
        return memory.sequences(self, step)
