"""What estimates need to know of a homogeneous part of a cluster: devices, links, and what software reaches of them."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class Reached:
    """The share of each peak that kernels and libraries reach on large problems, 0 to 1.

    matmul: of FLOP/s in large matrix products; memory_bandwidth: of bytes/s while streaming
    links: of bytes/s in large messages; memory: of bytes that a plan may fill, the rest is context and fragmentation
    """

    matmul: float = 0.5
    memory_bandwidth: float = 0.8
    links: float = 0.8
    memory: float = 0.9


@dataclass(frozen=True)
class Engine:
    """What the host adds, in seconds.

    layer: to launch the kernels of one layer, forward (a captured graph: a few microseconds; eager: some hundred)
    collective: to enter one collective inside a layer, until the slowest of its ranks has come
    call: around each call of a model: dispatch, buffers, collecting results
    step: around each other step of a plan: a transfer, an equation
    ahead: whether launching runs ahead of the device and is waited for only where it is slower, as on a GPU; on a CPU
    the two add up
    """

    layer: float = 30e-6
    collective: float = 10e-6
    call: float = 0.05
    step: float = 0.0
    ahead: bool = True


@dataclass(frozen=True)
class Storage:
    """Bytes that the software keeps.

    weight: of an element of weights, activations and key/value caches; gradient: of an element
    states: of a parameter, the optimizer's moments and its copy of weights that have fewer bits
    sharded: whether data shards divide the states among them (Rajbhandari et al., arXiv 1910.02054, stage 1)
    in_place: whether generation reads the training shard where it is part of the generation shard
    sequence_parallel: whether tensor shards divide what lies between layers, too (arXiv 2205.05198, section 4)
    """

    weight: int = 2
    gradient: int = 4
    states: int = 12
    sharded: bool = True
    in_place: bool = True
    sequence_parallel: bool = True

    def asked(self, precision: str = "", optimizer: str = "", sequence_parallel: Optional[bool] = None) -> "Storage":
        """With what `plan:` says of a model, in its words; "" and None are open."""
        found = self
        if precision:
            bits32 = precision == "fp32"
            found = dataclasses.replace(found, weight=4 if bits32 else 2, states=8 if bits32 else 12)
        if optimizer:
            found = dataclasses.replace(found, sharded=optimizer == "sharded")
        if sequence_parallel is not None:
            found = dataclasses.replace(found, sequence_parallel=sequence_parallel)
        return found

    @property
    def precision(self) -> str:
        return "fp32" if self.weight >= 4 else "bf16"


SINGLE = Storage(4, 4, 8, sharded=False, sequence_parallel=False)  # what this project's runtime does unless it is asked


@dataclass(frozen=True)
class Machine:
    """`nodes` equal nodes. Rates in FLOP/s and bytes/s, one direction; sizes in bytes; latencies in s for one message.

    intra: bytes/s of a device to the others of its node
    node: bytes/s of a node to other nodes, shared by its devices
    host: bytes/s of a device to the memory of its host
    """

    name: str
    nodes: int
    devices_per_node: int
    flops: float
    memory: float
    memory_bandwidth: float
    intra: float
    node: float
    host: float
    intra_latency: float
    inter_latency: float
    reached: Reached = Reached()
    engine: Engine = Engine()
    storage: Storage = Storage()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Of what is looked up a million times in a search."""
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def usable(self) -> float:
        """Bytes of a device that a plan may fill."""
        return self.memory * self.reached.memory
