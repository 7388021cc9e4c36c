"""What a plan runs on: nodes, devices and links, found on this machine or described in a file (`cluster_file`)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

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
    """`nodes` times `devices_per_node` devices; links in bytes/s, latency in s.

    machines: its homogeneous parts, as the search needs them; () for this machine, where nothing is searched
    """

    name: str
    nodes: int
    devices_per_node: int
    device: Device
    intra_bandwidth: float
    inter_bandwidth: float
    latency: float
    machines: tuple[Machine, ...] = ()

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def digest(self) -> str:
        told = {name: value for name, value in dataclasses.asdict(self).items() if value != ()}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    @property
    def is_local(self) -> bool:
        return self.name == "local"


def local_cluster() -> Cluster:
    """This machine, a device a physical core. Its rates are round numbers for one core of a CPU, good for shares."""
    cores = physical_cores()
    device = Device(flops=2e10, memory=_memory() / cores, memory_bandwidth=1e10)
    return Cluster("local", 1, cores, device, intra_bandwidth=1e9, inter_bandwidth=1e9, latency=1e-4)


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


def _memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
