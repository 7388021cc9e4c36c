"""This machine as a cluster, a device a core: by what it says of itself, without a measurement.

Nothing here changes between two readings, so that the same machine always is the same cluster. `rlflowc profile`
measures.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Mapping

from compiler.cluster import Cluster
from compiler.machine import SINGLE, Engine, Machine, Reached

USUAL_HZ, USUAL_FLOP = 2.5e9, 16  # of a core that says nothing
NOMINAL = Path("/sys/devices/system/cpu/cpu0/cpufreq/base_frequency")  # kHz
HIGHEST = NOMINAL.with_name("cpuinfo_max_freq")
ENGINE = Engine(layer=5e-4, collective=1e-4, call=2e-3, step=5e-4, ahead=False)  # of Megatron-core and gloo, eager

# FLOP in 32 bit a cycle of a core: lanes of a vector, times 2 for a fused multiply and add, times the units for them
# (Intel's optimization reference manual, AMD's software optimization guides for families 19h and 1Ah, Arm's guides).
# (flag of the processor, vendor or "" for any, least family) -> FLOP, the first that holds
FLOP_A_CYCLE = (
    (("avx512f", "GenuineIntel", 0), 64),  # 2 units of 16 lanes
    (("avx512f", "AuthenticAMD", 26), 64),  # Zen 5
    (("avx512f", "", 0), 32),  # Zen 4: 512 bits are two passes of 256
    (("fma", "", 0), 32),  # 2 units of 8 lanes
    (("avx", "", 0), 16),  # an addition and a multiplication of 8 lanes
    (("sse2", "", 0), 8),
    (("asimd", "", 0), 16),  # 2 units of 4 lanes
)


def local_cluster() -> Cluster:
    """Peaks of the processor, and round numbers for what software adds and for memory and messages."""
    cores = physical_cores()
    machine = Machine("local", 1, cores, flops=core_flops(_processor()), memory=memory() / cores,
                      memory_bandwidth=1e10, intra=1e9, node=1e9, host=1e10, intra_latency=1e-4, inter_latency=1e-4,
                      reached=Reached(), engine=ENGINE, storage=SINGLE)
    return Cluster("local", (machine,))


def core_flops(processor: Mapping[str, str]) -> float:
    """Peak FLOP/s of one core in 32 bit. processor: the fields of one in /proc/cpuinfo; {} where there is none"""
    flags = set(f"{processor.get('flags', '')} {processor.get('Features', '')}".split())
    vendor, family = processor.get("vendor_id", ""), int(processor.get("cpu family", "0"))
    known = (flop for (flag, maker, least), flop in FLOP_A_CYCLE
             if flag in flags and maker in ("", vendor) and family >= least)
    return next(known, USUAL_FLOP) * _frequency(processor)


def _frequency(processor: Mapping[str, str]) -> float:
    """Nominal cycles/s, in tenths of a GHz: what several cores at work can keep, not what one reaches at times.

    `cpu MHz` is of the moment and of no use. BogoMIPS of x86 are twice the rate of its time stamps, which is the
    nominal one.
    """
    named = re.search(r"@ ([\d.]+)GHz", processor.get("model name", ""))
    stamps = float(processor.get("bogomips", "0")) / 2 * 1e6 * ("flags" in processor)
    found = _kilohertz(NOMINAL) or (float(named[1]) * 1e9 if named else 0.0) or stamps or _kilohertz(HIGHEST)
    return round(found / 1e8) * 1e8 or USUAL_HZ


def _kilohertz(path: Path) -> float:
    try:
        return float(path.read_text()) * 1e3
    except (OSError, ValueError):
        return 0.0


def _processor() -> dict[str, str]:
    """The first processor of Linux; elsewhere nothing."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


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
