"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

__all__ = ["die_with_parent", "resident_bytes"]

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when `parent` ends; end at once where it already has."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def resident_bytes() -> int:
    """Memory that this process holds now, in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
