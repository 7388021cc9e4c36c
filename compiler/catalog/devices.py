"""What one device can do at most, as its data sheet says: dense bf16, without sparsity; memory as drivers report it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class DeviceEntry:
    """Peak FLOP/s in bf16, bytes of memory, bytes/s of memory, bytes/s from and to the host's memory, one direction."""

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    host_bandwidth: float


_ROWS = (
    # name              TFLOP/s  GB   GB/s  host GB/s   data sheet
    ("v100-32gb", 125, 34, 900, 16),        # NVIDIA V100 SXM2; fp16, it has no bf16
    ("a10-24gb", 125, 24, 600, 32),         # NVIDIA A10
    ("a100-40gb", 312, 42, 1555, 32),       # NVIDIA A100 SXM4 40 GB, PCIe 4.0 x16
    ("a100-80gb", 312, 85, 2039, 32),       # NVIDIA A100 SXM4 80 GB
    ("l40s-48gb", 362, 48, 864, 32),        # NVIDIA L40S
    ("h100-80gb", 989, 85, 3350, 64),       # NVIDIA H100 SXM5, PCIe 5.0 x16
    ("h200-141gb", 989, 150, 4800, 64),     # NVIDIA H200 SXM
    ("b200-180gb", 2250, 191, 7700, 64),    # NVIDIA B200 SXM
    ("mi300x-192gb", 1307, 206, 5300, 64),  # AMD Instinct MI300X
)
DEVICES = {row[0]: DeviceEntry(row[0], row[1] * 1e12, row[2] * 1e9, row[3] * 1e9, row[4] * 1e9) for row in _ROWS}


def device(name: str) -> Optional[DeviceEntry]:
    """The device of that name, or None."""
    return DEVICES.get(name)
