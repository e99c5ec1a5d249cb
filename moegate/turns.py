"""Launches that are up at the same time take turns: marks in a folder that a scheduler and one load client share.

Each mark is an empty file of this folder, so it works from a container without network as well as from a process:

| mark | set by | when |
|---|---|---|
| `ready` | client | its server answers |
| `go-N` | scheduler | round N is its turn, from 0; every other client is quiet |
| `done-N` | client | its load of round N is over |
| `end` | scheduler | everybody has had all rounds: account for it, and end |
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["END", "FOLDER", "READY", "ROUNDS", "Marks", "done", "go", "rounds_of"]

FOLDER = "turns"
"""Where a launch's marks are, in its own folder."""

READY = "ready"
END = "end"
ROUNDS = 2
"""Loads of each launch in a pair: two, so that a drift within the pair cancels (A B B A)."""

_POLL_S = 0.01


def go(number: int) -> str:
    """The mark that round `number` is this launch's turn."""
    return f"go-{number}"


def done(number: int) -> str:
    """The mark that this launch's load of round `number` is over."""
    return f"done-{number}"


def rounds_of(launches: Sequence[int], rounds: int) -> list[tuple[int, int]]:
    """(launch, round) in order: there in even rounds, back in odd ones."""
    return [
        (launch, number)
        for number in range(rounds)
        for launch in (launches if number % 2 == 0 else list(reversed(launches)))
    ]


class Marks:
    """The marks of one launch. `folder` is made where it is missing.

    The folder is opened once and links in it are not followed: a launch may write there, and whoever schedules it, with
    other rights, must not be led elsewhere by what it puts there meanwhile.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def set(self, name: str) -> None:
        """Set a mark."""
        flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(name, flags, 0o644, dir_fd=self._handle))

    def has(self, name: str) -> bool:
        """Whether a mark is set."""
        try:
            return stat.S_ISREG(os.stat(name, dir_fd=self._handle, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False

    def wait(self, name: str) -> None:
        """Wait for a mark, for ever: whoever scheduled this launch ends it at its deadline."""
        while not self.has(name):
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._handle)
