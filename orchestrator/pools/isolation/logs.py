"""Follow a container's output into files, bounded, without ever deciding anything by it.

A log stream that is silent for long, or whose daemon restarts, can end early or never. What happened to a container
is therefore read from its inspected state alone; here only text is copied. Lines can be missing or doubled where the
daemon turned its own log files over, which it does for logs far over the limit only.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

from moegate.spawn import TRUNCATED
from orchestrator import daemon

__all__ = ["Follower"]

_JOIN_S = 5.0
_TAIL_LINES = 200


class Follower:
    """Copies one stream (`stdout` or `stderr`) of a started container to a file in a thread of its own."""

    def __init__(self, container: str, stream: str, path: Path, limit: int) -> None:
        self._container, self._stream, self._path, self._limit = container, stream, path, limit
        self._source: Any = None
        self._broken = False
        self.truncated = False
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._start = path.stat().st_size  # several launches may append to one file; the limit is the file's
        self._thread = threading.Thread(target=self._work, name=f"moegate-{stream}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the end of the stream of a container that has ended; read what is missing if it broke."""
        self._thread.join(_JOIN_S)
        if self._thread.is_alive() and self._source is not None:
            with contextlib.suppress(Exception):
                self._source.close()
            self._thread.join(_JOIN_S)
            self._broken = True
        with contextlib.suppress(Exception):  # the daemon may be gone; what was copied stays
            if self._broken:
                self._again()
            elif not self.truncated:
                self._complete()

    def _work(self) -> None:
        try:
            self._copy(follow=True)
        except Exception:
            # Any failure here is the stream's, never the launch's: the text is read again at the end.
            self._broken = True

    def _again(self) -> None:
        os.truncate(self._path, self._start)
        self.truncated = False
        self._copy(follow=False)

    def _complete(self) -> None:
        """Append the end of the log where following lost it, as it can when the daemon turns its files over."""
        client = daemon.connect(timeout_s=30.0)
        try:
            options = {"follow": False, "stream": False, "tail": _TAIL_LINES, **self._wanted()}
            end: bytes = client.api.logs(self._container, **options)
        finally:
            client.close()
        have = self._path.read_bytes()[self._start :]
        if have.endswith(end):
            return
        known = next((n for n in range(min(len(have), len(end)), 0, -1) if have.endswith(end[:n])), 0)
        with self._path.open("ab") as sink:
            sink.write(end[known:][: max(self._limit - self._start - len(have), 0)])

    def _wanted(self) -> dict[str, bool]:
        return {"stdout": self._stream == "stdout", "stderr": self._stream == "stderr"}

    def _copy(self, *, follow: bool) -> None:
        client = daemon.connect(timeout_s=None if follow else 30.0)
        try:
            self._source = client.api.logs(self._container, follow=follow, stream=True, **self._wanted())
            size = self._start
            with self._path.open("ab", buffering=0) as sink:
                for chunk in self._source:
                    room = max(self._limit - size, 0)
                    size += len(chunk)
                    sink.write(chunk[:room])
                    if len(chunk) > room and not self.truncated:
                        self.truncated = True
                        sink.write(TRUNCATED)
        finally:
            if self._source is not None:
                with contextlib.suppress(Exception):  # a stream that is over may refuse to be closed
                    self._source.close()
            client.close()
