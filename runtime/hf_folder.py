"""Model folders as transformers writes them: weights are read by slices, and written beside, then renamed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Union

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from compiler.shapes import FAMILIES
from compiler.weights import Piece, WeightLayout
from rlhf_dsl.diagnostics import fault
from runtime.transfer import check_size, clear_padding, covered_elements
from runtime.weight_files import INDEX, SINGLE, WeightFiles

PART_BYTES = 256 << 20  # of a file; twice as much is held while it is written
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt",
)


class HFFolder:
    """The weights of a folder, read by slices.

    Raises DiagnosticError as `WeightFiles` does.
    """

    def __init__(self, path: Union[str, Path]) -> None:
        self.path = Path(path)
        self._files = WeightFiles(path, framework="pt")

    @torch.no_grad()
    def read_into(self, local_tensors: Mapping[str, Tensor], weights: WeightLayout, rank: int) -> None:
        """Fills these tensors of `rank` in place, reading only its slices; converts to their dtype, zeros padding.

        A `score.weight` that the folder lacks is a new head, which starts at zero.
        Raises DiagnosticError: R0135 a tensor is missing, R0136 one has another shape than the config says.
        ValueError: a local tensor is not of the layout's shape.
        """
        sizes, covered = weights.tensors, covered_elements(weights.pieces(rank))
        expected = weights.local_tensors(rank)
        for name, tensor in local_tensors.items():
            check_size(name, tensor, expected[name])
            clear_padding(tensor, covered.get(name, 0))
        for piece in (piece for piece in weights.pieces(rank) if piece.local in local_tensors):
            place = local_tensors[piece.local][tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size))]
            self._read(place, piece, sizes[piece.tensor])

    def _read(self, place: Tensor, piece: Piece, expected: tuple[int, ...]) -> None:
        whole = self._files.slice(piece.tensor, expected)
        if whole is None:
            place.zero_()
        else:
            place.copy_(whole[tuple(slice(a, b) for a, b in zip(piece.start, piece.stop))])


def read_config(folder: Union[str, Path]) -> dict[str, Any]:
    """`config.json` of a folder that `compiler.shapes.shape_from_config` has accepted."""
    return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))


def config_for_role(config: Mapping[str, Any], role: str) -> dict[str, Any]:
    """The config under which transformers loads the weights of a role: a causal model, or one with a single score."""
    family = FAMILIES[config["model_type"]].architecture
    rest = {k: v for k, v in config.items() if k not in ("architectures", "num_labels", "id2label", "label2id")}
    if role == "policy":
        return rest | {"architectures": [f"{family}ForCausalLM"]}
    score = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return rest | {"architectures": [f"{family}ForSequenceClassification"], **score}


def in_parts(sizes: Mapping[str, int], most: int = PART_BYTES) -> list[tuple[str, ...]]:
    """Tensors of so many bytes in their order, in runs of at most `most` bytes, or of one tensor."""
    parts: list[tuple[str, ...]] = []
    room = 0
    for name, size in sizes.items():
        if not parts or size > room:
            parts.append(())
            room = most
        parts[-1] += (name,)
        room -= size
    return parts


def write_parts(
    path: Union[str, Path], config: Mapping[str, Any], parts: Iterable[Mapping[str, Tensor]],
    companions: Optional[Union[str, Path]] = None,
) -> None:
    """Writes a folder that transformers and vLLM load; what stood at `path` is replaced only when all is written.

    parts: canonical tensors, whole, in their dtype, a file's worth at a time; each may go when the next is asked for
    companions: a folder whose tokenizer and generation config belong to this model too
    Raises DiagnosticError R0163 if it cannot be written.
    """
    try:
        _write_beside(Path(path), config, parts, companions)
    except (OSError, SafetensorError) as error:
        raise fault("R0163", place=str(path), reason=getattr(error, "strerror", None) or error) from error


def _write_beside(path: Path, config: Mapping, parts: Iterable[Mapping[str, Tensor]], companions) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        (beside / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
        for name in COMPANIONS if companions is not None else ():
            if (Path(companions) / name).is_file():
                shutil.copyfile(Path(companions) / name, beside / name)
        _write_weights(beside, parts)
        beside.chmod(0o777 & ~_umask())
        _swap(beside, path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_weights(folder: Path, parts: Iterable[Mapping[str, Tensor]]) -> None:
    """The files get their names when it is known how many there are."""
    held: list[tuple[str, ...]] = []
    size = 0
    for part in parts:
        _save(folder / f"{len(held)}.part", part)
        held.append(tuple(part))
        size += sum(tensor.nbytes for tensor in part.values())
    if len(held) == 1:
        (folder / "0.part").rename(folder / SINGLE)
        return
    files = [f"model-{i:05}-of-{len(held):05}.safetensors" for i in range(1, len(held) + 1)]
    for i, file in enumerate(files):
        (folder / f"{i}.part").rename(folder / file)
    places = {name: file for names, file in zip(held, files) for name in names}
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _save(file: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, file, metadata={"format": "pt"})
    with open(file, "rb") as written:
        os.fsync(written.fileno())


def _swap(new: Path, path: Path) -> None:
    """Puts `new` at `path`; a folder that is there steps aside first, as no rename replaces one that holds files."""
    if not path.exists():
        new.rename(path)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    path.rename(aside / path.name)
    new.rename(path)
    shutil.rmtree(aside, ignore_errors=True)


def _umask() -> int:
    """The process's mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
