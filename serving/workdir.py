"""The working folder of a launch: gone when the launch ends, and gone with the next launch where it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["owned", "sweep", "work_folder"]

PREFIX = "moegate-serve-"
_UNBORN = "moegate-serving-"
_OWNER = ".owner"


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """A new folder among the temporary files, removed at the end; first removes those of launches that were killed.

    Its owner holds a lock on a file in it, which the kernel gives up for whoever dies. It gets its name only once it is
    locked, so that another launch never takes one that is being made for a dead one.
    """
    root = Path(tempfile.gettempdir())
    sweep(root)
    unborn = Path(tempfile.mkdtemp(prefix=_UNBORN, dir=root))
    lock = os.open(unborn / _OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = unborn.rename(root / f"{PREFIX}{unborn.name.removeprefix(_UNBORN)}")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def sweep(root: Path) -> int:
    """Remove the folders of launches that are not there any more; returns how many."""
    gone = 0
    for folder in root.glob(f"{PREFIX}*"):
        with _taken(folder) as taken:
            if taken:
                shutil.rmtree(folder, ignore_errors=True)
                gone += 1
    return gone


def owned(folder: Path) -> bool:
    """Whether the launch of this working folder is alive, on this host."""
    with _taken(folder) as taken:
        return taken is False


@contextlib.contextmanager
def _taken(folder: Path) -> Iterator[bool | None]:
    """Hold the folder of a launch that has ended: yields False where it is alive, None where there is no such folder.

    None too for another user's, another program's, and one that is just being removed.
    """
    try:
        lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield None
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)
