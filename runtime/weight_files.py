"""The safetensors files of a model folder: which tensors they hold, and of which sizes. Starts without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Optional, Union

from safetensors import SafetensorError, safe_open

from compiler.shapes import ModelShape, tensors
from compiler.weights import SCORE
from rlhf_dsl.diagnostics import fault

LAYERS, BUFFERS = "model.layers.", (".inv_freq", ".masked_bias")  # older folders store what is computed
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """`model.safetensors`, or shards named by its index. Opens files when they are needed.

    framework: of what slices give, as `safetensors` names it
    Raises DiagnosticError: R0130 no such folder, R0133 no weights in it, R0134 a file that cannot be read.
    """

    def __init__(self, path: Union[str, Path], framework: str = "numpy") -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise fault("R0130", folder=path)
        self._framework = framework
        self._open_files: dict[str, Any] = {}
        self._files = self._locate()

    def slice(self, tensor: str, expected: tuple[int, ...]) -> Optional[Any]:
        """A tensor to cut slices from; None for a `score.weight` that the folder lacks: a new head.

        Raises DiagnosticError: R0135 the tensor is missing, R0136 its shape is not the expected one.
        """
        if tensor not in self._files:
            if tensor == SCORE:
                return None
            raise fault("R0135", place=str(self.path), tensor=tensor)
        file = self._open(self._files[tensor])
        try:
            whole = file.get_slice(tensor)
        except SafetensorError as error:
            raise fault("R0135", place=str(self.path / self._files[tensor]), tensor=tensor) from error
        found = tuple(whole.get_shape())
        if found != expected:
            raise fault("R0136", place=str(self.path), tensor=tensor, found=list(found), expected=list(expected))
        return whole

    def check(self, shape: ModelShape, role: str) -> None:
        """Raises what reading all weights of the model would raise, and R0137; reads headers only."""
        described = tensors(shape, role)
        for tensor, size in described.items():
            self.slice(tensor, size)
        for tensor in self._files:
            if tensor.startswith(LAYERS) and tensor not in described and not tensor.endswith(BUFFERS):
                raise fault("R0137", place=str(self.path), tensor=tensor)

    def _open(self, file: str) -> Any:
        if file not in self._open_files:
            path = self.path / file
            try:
                self._open_files[file] = safe_open(path, framework=self._framework)
            except (OSError, SafetensorError) as error:
                raise fault("R0134", place=str(path), reason=error) from error
        return self._open_files[file]

    def _locate(self) -> dict[str, str]:
        """File of each tensor."""
        if (self.path / SINGLE).is_file():
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        if not (self.path / INDEX).is_file():
            raise fault("R0133", place=str(self.path))
        try:
            return dict(json.loads((self.path / INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise fault("R0134", place=str(self.path / INDEX), reason=error) from error
