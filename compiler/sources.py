"""Where a model or data file is that a program names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Union

from rlhf_dsl.diagnostics import fault

BUILTIN = "builtin:"
BUILTIN_FOLDER = Path(__file__).resolve().parent.parent / "programs" / "models"  # a user's own `programs` is not ours


def resolve_model(source: str, program_dir: Union[str, Path]) -> Path:
    """The folder of a model: `builtin:NAME`, or a path looked up beside the program, then in the working directory.

    Raises DiagnosticError R0130 if there is no such folder.
    """
    folder = _builtin(source) if source.startswith(BUILTIN) else resolve_path(os.path.expanduser(source), program_dir)
    if (folder / "config.json").is_file():
        return folder
    if source.startswith(BUILTIN):
        raise fault("R0130", folder=source, help=f"there is: {', '.join(builtin_models())}")
    raise fault("R0130", folder=source)


def resolve_path(path: str, program_dir: Union[str, Path]) -> Path:
    """A path beside the program if it is there, else as the working directory has it."""
    beside = Path(program_dir) / path
    return Path(path) if Path(path).exists() and not beside.exists() else beside


def builtin_models() -> tuple[str, ...]:
    """The models that come with the package, as programs name them."""
    return tuple(sorted(BUILTIN + p.parent.name for p in BUILTIN_FOLDER.glob("*/config.json")))


def _builtin(source: str) -> Path:
    return BUILTIN_FOLDER / source.removeprefix(BUILTIN)
