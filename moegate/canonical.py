"""One spelling of JSON for hashing, and a strict reader for JSON that others wrote."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moegate.errors import UsageError

__all__ = [
    "digest",
    "dumps",
    "file_digest",
    "load_json",
    "loads_json",
    "read_file",
    "read_text",
    "tree_digest",
    "whole",
]

MAX_BYTES = 64 << 20
_CHUNK = 1 << 20
_MAX_DEPTH_HINT = "a file of ours is never nested this deeply"


def dumps(obj: Any) -> str:
    """Serialise to the canonical text: sorted keys, no spaces, ASCII only, no NaN or Infinity (ValueError)."""
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(obj: Any) -> str:
    """Return the sha256 (hex) of the canonical text of `obj`."""
    return hashlib.sha256(dumps(obj).encode()).hexdigest()


def file_digest(path: Path, most: int | None = None) -> str:
    """Return the sha256 (hex) of a file's bytes.

    most: raise UsageError for a file beyond so many bytes, before any is read (a sparse one has no end).
    """
    with path.open("rb") as stream:
        if most is not None and (size := os.fstat(stream.fileno()).st_size) > most:
            raise UsageError(f"is {size} bytes; at most {most} are read", file=path)
        return hashlib.file_digest(stream, "sha256").hexdigest()


def tree_digest(root: Path) -> str:
    """Return the sha256 (hex) over the relative names and contents of every regular file below `root`.

    A missing folder has the digest of an empty one. Links are not followed: their target text is hashed. What the
    interpreter leaves behind (`__pycache__`) does not count.
    """
    rows: list[tuple[str, str]] = []
    for path in sorted(root.rglob("*")) if root.is_dir() else ():
        name = path.relative_to(root).as_posix()
        if "__pycache__" in path.relative_to(root).parts:
            continue
        if path.is_symlink():
            rows.append((name, "link:" + str(path.readlink())))
        elif path.is_file():
            rows.append((name, file_digest(path)))
    return digest(rows)


def read_file(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read a file that somebody named; at most `most` bytes, and no pipe, which would never end.

    Raises:
        UsageError: it is not there, not readable, larger, not a regular file, or one of the kernel's that has no size
            and waits (/proc/kmsg) or has no end.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise UsageError(os.strerror(errno.EISDIR), file=path)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError("is not a regular file", file=path)
        if status.st_size > most:
            raise UsageError(f"is {status.st_size} bytes; at most {most} are read", file=path)
        content = _read_at_once(path, most + 1)
    except BlockingIOError:
        raise UsageError("has nothing to read yet: is it a file?", file=path) from None
    except OSError as error:
        raise UsageError(error.strerror or str(error), file=path) from None
    except ValueError as error:  # a NUL in the name
        raise UsageError(str(error), file=path) from None
    if len(content) > most:
        raise UsageError(f"holds more than {most} bytes, which is all that is read", file=path)
    return content


def _read_at_once(path: Path, most: int) -> bytes:
    """The first `most` bytes; BlockingIOError where one would have to wait for them."""
    stream = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        parts: list[bytes] = []
        left = most
        while left and (part := os.read(stream, min(left, _CHUNK))):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        os.close(stream)


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """As `read_file`, for UTF-8; UsageError for what is none."""
    try:
        return read_file(path, most).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"is not UTF-8: {error.reason} at byte {error.start}", file=path) from None


def load_json(path: Path) -> Any:
    """Read JSON that cannot lie: no duplicate keys, no NaN, no infinity however it is written, at most 64 MiB.

    Raises:
        UsageError: naming the file and, where one is known, the line.
    """
    return loads_json(read_text(path), file=path)


def loads_json(text: str, *, file: str | Path | None = None) -> Any:
    """Parse JSON text as `load_json` does; `file` is only named in errors."""

    def pairs(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in items:
            if key in out:
                raise UsageError(f"key {key!r} appears twice", file=file, line=_second_line(text, key))
            out[key] = value
        return out

    def constant(name: str) -> Any:
        raise UsageError(f"{name} is not a JSON number", file=file, line=_line_of(text, name))

    def number(digits: str) -> float:
        value = float(digits)
        if math.isinf(value):
            raise UsageError(f"{digits[:40]} is larger than any number", file=file, line=_line_of(text, digits))
        return value

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_float=number)
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {error.msg}", file=file, line=error.lineno) from None
    except RecursionError:
        raise UsageError("nested too deeply", file=file, fix=_MAX_DEPTH_HINT) from None
    except ValueError as error:  # an integer with more digits than Python converts
        raise UsageError(f"not JSON: {error}", file=file) from None


def _line_of(text: str, needle: str) -> int | None:
    at = text.find(needle)
    return None if at < 0 else text.count("\n", 0, at) + 1


def _second_line(text: str, key: str) -> int | None:
    hits = [match.start() for match in re.finditer(re.escape(json.dumps(key)) + r"\s*:", text)]
    return text.count("\n", 0, hits[1]) + 1 if len(hits) > 1 else None


def whole(text: str, low: int, high: int) -> int | None:
    """Read plain digits as a number from `low` to `high`, else None.

    `int` alone reads other scripts' digits and underscores, and refuses thousands of digits with an exception.
    """
    if not text.isascii() or not text.isdigit() or len(text.lstrip("0")) > len(str(high)):
        return None
    value = int(text.lstrip("0") or "0")
    return value if low <= value <= high else None
