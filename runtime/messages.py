"""Messages between pairs of ranks, whose lengths both sides know: a rank that neither sends nor receives takes no part.

Between two ranks messages meet in the order of the calls. A rank that waits for one sleeps.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Mapping, Optional

import torch.distributed as dist
from torch import Tensor

MOST_LEAVING = 64 << 20  # bytes


def swap(
    outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], group: Optional[dist.ProcessGroup] = None
) -> None:
    """Sends a tensor to some ranks and fills one from others, all at once; returns when that is done.

    outgoing, incoming: by global rank, none of them empty
    """
    receives = [dist.P2POp(dist.irecv, tensor, rank, group) for rank, tensor in incoming.items()]
    sends = [dist.P2POp(dist.isend, tensor, rank, group) for rank, tensor in outgoing.items()]
    for work in dist.batch_isend_irecv(receives + sends) if receives or sends else ():
        work.wait()


class Outbox:
    """Messages that leave while the sender goes on: it need not wait until a receiver comes for them.

    What has not arrived is held here, `most` bytes of it; a further message waits for the oldest.
    """

    def __init__(self, group: Optional[dist.ProcessGroup], most: int = MOST_LEAVING) -> None:
        self._group, self._most = group, most
        self._leaving: deque[tuple[Any, Tensor]] = deque()
        self._held = 0

    def send(self, tensor: Tensor, rank: int) -> None:
        """The tensor, contiguous and not empty, is not to be written to any more."""
        while self._leaving and self._held + tensor.nbytes > self._most:
            self._arrived()
        self._leaving.append((dist.isend(tensor, rank, group=self._group), tensor))
        self._held += tensor.nbytes

    def settle(self) -> None:
        """Returns when everything has arrived."""
        while self._leaving:
            self._arrived()

    def _arrived(self) -> None:
        work, tensor = self._leaving.popleft()
        work.wait()
        self._held -= tensor.nbytes
