"""Lets megatron-core run where there is no CUDA, over gloo. Import this module before `megatron.core`.

megatron-core spells its device out: `device="cuda"`, `torch.cuda.current_device()`, `.cuda()`. An import hook rewrites
those spellings in its sources while they are loaded. torch itself is left alone, and with a GPU nothing is rewritten.
Written for megatron-core 0.16.
"""

from __future__ import annotations

import importlib.machinery
import re
import sys
import warnings

import torch

_REWRITES = tuple((re.compile(pattern), replacement) for pattern, replacement in (
    # tensor types that are compared with Tensor.type(), in gradient clipping
    (r"torch\.cuda\.(Float|Half|BFloat16)Tensor", r"torch.\1Tensor"),
    (r"device\s*=\s*(['\"])cuda\1", r"device='cpu'"),
    (r"torch\.cuda\.current_device\(\)", r"torch.get_default_device()"),
    (r"torch\.cuda\.(?:synchronize|empty_cache)\(\)", r"None"),
    (r"\.cuda\(\)", r".cpu()"),
    (r"from torch\.utils\.tensorboard import SummaryWriter", r"SummaryWriter = None"),  # slow, for annotations
))


def _rewrite(source: str) -> str:
    for pattern, replacement in _REWRITES:
        source = pattern.sub(replacement, source)
    return source


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the rewritten source; byte code on disk is never used, as it is of the original."""

    def get_code(self, fullname: str):
        path = self.get_filename(fullname)
        return compile(_rewrite(self.get_data(path).decode()), path, "exec", dont_inherit=True)

    def exec_module(self, module) -> None:
        super().exec_module(module)
        if module.__name__ == "megatron.core.jit":
            module.disable_jit_fuser()  # else torch.compile starts a C++ compiler at the first step


class _Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if not fullname.startswith("megatron.core"):
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Puts the hook in place, once, unless there is a GPU. Raises ImportError if megatron.core was loaded before."""
    warnings.filterwarnings("ignore", module=r"megatron\.core")  # it tells users which optional packages it lacks
    if torch.cuda.is_available() or _Finder in sys.meta_path:
        return
    if "megatron.core" in sys.modules:
        raise ImportError("runtime.engines.megatron_cpu must be imported before megatron.core")
    sys.meta_path.insert(0, _Finder)


install()
