"""What a plan runs on: nodes, devices and links, of this machine (`local`) or described in a file (`cluster_file`)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from compiler.machine import Machine

MOST_LOCAL_RANKS = 4  # small models gain nothing from more ranks on one machine


@dataclass(frozen=True)
class Device:
    """What one rank computes with: peak FLOP/s, bytes of memory, bytes/s of memory."""

    flops: float
    memory: float
    memory_bandwidth: float


@dataclass(frozen=True)
class Cluster:
    """`machines` are its homogeneous parts, one at least. Of unlike parts, `device` and links are the weakest."""

    name: str
    machines: tuple[Machine, ...]

    @property
    def nodes(self) -> int:
        return sum(machine.nodes for machine in self.machines)

    @property
    def devices_per_node(self) -> int:
        return min(machine.devices_per_node for machine in self.machines)

    @property
    def devices(self) -> int:
        return sum(machine.devices for machine in self.machines)

    @property
    def device(self) -> Device:
        return Device(*(min(getattr(m, f.name) for m in self.machines) for f in dataclasses.fields(Device)))

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def is_local(self) -> bool:
        return self.name == "local"


def default_ranks(cluster: Cluster, rows: int) -> int:
    """Ranks where nobody asks: a device each, on one's own machine at most four; never more than rows of a batch."""
    most = min(cluster.devices, MOST_LOCAL_RANKS) if cluster.is_local else cluster.devices
    return max(1, min(most, rows))
