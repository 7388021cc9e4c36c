"""Values with named dims over the rows that live here, packed: no padding, no masks.

A `Frame` says which rows those are and how long they are; a `Value` is flat data over named dims. Both are immutable.
Index maps between dims are made once a frame and kept in it, since every equation over it needs the same few.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Callable, Optional, Union

import torch
from torch import Tensor

from runtime.ragged import grid_index
from runtime.sequences import Sequences, ragged_index

Data = Union[Tensor, list, Sequences]
Dims = tuple[str, ...]


@dataclass(frozen=True)
class Value:
    """`data` over `dims`, flat, row-major, a ragged dim last.

    data: a 1-D tensor with one element for each of the dims' elements (one element if `dims` is empty),
          for text a list of str, for tokens a `Sequences` with one sequence for each element of `dims[:-1]`
    """

    dims: Dims
    data: Data


@dataclass(frozen=True)
class Frame:
    """The local rows.

    rows:    root dim -> int64 [n], the global index of each row here (an index may repeat, see `select_units`)
    sizes:   fixed dim that is no root dim -> its size
    lengths: ragged dim -> int64, own tokens of each row, flat over `lead[dim]` of the local rows
    lead:    ragged dim -> the dims that its lengths vary over
    totals:  root dim -> number of rows over all shards
    folded:  group dims that `select_units` took apart: their size here is 1, so nothing may reduce over them alone
    """

    rows: dict[str, Tensor]
    sizes: dict[str, int]
    lengths: dict[str, Tensor]
    lead: dict[str, Dims]
    totals: dict[str, int]
    folded: Dims = ()
    cache: dict = field(default_factory=dict, compare=False, repr=False)

    # ---- counting ----------------------------------------------------------------------------------

    def size(self, dim: str) -> int:
        """Local size of a dim that is not ragged."""
        return self.rows[dim].numel() if dim in self.rows else self.sizes[dim]

    def shape(self, dims: Dims) -> tuple[int, ...]:
        """Local sizes of dims of which none is ragged."""
        return tuple(self.size(d) for d in dims)

    def is_ragged(self, dims: Dims) -> bool:
        return bool(dims) and dims[-1] in self.lengths

    def roots(self, dims: Dims) -> Dims:
        """Those of `dims` that are root dims."""
        return tuple(d for d in dims if d in self.rows)

    def row_lengths(self, dims: Dims) -> Tensor:
        """int64: the lengths of the ragged last dim, flat over `dims[:-1]`."""
        lengths, over = self.lengths[dims[-1]], self.index(self.lead[dims[-1]], dims[:-1])
        return lengths if over is None else lengths[over]

    def numel(self, dims: Dims) -> int:
        """Number of local elements of `dims`."""
        return self.memo(("numel", dims), lambda: self._numel(dims))

    def _numel(self, dims: Dims) -> int:
        if self.is_ragged(dims):
            return int(self.row_lengths(dims).sum())
        return _product(self.shape(dims))

    # ---- index maps --------------------------------------------------------------------------------

    def memo(self, key: tuple, make: Callable):
        """`make()`, computed once for this frame and `key`."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]

    def index(self, src: Dims, dst: Dims) -> Optional[Tensor]:
        """int64 [numel(dst)]: for each element of `dst`, the element of `src` with the same coordinates; None: itself.

        `src` is a subset of `dst` in any order. It broadcasts (`x[index]`) and reduces (segment numbers).
        """
        return None if src == dst else self.memo((src, dst), lambda: self._index(src, dst))

    def _index(self, src: Dims, dst: Dims) -> Tensor:
        if not set(src) <= set(dst):
            raise ValueError(f"dims {src} do not broadcast to {dst}")
        if not self.is_ragged(dst):
            steps = _strides(self.shape(src))
            stride = {d: step for d, step in zip(src, steps)}
            shape = self.shape(dst)
            return grid_index(shape, [torch.arange(n) * stride.get(d, 0) for d, n in zip(dst, shape)])
        rows = dst[:-1]
        if self.is_ragged(src):
            return ragged_index(self.row_lengths(src), self._index(src[:-1], rows))
        row = self.memo(("row", dst), lambda: self._row_of_token(dst))
        over = self.index(src, rows)
        return row if over is None else over[row]

    def _row_of_token(self, dims: Dims) -> Tensor:
        lengths = self.row_lengths(dims)
        return torch.repeat_interleave(torch.arange(lengths.numel()), lengths)

    def remaining(self, dims: Dims) -> Tensor:
        """int64 [numel(dims)]: how many tokens of its row follow each token."""
        return self.memo(("remaining", dims), lambda: self._remaining(dims))

    def _remaining(self, dims: Dims) -> Tensor:
        ends = torch.cumsum(self.row_lengths(dims), 0)
        return ends[self.index(dims[:-1], dims)] - 1 - torch.arange(self.numel(dims))

    def longest(self, dims: Dims) -> int:
        """Tokens of the longest row, 0 if there is none."""
        return self.memo(("longest", dims), lambda: int(self.row_lengths(dims).max()) if self.numel(dims) else 0)

    def place(self, dims: Dims, position: int) -> dict[str, int]:
        """Coordinates of one local element, for messages; of a root dim its global row."""
        found, rest = {}, position
        if self.is_ragged(dims):
            row = int(self.index(dims[:-1], dims)[position])
            found[dims[-1]] = int(self.row_lengths(dims)[row] - 1 - self.remaining(dims)[position])
            dims, rest = dims[:-1], row
        for dim in reversed(dims):
            rest, at = divmod(rest, self.size(dim))
            found[dim] = int(self.rows[dim][at]) if dim in self.rows else at
        return {d: found[d] for d in reversed(found)}

    # ---- parts -------------------------------------------------------------------------------------

    def select(self, root: str, positions: Tensor) -> "Selection":
        """The rows of `root` at the local `positions` (int64 [m], any order); other root dims stay whole."""
        return Selection.of(self, root, {root: positions}, self.sizes, self.folded)

    def select_units(self, dims: Dims, chosen: Tensor) -> "Selection":
        """Each chosen sample becomes a row of its own, with groups of size 1: the unit of a micro-batch of samples.

        dims:   a root dim and group dims, e.g. ("b", "g")
        chosen: int64 [m], flat positions row-major over `dims`
        A value over [b] or [b, t] is repeated for each sample of its row; one over [g] alone has no place (ValueError).
        Sums over trained outputs are right only if those have all of `dims` (each element then stands in one unit), and
        nothing may reduce over a group dim alone; group statistics come in as values. The compiler guarantees both.
        """
        (root,) = self.roots(dims)
        coords = dict(zip(dims, torch.unravel_index(chosen, self.shape(dims))))
        groups = tuple(d for d in dims if d != root)
        return Selection.of(self, root, coords, {**self.sizes, **{d: 1 for d in groups}}, self.folded + groups)

    @staticmethod
    def concat(frames: list["Frame"], root: str) -> "Frame":
        """All rows of `root`, in the frames' order; whatever does not vary over `root` is the first frame's."""
        first = frames[0]
        rows = {**first.rows, root: torch.cat([f.rows[root] for f in frames])}
        lengths = {t: concat([Value(lead, f.lengths[t]) for f in frames], frames, root).data
                   for t, lead in first.lead.items()}
        return replace(first, rows=rows, lengths=lengths, cache={})


