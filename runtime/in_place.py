"""Weights of a rank in two layouts that share memory in time: see `compiler.resharding.residency`."""

from __future__ import annotations

from collections import defaultdict
from typing import Iterable

import torch
from torch import Tensor

from compiler.resharding.redistribute import WeightTransfer
from compiler.resharding.residency import given_up, last_reads
from runtime.transfer_steps import Regions, Tensors


class InPlace:
    """The tensors of one rank at both ends of `transfer`, of one dtype: `training` at the source, `generating` at the
    destination. From here on until `WeightMover.move` brings them, the tensors of `generating` have no memory.
    """

    def __init__(self, transfer: WeightTransfer, rank: int, training: Tensors, generating: Tensors) -> None:
        source, target = Regions(transfer.src.pieces(rank)), Regions(transfer.dst.pieces(rank))
        self._training, self._generating = training, generating
        spare = given_up(transfer, rank)
        self._stores = _stores(training, spare)
        self._copies = {name: [(target.find(m), source.find(m)) for m in moves] for name, moves in spare.items()}
        self._drops = defaultdict(list)  # training tensor -> those of generation that nothing after it is filled from
        for local, name in last_reads(transfer, rank, spare).items():
            self._drops[name].append(local)
        self._read: set[str] = set()
        self._sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in generating.items()}
        for name in generating:
            self._drop(name)

    def arrives(self, name: str) -> None:
        """Memory for a tensor of `generating`, before it is written."""
        self._generating[name].untyped_storage().resize_(self._sizes[name])

    def left(self, name: str) -> None:
        """A tensor of `training` is read no more: its memory is given up if generation holds what it holds."""
        self._read.add(name)
        store = self._stores.get(name)
        if store is not None and store.names <= self._read:
            store.storage.resize_(0)

    @torch.no_grad()
    def give_back(self) -> None:
        """Training has its weights again, generation none."""
        self._read.clear()
        for name in self._generating.keys() - {local for drops in self._drops.values() for local in drops}:
            self._drop(name)
        for name in self._training:
            store = self._stores.get(name)
            if store is not None:
                if not store.storage.nbytes():
                    store.storage.resize_(store.size)
                for there, here in self._copies[name]:
                    here.of(self._training).copy_(there.of(self._generating))
            for local in self._drops[name]:
                self._drop(local)

    def _drop(self, name: str) -> None:
        self._generating[name].untyped_storage().resize_(0)


class _Store:
    """Memory that holds the tensors `names` and nothing else."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.names = frozenset(tensors)
        self.storage = next(iter(tensors.values())).untyped_storage()
        self.size = self.storage.nbytes()


def _stores(tensors: Tensors, spare: Iterable[str]) -> dict[str, _Store]:
    """By name, of the tensors whose memory holds nothing that must stay."""
    shared: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        shared[tensor.untyped_storage().data_ptr()][name] = tensor
    spare, found = set(spare), {}
    for some in shared.values():
        store = _Store(some)
        if store.names <= spare and store.size == sum(tensor.nbytes for tensor in some.values()):
            found |= dict.fromkeys(some, store)
    return found
