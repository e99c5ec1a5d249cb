"""Frozen dataclasses to JSON and back, strictly: what is unknown is refused, what is missing is named.

Our own reader and not a schema library, because the measuring child runs in an engine's own environment, where only
torch, triton and numpy may be assumed (docs/adr/0002-records-are-dataclasses.md).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from moegate import canonical
from moegate.errors import RecordError, UsageError
from moegate.paths import write_atomic

__all__ = ["from_json", "read", "to_json", "write"]

T = TypeVar("T")
_MOST_WHOLE = 1 << 63  # whole numbers that any float, and any other reader, can hold too


def to_json(record: Any) -> Any:
    """Turn a record (or a container of records) into plain JSON values; tuples become lists."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: to_json(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, dict):
        return {str(key): to_json(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [to_json(value) for value in record]
    return record


def from_json(cls: type[T], obj: Any, *, file: str | Path | None = None) -> T:
    """Build a record of type `cls` from plain JSON values.

    Raises:
        RecordError: unknown or missing field, wrong type, or a `schema` number other than the class's own.
    """
    return typing.cast("T", _decode(cls, obj, "", file))


def read(cls: type[T], path: Path) -> T:
    """Read a record from a JSON file; see `from_json`."""
    return from_json(cls, canonical.load_json(path), file=path)


def write(path: Path, record: Any) -> None:
    """Write a record as indented JSON, atomically. NaN and Infinity are refused (ValueError)."""
    import json

    write_atomic(path, json.dumps(to_json(record), indent=1, allow_nan=False, ensure_ascii=True) + "\n")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _fail(message: str, field: str, file: str | Path | None) -> typing.NoReturn:
    raise RecordError(message, file=file, field=field or None)


def _decode(hint: Any, obj: Any, field: str, file: str | Path | None) -> Any:
    if hint is Any:
        return obj
    if dataclasses.is_dataclass(hint):
        return _decode_record(typing.cast("type", hint), obj, field, file)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if obj not in args:
            _fail(f"is {obj!r}; must be one of {', '.join(map(repr, args))}", field, file)
        return obj
    if origin in (typing.Union, types.UnionType):
        return _decode_union(args, obj, field, file)
    if origin in (list, tuple):
        if not isinstance(obj, list):
            _fail(f"must be a list, not {_name(obj)}", field, file)
        items = [_decode(args[0], item, f"{field}[{i}]", file) for i, item in enumerate(obj)]
        return tuple(items) if origin is tuple else items
    if origin is dict:
        if not isinstance(obj, dict):
            _fail(f"must be an object, not {_name(obj)}", field, file)
        return {key: _decode(args[1], value, f"{field}.{key}", file) for key, value in obj.items()}
    return _decode_scalar(hint, obj, field, file)


def _decode_union(args: tuple[Any, ...], obj: Any, field: str, file: str | Path | None) -> Any:
    if obj is None and type(None) in args:
        return None
    rest = [arg for arg in args if arg is not type(None)]
    for arg in rest[:-1]:
        try:
            return _decode(arg, obj, field, file)
        except UsageError:
            continue
    return _decode(rest[-1], obj, field, file)


def _decode_scalar(hint: Any, obj: Any, field: str, file: str | Path | None) -> Any:
    if hint is float and isinstance(obj, int | float) and not isinstance(obj, bool):
        try:
            value = float(obj)
        except OverflowError:  # an integer beyond any float
            value = math.inf
        if not math.isfinite(value):
            _fail(f"is {value}; must be finite", field, file)
        return value
    if type(obj) is not hint:
        _fail(f"must be {hint.__name__}, not {_name(obj)}", field, file)
    if hint is int and not -_MOST_WHOLE <= obj < _MOST_WHOLE:
        _fail("is no number of 64 bits", field, file)
    return obj


def _decode_record(cls: type, obj: Any, field: str, file: str | Path | None) -> Any:
    if not isinstance(obj, dict):
        _fail(f"must be an object, not {_name(obj)}", field, file)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    schema = fields.get("schema")
    if schema is not None and obj.get("schema") != schema.default:
        _fail(f"schema {obj.get('schema')!r} is not {schema.default}, the one this version reads", field, file)
    if unknown := sorted(set(obj) - set(fields)):
        _fail(f"unknown field {unknown[0]!r} in {cls.__name__}", field, file)
    values: dict[str, Any] = {}
    for name, hint in _hints(cls).items():
        path = f"{field}.{name}" if field else name
        if name in obj:
            values[name] = _decode(hint, obj[name], path, file)
        elif fields[name].default is dataclasses.MISSING and fields[name].default_factory is dataclasses.MISSING:
            _fail(f"is missing from {cls.__name__}", path, file)
    return cls(**values)


def _name(obj: Any) -> str:
    return "null" if obj is None else type(obj).__name__