@dataclass(frozen=True)
class Selection:
    """Some rows of a frame: `frame` is the sub-frame, `value(v)` the part of a value over the whole frame.

    coords: for `root` and each folded group dim, int64 [m]: its coordinate in the whole frame
    """

    whole: Frame
    root: str
    coords: dict[str, Tensor]
    frame: Frame
    maps: dict = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(whole: Frame, root: str, coords: dict[str, Tensor], sizes: dict[str, int], folded: Dims) -> "Selection":
        rows = {**whole.rows, root: whole.rows[root][coords[root]]}
        frame = Frame(rows, sizes, {}, whole.lead, whole.totals, folded)
        selection = Selection(whole, root, coords, frame)
        for dim, lead in whole.lead.items():
            frame.lengths[dim] = selection.value(Value(lead, whole.lengths[dim])).data
        return selection

    def value(self, value: Value) -> Value:
        if self.root not in value.dims:
            self._check_whole(value.dims)
            return value
        rows = value.dims[:-1] if self.whole.is_ragged(value.dims) else value.dims
        if isinstance(value.data, Sequences) or rows == value.dims:
            return Value(value.dims, take(value.data, self._map(rows)))
        return Value(value.dims, take(value.data, self._map(value.dims)))

    def _check_whole(self, dims: Dims) -> None:
        lost = [d for d in dims if d in self.coords]
        if lost:
            raise ValueError(f"a value over {dims} has no part for a sample: it varies over {lost} without {self.root}")

    def _map(self, dims: Dims) -> Tensor:
        """int64: for each element of `dims` in the sub-frame, its position in the whole frame."""
        if dims not in self.maps:
            self.maps[dims] = self._make_map(dims)
        return self.maps[dims]

    def _make_map(self, dims: Dims) -> Tensor:
        whole = self.whole
        if whole.is_ragged(dims):
            return ragged_index(whole.row_lengths(dims), self._map(dims[:-1]))
        shape, steps = self.frame.shape(dims), _strides(whole.shape(dims))
        parts = [torch.arange(n) * step for n, step in zip(shape, steps)]
        at = dims.index(self.root)
        # A folded dim has size 1 here; its coordinate varies along the rows.
        parts[at] = sum(self.coords[d] * step for d, step in zip(dims, steps) if d in self.coords)
        return grid_index(shape, parts)


