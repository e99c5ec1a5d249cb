"""Points at which an orchestrator can be hit: every journal write, every rename, every file on its way to a rename.

Nothing of this is in the product. A forked orchestrator calls `arm`, which puts itself between the product and the
operating system, counts the points as they are passed, and at the chosen one does what the fault says:

| action | what happens there |
|---|---|
| `kill` | SIGKILL to itself; where a write is torn, half of it is on the disk |
| `full` | from here on each write and each flush ends with ENOSPC, half of a torn write having got through |
| `clock` | the wall clock jumps by a day or an hour, back or forth |
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

JUMPS_S = (86_400.0, -86_400.0, 3_600.0, -3_600.0)


@dataclass(frozen=True)
class Hit:
    """What to do at which point. `at` counts from 0 over all points, or over those with this name; None never comes."""

    action: str = "kill"
    at: int | None = None
    name: str | None = None


class Points:
    """The points that one orchestrator has passed."""

    def __init__(self, hit: Hit, record: Path) -> None:
        self.count = 0
        self.names: Counter[str] = Counter()
        self.full = False
        self._hit = hit
        self._record = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._turn = threading.RLock()
        self._write, self._fsync = os.write, os.fsync

    def passed(self, name: str, torn: Callable[[], object] | None = None) -> None:
        """Count one point; act where it is the chosen one. torn: leaves half of the work on the disk."""
        with self._turn:
            seen = self.count if self._hit.name is None else self.names[name]
            chosen = seen == self._hit.at and self._hit.name in (None, name)
            self.count += 1
            self.names[name] += 1
            if not chosen:
                return
            self._write(self._record, f"{self._hit.action} {name}\n".encode())
            if self._hit.action == "clock":
                _jump(JUMPS_S[self.count % len(JUMPS_S)])
                return
            if torn is not None:
                torn()
            if self._hit.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            self.full = True

    def room(self) -> None:
        """Fail as a full disk does, once it is full."""
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def finish(self) -> None:
        """Write down how many points there were, in all and by name."""
        lines = [f"count {self.count}", *(f"name {times} {name}" for name, times in self.names.items())]
        self._write(self._record, ("\n".join(lines) + "\n").encode())


def arm(hit: Hit, record: Path) -> Points:
    """Put the points into this process; `record` gets a line for what happened."""
    points = Points(hit, record)
    _around_writes(points)
    _around_flushes(points)
    for name in ("rename", "replace"):
        setattr(os, name, _around_rename(points, getattr(os, name)))
    return points


def _of(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def _around_writes(points: Points) -> None:
    write = os.write

    def hooked(descriptor: int, data: Any) -> int:
        if _of(descriptor).name != "journal":
            return write(descriptor, data)
        kind = _kind(bytes(data))
        points.passed(f"journal {kind}: before")
        points.passed(f"journal {kind}: torn", lambda: write(descriptor, bytes(data)[: len(data) // 2]))
        points.room()
        done = write(descriptor, data)
        points.passed(f"journal {kind}: written")
        return done

    os.write = hooked


def _around_flushes(points: Points) -> None:
    fsync = os.fsync

    def hooked(descriptor: int) -> None:
        path = _of(descriptor)
        if path.suffix == ".tmp":
            half = path.stat().st_size // 2
            points.passed(f"file {_name(path)}: torn", lambda: os.ftruncate(descriptor, half))
            points.room()
        fsync(descriptor)
        if path.name == "journal":
            points.passed("journal: flushed")

    os.fsync = hooked


def _around_rename(points: Points, rename: Callable[..., None]) -> Callable[..., None]:
    def hooked(source: Any, target: Any, **options: Any) -> None:
        name = _name(Path(target))
        points.passed(f"rename {name}: before")
        rename(source, target, **options)
        points.passed(f"rename {name}: after")

    return hooked


def _kind(line: bytes) -> str:
    """The kind of the entry that a journal line is; its data may have a field of that name too."""
    return str(json.loads(line)["kind"])


def _name(path: Path) -> str:
    """A file by what it is for, not by whose it is: `configs/tune-0123` is `configs`."""
    if path.suffix == ".tmp":
        return path.name[1:].rsplit(".", 2)[0]
    return path.parent.name if path.parent.name == "configs" else path.name


def _jump(seconds: float) -> None:
    """Move the wall clock of this process; monotonic time goes on as it does in the real case."""
    real = time.time
    time.time = lambda: real() + seconds

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Shifted:
            return super().now(tz) + timedelta(seconds=seconds)

    for name, module in list(sys.modules.items()):
        if name.startswith(("moegate", "orchestrator", "reports")) and getattr(module, "datetime", None) is datetime:
            module.datetime = Shifted  # type: ignore[attr-defined]
