"""Ranks and their process groups: MPI starts and names the ranks, torch.distributed carries tensors between them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Iterable, Mapping, Optional, Sequence

import torch
import torch.distributed as dist

from compiler.layout import Coordinates, ModelLayout

LOOPBACK = "127.0.0.1"
JOB_NAME = "RLFLOW_JOB"  # shared memory is named by it, for the launcher to find what is left
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # what carries tensors, by the device that they lie on


@dataclass(frozen=True)
class Job:
    """This rank among all ranks of the job. device: where its tensors live; name: unlike that of any other job here."""

    rank: int
    size: int
    device: torch.device
    name: str = ""


def start(comm) -> Job:
    """Makes the default process group of the ranks of `comm` (an MPI communicator).

    It carries what lies in the host's memory, rows and files, and what lies on devices, each by a backend of its own.
    The store listens on a port that the system gives, so jobs on one machine cannot race for it. Called once a process.
    """
    node = comm.Split_type(_shared_memory())
    use_gpu = torch.cuda.is_available()
    device = torch.device("cuda", node.rank % torch.cuda.device_count()) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend_of("cpu", device.type),
        store=_store(comm, one_node=node.size == comm.size), rank=comm.rank, world_size=comm.size,
        device_id=device if use_gpu else None,  # NCCL connects all ranks now, not at a first message among some of them
    )
    node.Free()
    name = comm.bcast(os.environ.get(JOB_NAME) or f"rlflow-{os.getpid()}", root=0)
    return Job(comm.rank, comm.size, device, name)


def backend_of(*devices: str) -> str:
    """For a group that carries tensors of these types of devices, and refuses others: `cpu:gloo,cuda:nccl`."""
    return ",".join(f"{device}:{BACKENDS[device]}" for device in dict.fromkeys(devices))


def _shared_memory() -> int:
    from mpi4py import MPI

    return MPI.COMM_TYPE_SHARED


def _store(comm, one_node: bool) -> dist.TCPStore:
    first = comm.rank == 0
    host = LOOPBACK if one_node else comm.bcast(socket.gethostname(), root=0)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if first else None
    port = comm.bcast(store.port if first else None, root=0)
    return store if first else dist.TCPStore(host, port, is_master=False)


@dataclass(frozen=True)
class LayoutGroups:
    """This rank's place in a layout and the process groups it shares there.

    tp, pp, dp: the ranks that differ from it in that coordinate alone
    replica: all ranks of its data-parallel coordinate, which together hold the model once
    ends: first and last stage of its pipeline, None for a stage between them
    alone: itself
    """

    layout: ModelLayout
    at: Coordinates
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp: dist.ProcessGroup
    replica: dist.ProcessGroup
    ends: Optional[dist.ProcessGroup]
    alone: dist.ProcessGroup

    @property
    def is_first(self) -> bool:
        return self.at.pp == 0

    @property
    def is_last(self) -> bool:
        return self.at.pp == self.layout.pp - 1


class Mesh:
    """Process groups of all layouts of a job, one for each set of ranks, however many layouts use it. They carry what is
    on the job's device and in the host's memory, each by its backend: vLLM wants both.

    Construction is collective: every rank passes the same layouts in the same order, also those without it, as all
    ranks take part in making every group.
    """

    def __init__(self, job: Job, layouts: Iterable[ModelLayout]) -> None:
        self.job = job
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._made: set[tuple[int, ...]] = set()
        self.make(ranks for layout in layouts for axis in _axes(layout).values() for ranks in axis)

    def make(self, sets: Iterable[tuple[int, ...]]) -> None:
        """Makes the groups of more sets of ranks, where there are none. Collective, as construction."""
        for ranks in sets:
            ranks = tuple(sorted(ranks))
            if ranks in self._made:
                continue
            self._made.add(ranks)
            group = dist.new_group(list(ranks), backend=backend_of("cpu", self.job.device.type))
            if self.job.rank in ranks:
                self._groups[ranks] = group

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of `ranks`. Raises KeyError if none was made or this rank is not in it."""
        return self._groups[tuple(sorted(ranks))]

    def groups(self, layout: ModelLayout) -> LayoutGroups:
        """Where this rank stands in `layout`. Raises KeyError if it is not in it."""
        rank = self.job.rank
        at = layout.coordinates(rank)
        mine = {axis: next((ranks for ranks in sets if rank in ranks), None) for axis, sets in _axes(layout).items()}
        return LayoutGroups(layout, at, **{axis: ranks and self.group(ranks) for axis, ranks in mine.items()})


def _axes(layout: ModelLayout) -> Mapping[str, Sequence[tuple[int, ...]]]:
    """For each field of `LayoutGroups` that is a group, all sets of ranks of that kind."""
    pipelines = layout.pp_groups()
    return {
        "tp": layout.tp_groups(),
        "pp": pipelines,
        "dp": layout.dp_groups(),
        "replica": [layout.replica(d) for d in range(layout.dp)],
        "ends": [tuple(dict.fromkeys((ranks[0], ranks[-1]))) for ranks in pipelines],
        "alone": [(rank,) for rank in layout.ranks],
    }
