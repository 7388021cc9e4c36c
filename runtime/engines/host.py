"""What leaves a device for the host's memory and comes back: tensors stay the same objects, their storages are emptied.

On a GPU the host's memory is pinned. Where the device is a CPU its memory is the host's, so what leaves goes to a file
without a name in the run folder, which ends with the process: that memory is free for others, as it would be on a GPU.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import BinaryIO, Iterable, Optional, Protocol, Sequence

import torch
from torch import Tensor

from rlhf_dsl.diagnostics import fault


class Room(Protocol):
    """Place for the content of some storages, always the same ones."""

    def write(self, stores: Sequence[torch.UntypedStorage]) -> None:
        """Raises R0168 where there is no place."""

    def read(self, stores: Sequence[torch.UntypedStorage]) -> None:
        """What was written last."""


class Host:
    """Rooms for what leaves `device`. folder: for files, where the device is a CPU; None for the system's own"""

    def __init__(self, device: torch.device, folder: Optional[Path] = None) -> None:
        self._device, self._folder = device, folder

    def room(self) -> Room:
        return _File(self._folder) if self._device.type == "cpu" else _Pinned()

    def trim(self) -> None:
        """What storages gave up is the system's again; glibc would keep the smaller ones for later."""
        if self._device.type == "cpu" and sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)


class _File:
    """Written and read whole. Mapped into memory it would count as the process's own."""

    def __init__(self, folder: Optional[Path]) -> None:
        self._folder = folder or Path(tempfile.gettempdir())
        self._file: Optional[BinaryIO] = None

    def write(self, stores: Sequence[torch.UntypedStorage]) -> None:
        try:
            self._file = self._file or tempfile.TemporaryFile(dir=self._folder)
            self._file.seek(0)
            for store in stores:
                self._file.write(_memory(store))
            self._file.flush()
        except OSError as error:
            raise fault("R0168", place=str(self._folder), reason=error.strerror or str(error)) from error

    def read(self, stores: Sequence[torch.UntypedStorage]) -> None:
        self._file.seek(0)
        for store in stores:
            self._file.readinto(_memory(store))


def _memory(store: torch.UntypedStorage) -> memoryview:
    """Not by way of numpy, after which a storage keeps its size."""
    return memoryview((ctypes.c_char * store.nbytes()).from_address(store.data_ptr())).cast("B")


class _Pinned:
    """Copies that the device makes itself, at the speed of its link. It has not run yet."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []

    def write(self, stores: Sequence[torch.UntypedStorage]) -> None:
        if not self._copies:
            self._copies = [torch.empty(store.nbytes(), dtype=torch.uint8, pin_memory=True) for store in stores]
        for copy, store in zip(self._copies, stores):
            copy.copy_(_bytes(store), non_blocking=True)
        torch.cuda.current_stream().synchronize()  # the memory that was read is given up next

    def read(self, stores: Sequence[torch.UntypedStorage]) -> None:
        for copy, store in zip(self._copies, stores):
            _bytes(store).copy_(copy, non_blocking=True)


def _bytes(store: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=store.device).set_(store)


class Leaving:
    """Tensors that leave and come back together, with all that shares their storages."""

    def __init__(self, tensors: Iterable[Tensor], host: Host) -> None:
        self._stores = list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())
        self._sizes = [store.nbytes() for store in self._stores]
        self._host, self._room = host, None
        self._version: Optional[int] = None  # of the content that the host has

    @torch.no_grad()
    def leave(self, version: Optional[int]) -> None:
        """version: of the content, which is copied unless the host has it; None: there is none worth keeping."""
        if version is not None and version != self._version:
            self._room = self._room or self._host.room()
            self._room.write(self._stores)
        self._version = version
        for store in self._stores:
            store.resize_(0)
        self._host.trim()

    @torch.no_grad()
    def come_back(self) -> None:
        """What was not worth keeping is 0."""
        for store, size in zip(self._stores, self._sizes):
            store.resize_(size)
        if self._version is not None:
            self._room.read(self._stores)
            return
        for store in self._stores:
            _bytes(store).zero_()


class Offloads(ABC):
    """`Engine.offload` and `Engine.reload` of an engine whose parts are tensors. away: by part, what has left"""

    def __init__(self) -> None:
        self._leaving: dict[str, Leaving] = {}
        self.away: set[str] = set()

    def offload(self, parts: Iterable[str], host: Host, version: Optional[int]) -> None:
        for part in parts:
            if part in self.away:
                continue
            if part not in self._leaving:
                self._leaving[part] = Leaving(self.tensors_of(part), host)
            self._leaving[part].leave(self.version_of(part, version))
            self.away.add(part)

    def reload(self, parts: Iterable[str]) -> None:
        for part in parts:
            if part in self.away:
                self._leaving[part].come_back()
                self.away.remove(part)

    @abstractmethod
    def tensors_of(self, part: str) -> Iterable[Tensor]:
        """The tensors of a part, always the same objects."""

    def version_of(self, part: str, version: Optional[int]) -> Optional[int]:
        """What to know the content of a part by, None if it holds nothing."""
        return version
