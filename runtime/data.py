"""Rows of a data source: opened, checked whole, and given out as a stream that is reshuffled each pass."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, NoReturn, Sequence

import numpy as np

from rlhf_dsl.diagnostics import DiagnosticError, fault, listing
from runtime import draws

ENTRY_POINTS = "rlflow.data"


@dataclass(frozen=True)
class Field:
    """A column to read. elem: "text", "f32" (finite) or "bool"."""

    name: str
    elem: str = "text"


@dataclass(frozen=True)
class Table:
    """All rows of a source in file order; `columns[name]` is a list of str, float or bool. kind: as of `open_table`."""

    path: str
    columns: dict[str, list]
    size: int
    kind: str = ""

    def take(self, rows: Iterable[int]) -> dict[str, list]:
        """The given rows (indices) of each column."""
        rows = [int(i) for i in rows]
        return {name: [values[i] for i in rows] for name, values in self.columns.items()}

    def place(self, row: int) -> str:
        """`file:line` of a row of a JSONL file, else `path: row N`, for messages."""
        if self.kind == "jsonl":
            return f"{self.path}:{next(itertools.islice(_json_rows(Path(self.path)), row, None))[0]}"
        return f"{self.path}: row {row + 1}"


def open_table(kind: str, path, fields: Sequence[Field]) -> Table:
    """Reads and checks the columns of a source.

    kind: "jsonl", "parquet", "hf" (a local folder of a data set), or one that an installed package brings

    Raises R0300 (missing or unreadable), R0301 (a line that is not a JSON object), R0302 (missing column),
    R0303 (a value of another type), R0304 (no rows). The place names file and line or row.
    """
    path = Path(path)
    if kind in _READERS and not path.exists():
        raise fault("R0300", place=str(path), reason="there is no such file or folder")
    names = list(dict.fromkeys(f.name for f in fields))
    columns = _READERS.get(kind, _read_package(kind))(path, fields, names)
    size = len(columns[names[0]])
    if not size:
        raise fault("R0304", place=str(path))
    return Table(str(path), columns, size, kind)


class Stream:
    """The endless order in which a root dim reads a table.

    Pass k over the table is permuted by (seed, root dim, k): see `runtime.draws.permutation`. Position p of the stream
    is row p mod size of pass p // size, so the last rows of a pass are followed by the first of the next, and the
    position, an integer, is the whole state.
    """

    def __init__(self, table: Table, root: str, seed: int) -> None:
        self.table, self.root, self.seed = table, root, seed
        self._pass, self._order = -1, np.zeros(0, dtype=np.int64)

    def rows(self, position: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """The next n rows from `position`: their positions in the stream and their indices in the table, int64 [n]."""
        positions = np.arange(position, position + n, dtype=np.int64)
        passes, places = np.divmod(positions, self.table.size)
        indices = np.empty(n, dtype=np.int64)
        for k in np.unique(passes):
            here = passes == k
            indices[here] = self._permutation(int(k))[places[here]]
        return positions, indices

    def first(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """The first n rows in file order (for `eval`), as `rows` gives them. Raises R0305 if there are fewer."""
        if n > self.table.size:
            raise fault("R0305", place=self.table.path, dim=self.root, wanted=n, size=self.table.size)
        rows = np.arange(n, dtype=np.int64)
        return rows, rows

    def _permutation(self, k: int) -> np.ndarray:
        if k != self._pass:
            self._pass, self._order = k, draws.permutation(self.table.size, self.seed, self.root, k)
        return self._order


# ---- readers: (path, fields, names) → columns ---------------------------------------------------

def _read_jsonl(path: Path, fields: Sequence[Field], names: list[str]) -> dict[str, list]:
    columns: dict[str, list] = {name: [] for name in names}
    for number, row in _json_rows(path):
        _append_row(columns, f"{path}:{number}", row, fields)
    return _as_numbers(columns, fields)


def _append_row(columns: dict[str, list], place: str, row: dict, fields: Sequence[Field]) -> None:
    for field in fields:
        if field.name not in row:
            raise _missing(place, field.name, list(row))
        if not _CHECKS[field.elem](row[field.name]):
            raise _wrong_type(place, field, row[field.name])
    for name in columns:
        columns[name].append(row[name])


def _json_rows(path: Path) -> Iterator[tuple[int, dict]]:
    """(line number, object) of each line that is not blank."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise fault("R0300", place=str(path), reason=error.strerror, help="check its name and permissions") from error
    decode = json.JSONDecoder(parse_constant=_reject_constant).decode
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decode(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise _not_json(path, number, error) from error
        if not isinstance(row, dict):
            raise fault("R0301", place=f"{path}:{number}", reason=f"a {_json_kind(row)} instead of an object")
        yield number, row


def _read_parquet(path: Path, fields: Sequence[Field], names: list[str]) -> dict[str, list]:
    import pyarrow
    import pyarrow.parquet

    try:
        return _arrow_columns(path, pyarrow.parquet.ParquetFile(path), fields, names)
    except (pyarrow.ArrowException, OSError) as error:
        raise fault("R0300", place=str(path), reason=f"as Parquet, {error}", help="write it again") from error


def _arrow_columns(path: Path, file, fields: Sequence[Field], names: list[str]) -> dict[str, list]:
    known = file.schema_arrow.names
    for name in names:
        if name not in known:
            raise _missing(str(path), name, known)
    table = file.read(columns=names)
    columns = {name: table.column(name).to_pylist() for name in names}
    for field in fields:
        check = _CHECKS[field.elem]
        wrong = next((i for i, value in enumerate(columns[field.name]) if not check(value)), None)
        if wrong is not None:
            raise _wrong_type(f"{path}: row {wrong + 1}", field, columns[field.name][wrong])
    return _as_numbers(columns, fields)


def _read_folder(path: Path, fields: Sequence[Field], names: list[str]) -> dict[str, list]:
    """A local folder of a data set: its Parquet or JSONL files, those of the split `train` if their names have one."""
    for suffix, reader in ((".parquet", _read_parquet), (".jsonl", _read_jsonl)):
        files = sorted(path.rglob(f"*{suffix}")) if path.is_dir() else []
        files = [f for f in files if "train" in f.name] or files
        parts = [reader(f, fields, names) for f in files]
        if parts:
            return {name: [value for part in parts for value in part[name]] for name in names}
    raise fault("R0300", place=str(path), reason="it is not a folder with `.parquet` or `.jsonl` files",
                help="save the data set into a folder as Parquet (`dataset.to_parquet(file)`)")


def _read_package(kind: str) -> Callable:
    """The reader of a source that an installed package brings: entry point `KIND` of the group `rlflow.data`.

    It names a function that takes the path and gives one dict a row.
    """
    def read(path: Path, fields: Sequence[Field], names: list[str]) -> dict[str, list]:
        found = list(importlib.metadata.entry_points(group=ENTRY_POINTS, name=kind))
        if not found:
            raise fault("R0300", place=str(path), reason=f"no installed package brings the source `{kind}`")
        columns: dict[str, list] = {name: [] for name in names}
        for number, row in enumerate(found[0].load()(str(path)), 1):
            _append_row(columns, f"{path}: row {number}", row, fields)
        return _as_numbers(columns, fields)

    return read


_READERS: dict[str, Callable] = {"jsonl": _read_jsonl, "parquet": _read_parquet, "hf": _read_folder}


# ---- types --------------------------------------------------------------------------------------

def _is_text(value: Any) -> bool:
    return isinstance(value, str) and (value.isascii() or _encodable(value))


def _encodable(value: str) -> bool:
    """False for lone surrogates, which JSON can spell and no tokenizer takes."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "text": _is_text, "f32": _is_number, "bool": lambda value: isinstance(value, bool)}
_WANTED = {"text": "text", "f32": "a finite number", "bool": "true or false"}


def _as_numbers(columns: dict[str, list], fields: Sequence[Field]) -> dict[str, list]:
    numbers = {f.name for f in fields if f.elem == "f32"}
    return {name: [float(v) for v in values] if name in numbers else values for name, values in columns.items()}


# ---- faults -------------------------------------------------------------------------------------

def _not_json(path: Path, number: int, error: Exception) -> DiagnosticError:
    if isinstance(error, UnicodeDecodeError):
        return fault("R0301", place=f"{path}:{number}", reason=f"not UTF-8 at byte {error.start + 1} of the line")
    if isinstance(error, json.JSONDecodeError):
        reason = f"{error.msg[:1].lower()}{error.msg[1:]}".removesuffix(":")
        return fault("R0301", place=f"{path}:{number}:{error.colno}", reason=reason)
    return fault("R0301", place=f"{path}:{number}", reason=str(error))


def _missing(place: str, name: str, known: list[str]) -> DiagnosticError:
    return fault("R0302", place=place, column=name, known=listing(known) or "none")


def _wrong_type(place: str, field: Field, value: Any) -> DiagnosticError:
    text = repr(value)
    shown = text if len(text) <= 40 else text[:37] + "..."
    return fault("R0303", place=place, column=field.name, value=shown, wanted=_WANTED[field.elem])


def _json_kind(value: Any) -> str:
    names = {list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"`{name}` is not a JSON number")
