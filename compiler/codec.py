"""Frozen dataclasses to JSON values and back; what comes back is checked against the annotations.

A field that holds its default is left out, so that small things stay small and new fields can be added; unknown keys
are ignored for the same reason. Classes with a class variable `op` are told apart by it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from typing import Any


class CodecError(Exception):
    """`path` leads to the value that does not fit: `steps[3].model`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message


def encode(value: Any) -> Any:
    """JSON values of a dataclass, tuple, dict or scalar."""
    if dataclasses.is_dataclass(value):
        tag = {"op": value.op} if isinstance(getattr(type(value), "op", None), str) else {}
        return tag | {f.name: encode(getattr(value, f.name)) for f in _fields(type(value)) if not _is_default(value, f)}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


def decode(kind: Any, value: Any, path: str = "plan") -> Any:
    """The value of type `kind` that `encode` wrote. Raises CodecError."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return _frozen(value, path)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(kind), value, path)
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), value, path)
    if origin is dict:
        return _decode_dict(typing.get_args(kind), value, path)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, path)
    return _decode_scalar(kind, value, path)


def _decode_dataclass(kind: type, value: Any, path: str) -> Any:
    _expect(isinstance(value, dict), path, "an object is expected")
    arguments = {}
    for field in _fields(kind):
        if field.name in value:
            arguments[field.name] = decode(_hints(kind)[field.name], value[field.name], f"{path}.{field.name}")
        else:
            _expect(_has_default(field), path, f"`{field.name}` is missing")
    return kind(**arguments)


def _decode_union(choices: tuple, value: Any, path: str) -> Any:
    if value is None and types.NoneType in choices:
        return None
    tagged = {c.op: c for c in choices if isinstance(getattr(c, "op", None), str)}
    if tagged:
        tag = value.get("op") if isinstance(value, dict) else None
        _expect(isinstance(tag, str) and tag in tagged, path, f"`op` is not one of {', '.join(tagged)}")
        return _decode_dataclass(tagged[tag], value, path)
    for choice in choices:
        if choice is not types.NoneType and _fits(choice, value):
            return decode(choice, value, path)
    raise CodecError(path, "the value has the wrong type")


def _decode_tuple(items: tuple, value: Any, path: str) -> tuple:
    _expect(isinstance(value, (list, tuple)), path, "a list is expected")
    if len(items) == 2 and items[1] is Ellipsis:
        items = (items[0],) * len(value)
    _expect(len(items) == len(value), path, f"{len(items)} items are expected")
    return tuple(decode(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(zip(items, value)))


def _decode_dict(items: tuple, value: Any, path: str) -> dict:
    _expect(isinstance(value, dict), path, "an object is expected")
    return {key: decode(items[1], item, f"{path}.{key}") for key, item in value.items()}


def _decode_scalar(kind: type, value: Any, path: str) -> Any:
    _expect(_fits(kind, value), path, f"{_NAMES.get(kind, 'a value')} is expected")
    return float(value) if kind is float else value


_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


def _fits(kind: type, value: Any) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind) if kind in (bool, str) else True


def _frozen(value: Any, path: str) -> Any:
    """Any JSON value with lists as tuples: hashable, for attributes."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item, f"{path}[{i}]") for i, item in enumerate(value))
    _expect(value is None or isinstance(value, (bool, int, float, str)), path, "a scalar or a list is expected")
    return value


def _expect(holds: bool, path: str, message: str) -> None:
    if not holds:
        raise CodecError(path, message)


def _fields(kind: type) -> tuple:
    return tuple(f for f in dataclasses.fields(kind) if f.init)


@functools.cache
def _hints(kind: type) -> dict:
    return typing.get_type_hints(kind)


def _has_default(field: dataclasses.Field) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _is_default(value: Any, field: dataclasses.Field) -> bool:
    current = getattr(value, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return current == field.default_factory()
    return type(current) is type(field.default) and current == field.default
