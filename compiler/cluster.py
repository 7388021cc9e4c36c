"""What a plan runs on: nodes, devices and links, found on this machine or described in a file (`cluster_file`)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from compiler.machine import SINGLE, Engine, Machine

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


def local_cluster() -> Cluster:
    """This machine, a device a physical core. Rates are round numbers for one core of a CPU, good for shares;
    `rlflowc profile` measures them."""
    cores = physical_cores()
    engine = Engine(layer=4e-4, collective=2e-4, call=5e-3, step=1e-3, ahead=False)
    machine = Machine("local", 1, cores, flops=5e10, memory=memory() / cores, memory_bandwidth=1e10, intra=1e9,
                      node=1e9, host=1e10, intra_latency=1e-4, inter_latency=1e-4, engine=engine, storage=SINGLE)
    return Cluster("local", (machine,))


def default_ranks(cluster: Cluster, rows: int) -> int:
    """Ranks where nobody asks: a device each, on one's own machine at most four; never more than rows of a batch."""
    most = min(cluster.devices, MOST_LOCAL_RANKS) if cluster.is_local else cluster.devices
    return max(1, min(most, rows))


def physical_cores() -> int:
    """Cores that this process may use, counting threads of one core once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {_siblings(cpu) for cpu in allowed}
    return max(1, len(siblings))


def _siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def memory() -> float:
    """Bytes of this machine."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
