"""The feed of `rlflowc eval` (`rlflow.feed/1`): numbers in place of the results of models, data and Python ops."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, NoReturn, Optional, Sequence

import torch
from torch import Tensor

from compiler.exprs import response_name
from rlhf_dsl.builtins import call_text
from rlhf_dsl.diagnostics import did_you_mean, fault
from rlhf_dsl.typed import Expr

FORMAT = "rlflow.feed/1"
KEYS = ("format", "dims", "data", "responses", "calls", "state")
RESPONSE_KEYS = ("lengths", "text", "tokens", "logprobs", "truncated", "own")


@dataclass(frozen=True)
class FedResponse:
    """lengths: int64, own tokens of each sample, flat; own: for each sample the mask over all its tokens, or None."""

    lengths: Tensor
    own: Optional[list[list[bool]]]
    text: Optional[list[str]]
    logprobs: Optional[Tensor]
    truncated: Tensor


@dataclass(frozen=True)
class Feed:
    """What a feed file says, keys checked, values still as written."""

    place: str
    dims: dict[str, int] = field(default_factory=dict)
    data: dict[str, list] = field(default_factory=dict)
    responses: dict[str, dict] = field(default_factory=dict)
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)

    def call(self, text: str, update: bool) -> Any:
        """The value of a call as `fmt` prints it, None if there is none; one that `update` lacks is that of `rollout`."""
        if update and text in self.calls["update"]:
            return self.calls["update"][text]
        return self.calls["rollout"].get(text)

    def has(self, expr: Expr) -> bool:
        """Whether a leaf of an expression has its numbers here; True for what is no leaf."""
        if expr.op in ("call", "pyop"):
            return self.call(call_text(expr), expr.attr("phase", "").startswith("update")) is not None
        if expr.type.elem == "tokens":
            return response_name(expr) in self.responses
        if expr.op == "data":
            return expr.type.elem == "text" or expr.attr("column") in self.data
        if expr.op == "field":
            return expr.attr("field") in ("truncated", *self.responses.get(response_name(expr.args[0]), ()))
        return True

    def response(self, name: str, sizes: Sequence[int], bound: int, dtype: torch.dtype) -> FedResponse:
        """sizes: of the leading dims. Raises R0162 where a list does not fit."""
        if name not in self.responses:
            self.refuse(f"the response `{name}` is missing under `responses`", did_you_mean(name, self.responses))
        given = self.responses[name]
        known = {key: value for key, value in given.items() if key in RESPONSE_KEYS}
        flat = {key: self.flatten(value, sizes, f"responses.{name}.{key}") for key, value in known.items()}
        if "lengths" not in flat and "own" not in flat:
            self.refuse(f"`responses.{name}` has no `lengths`")
        own = None if "own" not in flat else [self._flags(row, f"responses.{name}.own") for row in flat["own"]]
        lengths = flat["lengths"] if "lengths" in flat else [sum(row) for row in own]
        self._check_lengths(name, lengths, own, bound)
        logprobs = flat.get("logprobs")
        return FedResponse(
            torch.tensor(lengths, dtype=torch.int64), own, self._texts(flat.get("text"), f"responses.{name}.text"),
            None if logprobs is None else self.per_token(logprobs, lengths, f"responses.{name}.logprobs", dtype),
            torch.tensor(self._flags(flat.get("truncated", [False] * len(lengths)), f"responses.{name}.truncated")))

    def _flags(self, row: Any, path: str) -> list[bool]:
        if not isinstance(row, list) or not all(isinstance(x, (bool, int)) for x in row):
            self.refuse(f"`{path}`: a list of true and false, or of 1 and 0, is expected, found {row!r}")
        return [bool(x) for x in row]

    def _texts(self, texts: Optional[list], path: str) -> Optional[list[str]]:
        for text in texts or ():
            if not isinstance(text, str):
                self.refuse(f"`{path}`: a text is expected, found {text!r}")
        return texts

    def _check_lengths(self, name: str, lengths: list, own: Optional[list[list[bool]]], bound: int) -> None:
        for i, length in enumerate(lengths):
            if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= bound:
                self.refuse(f"`responses.{name}.lengths` has {length!r}, a response has 1 to {bound} own tokens")
            if own is not None and sum(own[i]) != length:
                self.refuse(f"`responses.{name}`: sample {i} has {sum(own[i])} own tokens, `lengths` says {length}")

    def flatten(self, value: Any, sizes: Sequence[int], path: str) -> list:
        """The entries over `sizes`, row-major."""
        entries = [value]
        for size in sizes:
            for entry in entries:
                if not isinstance(entry, list) or len(entry) != size:
                    found = f"{len(entry)} entries" if isinstance(entry, list) else repr(entry)
                    self.refuse(f"`{path}`: a list of {size} is expected, found {found}")
            entries = [item for entry in entries for item in entry]
        return entries

    def per_token(self, rows: list, lengths: Sequence[int], path: str, dtype: torch.dtype) -> Tensor:
        """One number for each own token, packed."""
        for i, (row, length) in enumerate(zip(rows, lengths)):
            if not isinstance(row, list) or len(row) != length:
                found = f"{len(row)} entries" if isinstance(row, list) else repr(row)
                self.refuse(f"`{path}`: sample {i} has {length} own tokens, found {found}")
        return self.numbers([x for row in rows for x in row], path, dtype)

    def numbers(self, values: list, path: str, dtype: torch.dtype) -> Tensor:
        for value in values:
            if not isinstance(value, (int, float)):
                self.refuse(f"`{path}`: a number is expected, found {value!r}")
        return torch.tensor([float(v) for v in values], dtype=dtype)

    def refuse(self, reason: str, help: str = "") -> NoReturn:
        raise fault("R0162", place=self.place, reason=reason, **({"help": help} if help else {}))


def read_feed(path: str) -> Feed:
    """Raises R0161 for a file that is no feed, R0162 for one with unknown parts."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise fault("R0161", place=path, reason=error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise fault("R0161", place=path, reason=f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise fault("R0161", place=path, reason="it is not a JSON object")
    return feed_of(path, value)


