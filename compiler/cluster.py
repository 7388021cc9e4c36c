"""What a plan runs on: nodes, devices and links, from a TOML file or found on this machine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from rlhf_dsl.diagnostics import did_you_mean, fault

MOST_LOCAL_RANKS = 4  # small models gain nothing from more ranks on one machine


@dataclass(frozen=True)
class Device:
    """What one rank computes with: peak FLOP/s, bytes of memory, bytes/s of memory."""

    flops: float
    memory: float
    memory_bandwidth: float


@dataclass(frozen=True)
class Cluster:
    """`nodes` times `devices_per_node` devices; links in bytes/s, latency in s."""

    name: str
    nodes: int
    devices_per_node: int
    device: Device
    intra_bandwidth: float
    inter_bandwidth: float
    latency: float

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()

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


# ---- files -------------------------------------------------------------------------------------

_TOP = {"nodes": int, "devices_per_node": int, "name": str, "device": dict, "links": dict}
_DEVICE = {"tflops": 1e12, "memory_gb": 1e9, "memory_gb_per_s": 1e9}
_LINKS = {"intra_gb_per_s": 1e9, "inter_gb_per_s": 1e9, "latency_us": 1e-6}


def read_cluster(path: Path) -> Cluster:
    """The cluster that a TOML file describes.

        nodes = 2
        devices_per_node = 8
        [device]
        tflops = 400
        memory_gb = 80
        memory_gb_per_s = 3000
        [links]
        intra_gb_per_s = 400
        inter_gb_per_s = 50
        latency_us = 10

    Raises DiagnosticError P0107.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _unreadable(path, str(error)) from None
    _check_keys(path, table, _TOP, "")
    device = _numbers(path, table.get("device", {}), _DEVICE, "device")
    links = _numbers(path, table.get("links", {}), _LINKS, "links")
    return Cluster(
        str(table.get("name", path.stem)), _count(path, table, "nodes"), _count(path, table, "devices_per_node"),
        Device(device["tflops"], device["memory_gb"], device["memory_gb_per_s"]),
        links["intra_gb_per_s"], links["inter_gb_per_s"], links["latency_us"],
    )


def _count(path: Path, table: Mapping[str, Any], key: str) -> int:
    value = table.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _unreadable(path, f"`{key}` must be a positive integer")
    return value


def _numbers(path: Path, table: Any, units: Mapping[str, float], section: str) -> dict[str, float]:
    if not isinstance(table, dict):
        raise _unreadable(path, f"`{section}` must be a table")
    _check_keys(path, table, units, f"{section}.")
    found = {}
    for key, unit in units.items():
        value = table.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise _unreadable(path, f"`{section}.{key}` must be a positive number")
        found[key] = value * unit
    return found


def _check_keys(path: Path, table: Mapping[str, Any], known: Mapping[str, Any], prefix: str) -> None:
    for key in table:
        if key not in known:
            raise _unreadable(path, f"unknown key `{prefix}{key}`", did_you_mean(key, known))


def _unreadable(path: Path, reason: str, help: str | None = None):
    return fault("P0107", place=str(path), reason=reason, help=help)
