"""What a launch needs before it starts: inputs that are there and whole, and room for what a container writes.

A checkpoint that is half copied, or a disk that fills up in the middle, costs a launch and says something confusing;
looked at beforehand it costs milliseconds and is said in words. Nothing is read here but an index of file names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from moegate import canonical
from moegate.errors import MoegateError
from moegate.paths import exists, is_file, is_folder

__all__ = ["FREE_BYTES", "no_room", "unreadable"]

FREE_BYTES = 2 << 30
"""Free bytes that a daemon's data folder needs for one launch: compiled kernels, logs, what an engine unpacks."""

_INDEX = "*.safetensors.index.json"


def unreadable(paths: Iterable[Path]) -> str | None:
    """Return why one of these inputs cannot be used on this host, or None."""
    for path in paths:
        if not exists(path):
            return f"{path} is not on this host (fix: put it there, or correct its path in the matrix)"
        if not os.access(path, os.R_OK | (os.X_OK if is_folder(path) else 0)):
            return f"{path} cannot be read by this user"
        reason = _incomplete(path) if is_folder(path) else None
        if reason is not None:
            return reason
    return None


def _incomplete(folder: Path) -> str | None:
    """Why the checkpoint in a folder is not whole: an index that names files which are not there, or are empty."""
    for index in sorted(folder.glob(_INDEX)):
        try:
            names = canonical.load_json(index)["weight_map"].values()
            wanted = sorted({str(name) for name in names})
        except (MoegateError, KeyError, TypeError, AttributeError):
            return f"{index} is not an index of weights (fix: copy the checkpoint again)"
        lost = [name for name in wanted if not is_file(folder / name) or not (folder / name).stat().st_size]
        if lost:
            return (
                f"the weights in {folder} are incomplete: {len(lost)} of {len(wanted)} files are missing or empty, "
                f"first {lost[0][:100]} (fix: copy the checkpoint again)"
            )
    return None


def no_room(folder: str, need: int = FREE_BYTES) -> str | None:
    """Return why a daemon's data folder has no room for a launch; None where it has, or lies on another host."""
    path = Path(folder)
    if not folder or not is_folder(path):
        return None
    free = shutil.disk_usage(path).free
    if free >= need:
        return None
    return f"{free >> 20} MiB are free in {folder}, a launch needs {need >> 20} (fix: orchestrator prune)"