def feed_of(path: str, value: Mapping[str, Any]) -> Feed:
    """The feed that a JSON object says; `path` names it in messages. Raises R0162 for unknown parts."""
    empty = Feed(path)
    if value.get("format", FORMAT) != FORMAT:
        empty.refuse(f"`format` is {value['format']!r}, `{FORMAT}` is expected")
    for key in value:
        if key not in KEYS:
            empty.refuse(f"`{key}` is unknown", did_you_mean(key, KEYS))
    parts = {key: value.get(key, {}) for key in KEYS[1:]}
    for key, part in parts.items():
        if not isinstance(part, dict):
            empty.refuse(f"`{key}` is not an object")
    for phase in parts["calls"]:
        if phase not in ("rollout", "update"):
            empty.refuse(f"`calls.{phase}` is unknown", did_you_mean(phase, ("rollout", "update")))
        if not isinstance(parts["calls"][phase], dict):
            empty.refuse(f"`calls.{phase}` is not an object")
    calls = {phase: parts["calls"].get(phase, {}) for phase in ("rollout", "update")}
    for name, response in parts["responses"].items():
        if not isinstance(response, dict):
            empty.refuse(f"`responses.{name}` is not an object")
        for key in response:
            if key not in RESPONSE_KEYS:
                empty.refuse(f"`responses.{name}.{key}` is unknown", did_you_mean(key, RESPONSE_KEYS))
    for name, size in parts["dims"].items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            empty.refuse(f"`dims.{name}` is {size!r}, a size from 1 up is expected")
    return Feed(path, parts["dims"], parts["data"], parts["responses"], calls, parts["state"])
