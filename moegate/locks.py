"""Locks that die with their holder: a file under `flock`, and the host-wide lock of one physical device."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Self

from moegate.errors import InfraError

__all__ = ["FileLock", "Held", "device_lock", "file_stem", "holder_of", "lock_directory", "open_to_all", "spoken"]


_SINCE = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
"""When this process began: the same for all that it holds, so that who waits for it is told one thing, once."""


class Held(InfraError):
    """The lock is held by another; `holder` is what it wrote about itself."""

    def __init__(self, path: Path, holder: str) -> None:
        self.holder = holder
        super().__init__(f"{path} is held by {spoken(holder)}")


class FileLock:
    """An exclusive `flock` on a file, taken at once or not at all.

    The descriptor is not inherited by children, so that a child that outlives its parent does not keep the lock.
    """

    def __init__(self, path: Path, shared: bool = False, run: str = "") -> None:
        """What to lock.

        shared: the lock is one for all users of the host, whoever made its file, and its folder is open to all.
        run: the run directory that it is taken for, told to whoever finds it held.
        """
        self.path = path
        self.shared = shared
        self.run = run
        self._stream = -1

    def acquire(self) -> Self:
        """Take the lock. Raises Held where somebody has it and InfraError where the file cannot be opened."""
        try:
            if self.shared:
                open_to_all(self.path.parent)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            stream = self._open()
        except OSError as error:
            raise InfraError(f"{self.path}: cannot open the lock: {error.strerror}") from None
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(stream, 4096, 0).decode(errors="replace").strip() or "another process"
            os.close(stream)
            raise Held(self.path, holder) from None
        self._stream = stream
        if fcntl.fcntl(stream, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
                os.ftruncate(stream, 0)
                told = {"pid": os.getpid(), "since": _SINCE, **({"run": self.run} if self.run else {})}
                os.pwrite(stream, json.dumps(told).encode(), 0)
        return self

    def _open(self) -> int:
        """Open the file, made where it is missing; one that another user made is locked without being written.

        O_CREAT only where there is no file: in a folder open to all, Linux refuses it for another user's file.
        """
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            try:
                return os.open(self.path, os.O_RDWR | flags)
            except PermissionError:
                return os.open(self.path, os.O_RDONLY | flags)
            except FileNotFoundError:
                try:
                    stream = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666)
                except FileExistsError:  # another was quicker
                    continue
                if self.shared:
                    os.fchmod(stream, 0o666)  # whatever the umask is
                return stream

    def release(self) -> None:
        """Give the lock back; the file stays, because removing it would let two holders in."""
        if self._stream >= 0:
            os.close(self._stream)
            self._stream = -1

    def __enter__(self) -> Self:
        return self if self._stream >= 0 else self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def holder_of(path: Path) -> str | None:
    """Return what the holder of a lock file wrote about itself; None where nobody holds it, or it is not there."""
    try:
        # Without blocking: what lies there under that name may be a pipe.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return stream.read(4096).decode(errors="replace").strip() or "another process"
    except OSError:
        return None
    return None


def spoken(holder: str) -> str:
    """Say in words what a holder wrote about itself: its process, since when that runs, and for which run."""
    try:
        told = json.loads(holder)
        words = f"process {int(told['pid'])}"
    except (ValueError, TypeError, KeyError):  # a word for people already, or an older version's
        return holder
    since, run = told.get("since"), told.get("run")
    words += f", running since {since}" if since else ""
    return words + (f", for the run {run}" if run else "")


def open_to_all(folder: Path) -> None:
    """Make a folder in which every user of the host can add files and remove their own. Raises OSError."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return
    folder.chmod(0o1777)


def lock_directory() -> Path:
    """Return the folder of host-wide locks, shared by all users of the host (`MOEGATE_LOCK_DIR` overrides)."""
    chosen = os.environ.get("MOEGATE_LOCK_DIR")
    if chosen:
        return Path(chosen)
    shared = Path("/run/lock")
    return (shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())) / "moegate"


def device_lock(identity: str, run: str = "") -> FileLock:
    """Return the lock of one physical device, named by its UUID, PCI address or CPU slot; `run` as of `FileLock`."""
    return FileLock(lock_directory() / f"{file_stem(identity)}.lock", shared=True, run=run)


def file_stem(identity: str) -> str:
    """Return a device's identity as the name of a file may hold it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", identity)[:200]
