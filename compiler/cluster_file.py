"""Reads cluster files.

    nodes = 2
    devices_per_node = 8
    device = "a100-80gb"          # of the catalogue, or a table: tflops, memory_gb, memory_gb_per_s, host_gb_per_s

    [links]                       # one direction
    intra_gb_per_s = 300          # of a device to its node
    inter_gb_per_s = 25           # of a device to other nodes
    node_gb_per_s = 25            # optional: of a whole node to other nodes, if less than its devices together
    latency_us = 10               # of one message; inter_latency_us is optional

    [reached]                     # optional: shares of the peaks, see `compiler.machine.Reached`
    [engine]                      # optional: what the host adds, see `compiler.machine.Engine`
    [storage]                     # optional: bytes that the software keeps, see `compiler.machine.Storage`

A cluster of unlike nodes has no `nodes` but several tables `[[pool]]`, each with `nodes` and all the rest.
"""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, Mapping

from compiler.catalog import DEVICES
from compiler.cluster import Cluster
from compiler.machine import Engine, Machine, Reached, Storage
from rlhf_dsl.diagnostics import did_you_mean, fault

_POOL = ("nodes", "devices_per_node", "name", "device", "links", "reached", "engine", "storage")
_DEVICE = {"tflops": 1e12, "memory_gb": 1e9, "memory_gb_per_s": 1e9, "host_gb_per_s": 1e9}
_LINKS = {"intra_gb_per_s": 1e9, "inter_gb_per_s": 1e9, "latency_us": 1e-6, "node_gb_per_s": 1e9,
          "inter_latency_us": 1e-6}
_REACHED = {field.name: 1.0 for field in dataclasses.fields(Reached)}
_ENGINE = {"layer_us": 1e-6, "collective_us": 1e-6, "call_ms": 1e-3, "step_us": 1e-6}
_STORAGE = {field.name: type(field.default) for field in dataclasses.fields(Storage)}
_OPTIONAL = {"host_gb_per_s", "node_gb_per_s", "inter_latency_us", *_REACHED, *_ENGINE}
HOST_BANDWIDTH = 25e9  # PCIe 4.0 x16, where the file does not say


def read_cluster(path: Path) -> Cluster:
    """The cluster that a TOML file describes. Raises DiagnosticError P0107."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _unreadable(path, str(error)) from None
    name = str(table.get("name", path.stem))
    if "pool" not in table:
        return Cluster(name, (_machine(path, table, name),))
    _check_keys(path, table, ("name", "pool"), "")
    pools = table["pool"]
    if not isinstance(pools, list) or not pools or not all(isinstance(pool, dict) for pool in pools):
        raise _unreadable(path, "`pool` must be a list of tables, `[[pool]]`")
    machines = tuple(_machine(path, p, str(p.get("name", f"pool {i}"))) for i, p in enumerate(pools))
    twice = next((m.name for i, m in enumerate(machines) if m.name in {other.name for other in machines[:i]}), None)
    if twice is not None:
        raise _unreadable(path, f"two pools have the name `{twice}`")
    return Cluster(name, machines)


def _machine(path: Path, table: Mapping[str, Any], name: str) -> Machine:
    _check_keys(path, table, _POOL, "")
    nodes, each = _count(path, table, "nodes"), _count(path, table, "devices_per_node")
    device = _device(path, table.get("device", {}))
    links = _numbers(path, table.get("links", {}), _LINKS, "links")
    reached = _numbers(path, table.get("reached", {}), _REACHED, "reached")
    storage = _options(path, table.get("storage", {}), _STORAGE, "storage")
    for share, value in reached.items():
        if value > 1:
            raise _unreadable(path, f"`reached.{share}` is a share of a peak, at most 1")
    return Machine(
        name, nodes, each, device["tflops"], device["memory_gb"], device["memory_gb_per_s"], links["intra_gb_per_s"],
        links.get("node_gb_per_s", links["inter_gb_per_s"] * each), device.get("host_gb_per_s", HOST_BANDWIDTH),
        links["latency_us"], links.get("inter_latency_us", links["latency_us"]),
        Reached(**reached), _engine(path, table.get("engine", {})), Storage(**storage),
    )


def _engine(path: Path, table: Any) -> Engine:
    apart = {key: value for key, value in table.items() if key == "ahead"} if isinstance(table, dict) else {}
    rest = {key: value for key, value in table.items() if key != "ahead"} if apart else table
    seconds = _numbers(path, rest, _ENGINE, "engine")
    ahead = _options(path, apart, {"ahead": bool}, "engine")
    return Engine(**{key.rsplit("_", 1)[0]: value for key, value in seconds.items()}, **ahead)


def _device(path: Path, given: Any) -> dict[str, float]:
    if not isinstance(given, str):
        return _numbers(path, given, _DEVICE, "device")
    if given not in DEVICES:
        raise _unreadable(path, f"unknown device `{given}`", did_you_mean(given, DEVICES))
    entry = DEVICES[given]
    return dict(zip(_DEVICE, (entry.flops, entry.memory, entry.memory_bandwidth, entry.host_bandwidth)))


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
        if key not in table and key in _OPTIONAL:
            continue
        value = table.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise _unreadable(path, f"`{section}.{key}` must be a positive number")
        found[key] = value * unit
    return found


def _options(path: Path, table: Any, kinds: Mapping[str, type], section: str) -> dict[str, Any]:
    """Positive whole numbers, and booleans, all optional."""
    if not isinstance(table, dict):
        raise _unreadable(path, f"`{section}` must be a table")
    _check_keys(path, table, kinds, f"{section}.")
    for key, value in table.items():
        if type(value) is not kinds[key] or value is not True and value is not False and value < 1:
            what = "true or false" if kinds[key] is bool else "a positive whole number"
            raise _unreadable(path, f"`{section}.{key}` must be {what}")
    return dict(table)


def _check_keys(path: Path, table: Mapping[str, Any], known, prefix: str) -> None:
    for key in table:
        if key not in known:
            raise _unreadable(path, f"unknown key `{prefix}{key}`", did_you_mean(key, known))


def _unreadable(path: Path, reason: str, help: str | None = None):
    return fault("P0107", place=str(path), reason=reason, help=help)
