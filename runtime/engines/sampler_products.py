"""Products with matrices that stay what they are for many steps.

A product with few rows reads its matrix in the order in which the kernel wants it, or reorders it every time, which takes
as long as the product. So while responses are generated in 32 bits on a CPU, a copy lies there in the order of the kernel.
"""

from __future__ import annotations

from typing import Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 32  # for which the kernel chooses its order; others are right, too


class Products:
    """x W^T of matrices W.

    matrices: those that do not change as long as this is used; memory: bytes for their copies, else there are none
    """

    def __init__(self, matrices: Sequence[Tensor] = (), memory: int = 0) -> None:
        fit = sum(w.nbytes for w in matrices) <= memory
        self._packed = {w: torch.ops.mkldnn._reorder_linear_weight(w, _ROWS) for w in matrices if fit and _packable(w)}

    def of(self, x: Tensor, matrix: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        """x [m, in], matrix [out, in], bias [out] → [m, out]."""
        packed = self._packed.get(matrix)
        if packed is None:
            return F.linear(x, matrix, bias)
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    def added(self, total: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
        """total [m, out] + x W^T; `total` may be overwritten."""
        packed = self._packed.get(matrix)
        if packed is None:
            return total.addmm_(x, matrix.t())
        return torch.ops.mkldnn._linear_pointwise.binary(x, total, packed, None, "add")


def _packable(matrix: Tensor) -> bool:
    return matrix.device.type == "cpu" and matrix.dtype == torch.float32 and torch.backends.mkldnn.is_available()