def take(data: Data, positions: Tensor) -> Data:
    """The elements (of a `Sequences`: the sequences) at `positions`."""
    if isinstance(data, Tensor):
        return data.index_select(0, positions)
    if isinstance(data, Sequences):
        return data.select(positions)
    return [data[i] for i in positions.tolist()]


def concat(values: list[Value], frames: list[Frame], root: str) -> Value:
    """The values of several frames as one over `Frame.concat(frames, root)`."""
    dims = values[0].dims
    if len(values) == 1 or root not in dims:
        return values[0]
    data = _joined([v.data for v in values])
    rows = dims[:-1] if frames[0].is_ragged(dims) else dims
    if rows[0] == root:
        return Value(dims, data)
    shapes = [f.shape(rows) for f in frames]
    starts = [0, *torch.tensor([_product(s) for s in shapes]).cumsum(0).tolist()]
    blocks = [torch.arange(_product(s)).reshape(s) + start for s, start in zip(shapes, starts)]
    order = torch.cat(blocks, dim=rows.index(root)).flatten()
    if rows != dims and isinstance(data, Tensor):
        order = ragged_index(torch.cat([f.row_lengths(dims) for f in frames]), order)
    return Value(dims, take(data, order))


def _joined(parts: list[Data]) -> Data:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], Sequences):
        return Sequences.concat(parts)
    return [item for part in parts for item in part]


# ---- nested lists ----------------------------------------------------------------------------------

def to_lists(value: Value, frame: Frame):
    """Nested lists over the value's dims, one list per ragged row; a plain number, bool or str if it has no dims."""
    flat = value.data.tolist() if isinstance(value.data, Tensor) else list(value.data)
    dims = value.dims
    if frame.is_ragged(dims):
        flat, dims = _cut(flat, frame.row_lengths(dims).tolist()), dims[:-1]
    for size in reversed(frame.shape(dims)[1:]):
        flat = [flat[i:i + size] for i in range(0, len(flat), size)]
    return flat if value.dims and dims else flat[0]


def _cut(flat: list, lengths: list[int]) -> list[list]:
    rows, start = [], 0
    for length in lengths:
        rows.append(flat[start:start + length])
        start += length
    return rows


def from_lists(nested, dims: Dims, frame: Frame, elem: str = "f32", dtype: torch.dtype = torch.float64) -> Value:
    """The value written as nested lists, see `to_lists`.

    elem: "f32" (numbers, also booleans; made a tensor of `dtype`), "bool" or "text"
    Raises ValueError, with the path of the place, if sizes or elements do not fit.
    """
    items = [("", nested)]
    fixed = dims[:-1] if frame.is_ragged(dims) else dims
    for size in frame.shape(fixed):
        items = [entry for item in items for entry in _entries(*item, size)]
    if fixed != dims:
        lengths = frame.row_lengths(dims).tolist()
        items = [entry for item, length in zip(items, lengths) for entry in _entries(*item, length)]
    kinds = {"f32": (int, float), "bool": (bool,), "text": (str,)}[elem]
    for path, item in items:
        if not isinstance(item, kinds):
            raise ValueError(f"{path or 'value'}: expected {elem}, got {item!r}")
    flat = [item for _, item in items]
    return Value(dims, flat if elem == "text" else torch.tensor(flat, dtype=torch.bool if elem == "bool" else dtype))


def _entries(path: str, item, size: int) -> list[tuple]:
    if not isinstance(item, list):
        raise ValueError(f"{path or 'value'}: expected a list of {size}, got {item!r}")
    if len(item) != size:
        raise ValueError(f"{path or 'value'}: expected {size} entries, got {len(item)}")
    return [(f"{path}[{i}]", entry) for i, entry in enumerate(item)]


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [_product(shape[i + 1:]) for i in range(len(shape))]
