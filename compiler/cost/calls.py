"""What every call costs beside the model's own work."""

from __future__ import annotations

from compiler.cost.workload import Call
from compiler.machine import Machine

ROW_BYTES = 12  # a token: an id of 8 bytes there, a number of 4 bytes back


def call_time(machine: Machine, call: Call, devices: int) -> float:
    """Dispatch, and the rows' way to the model and back over the cards of its nodes."""
    nodes = max(1, devices // machine.devices_per_node)
    moved = ROW_BYTES * call.rows * call.length / (nodes * machine.node * machine.reached.links)
    return machine.engine.call + moved + 2 * machine.inter_latency


def host_time(machine: Machine, size: float) -> float:
    """Seconds to bring `size` bytes from the host's memory to the device, or back."""
    return size / machine.host
