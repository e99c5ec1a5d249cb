"""An append-only record of what happened, written before it is acted upon.

One JSON line per entry, `{"seq": n, "kind": ..., "time": ..., "data": {...}, "sum": ...}`, where `sum` is the first 16
hex digits of the sha256 of the line without it. A line is written by one `write` and fsynced (a `lazy` journal leaves
that to the system and syncs when it is closed: it outlives its process, not the machine). A torn last line (a
crash while writing) is cut off at the next opening; damage anywhere else is refused with the entry's number, because
a history with a hole cannot be resumed from.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from moegate import canonical
from moegate.errors import InfraError, RecordError
from moegate.paths import fsync_directory

__all__ = ["Entry", "Journal", "read"]

SCHEMA = 1
MAX_BYTES = 1 << 30
"""A journal beyond this is none of ours: 100,000 cells with all their launches need a tenth of it."""
_HEADER = "journal"
_BEGIN = b'{"data":{"purpose":'


@dataclass(frozen=True)
class Entry:
    """One thing that happened. `seq` orders; `time` (UTC, ISO 8601) is for people only."""

    seq: int
    kind: str
    time: str
    data: dict[str, Any]


class Journal:
    """A journal open for appending, from any thread.

    One process at a time writes: the file is held by `flock`, which dies with its holder.
    """

    def __init__(self, path: Path, stream: int, entries: list[Entry], lazy: bool = False) -> None:
        self.path = path
        self.entries = entries
        self._lazy = lazy
        self._stream = stream
        self._turn = threading.Lock()

    @classmethod
    def open(cls, path: Path, *, purpose: str = "run", lazy: bool = False) -> Journal:
        """Open or create a journal, cut a torn tail, and take the writer's lock.

        `lazy`: for outcomes that come by the hundred a second and can be had again.

        Raises:
            InfraError: another process is writing it, or the file system refuses.
            RecordError: it is damaged, no file, of another purpose, or of another schema.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            stream = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InfraError(f"{path}: cannot open the journal: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(stream).st_mode):  # a pipe would be waited for, a device has no end
            os.close(stream)
            raise RecordError("is not a regular file", file=path)
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(stream)
            raise InfraError(
                f"{path}: another process is writing this journal (fix: wait for its end, then the same command goes "
                "on; or name another --out)"
            ) from None
        try:
            entries, good = _parse(path, purpose)
            if good < path.stat().st_size:
                os.ftruncate(stream, good)
                os.fsync(stream)
            journal = cls(path, stream, entries, lazy)
            if not entries:
                journal.append(_HEADER, schema=SCHEMA, purpose=purpose)
                fsync_directory(path.parent)
        except BaseException:
            os.close(stream)
            raise
        return journal

    def append(self, kind: str, /, **data: Any) -> int:
        """Write one entry durably and return its number.

        Raises:
            InfraError: the disk refuses; what was written of the entry is taken back.
        """
        with self._turn:
            entry = Entry(len(self.entries), kind, datetime.now(UTC).isoformat(timespec="milliseconds"), data)
            line = _line(entry)
            size = os.fstat(self._stream).st_size
            try:
                if os.write(self._stream, line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if not self._lazy:
                    os.fsync(self._stream)
            except OSError as error:
                os.ftruncate(self._stream, size)
                raise InfraError(f"{self.path}: cannot write the journal: {error.strerror}") from None
            # What a later reader will see, not what the caller may still change.
            self.entries.append(Entry(entry.seq, kind, entry.time, json.loads(line)["data"]))
            return entry.seq

    def of(self, *kinds: str) -> Iterator[Entry]:
        """Yield the entries of these kinds, in order."""
        return (entry for entry in self.entries if entry.kind in kinds)

    def close(self) -> None:
        """Release the file and its lock."""
        if self._stream >= 0:
            if self._lazy:
                os.fsync(self._stream)
            os.close(self._stream)
            self._stream = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path, *, purpose: str = "run") -> list[Entry]:
    """Read a journal without touching it; a torn last line is left out. Raises RecordError as `Journal.open`."""
    if not path.is_file():
        raise RecordError("no such journal", file=path)
    return _parse(path, purpose)[0]


def _line(entry: Entry) -> bytes:
    body = {"seq": entry.seq, "kind": entry.kind, "time": entry.time, "data": entry.data}
    text = canonical.dumps(body)
    return (text[:-1] + f',"sum":"{_sum(text)}"}}\n').encode()


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _parse(path: Path, purpose: str) -> tuple[list[Entry], int]:
    """Return the entries and the number of bytes that hold them."""
    entries: list[Entry] = []
    good = 0
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > MAX_BYTES:
            raise RecordError(f"is {size} bytes; a journal has at most {MAX_BYTES}", file=path)
        lines = stream.read().split(b"\n")
    tail = lines.pop()  # what follows the last newline: empty, or torn
    for number, raw in enumerate(lines):
        entry = _decode(raw)
        if entry is None or entry.seq != number:
            if number == len(lines) - 1 and not tail:
                break  # a last line that was never finished, such as one of NUL bytes after a power cut
            raise RecordError(f"entry {number} is damaged", file=path, line=number + 1, fix="restore it from a copy")
        entries.append(entry)
        good += len(raw) + 1
    if entries:
        head = entries[0]
        if head.kind != _HEADER or head.data.get("purpose") != purpose:
            raise RecordError(f"is not a journal of a {purpose}", file=path, line=1)
        if head.data.get("schema") != SCHEMA:
            raise RecordError(f"schema {head.data.get('schema')!r} is not {SCHEMA}", file=path, line=1)
    elif not _begins((lines[0] if lines else tail).strip(b"\0")):
        raise RecordError("is somebody's file, not the beginning of a journal", file=path, fix="move it away")
    return entries, good


def _begins(text: bytes) -> bool:
    """Whether a first line that was never finished can have been a journal's; what cannot is not ours to cut off."""
    return text.startswith(_BEGIN) or _BEGIN.startswith(text)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _decode(raw: bytes) -> Entry | None:
    text = raw.decode("ascii", errors="replace")
    marker = text.rfind(',"sum":"')
    if marker < 0 or not text.endswith('"}') or text[marker + 8 : -2] != _sum(text[:marker] + "}"):
        return None
    try:
        body = json.loads(text[:marker] + "}", parse_constant=_refuse, parse_float=_finite)
        entry = Entry(body["seq"], body["kind"], body["time"], body["data"])
    except (ValueError, KeyError, RecursionError):  # the sum is right and yet no program of ours wrote it
        return None
    found = (type(entry.seq), type(entry.kind), type(entry.time), type(entry.data))
    return entry if found == (int, str, str, dict) else None
