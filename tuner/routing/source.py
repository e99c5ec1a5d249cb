"""Where a routing comes from: a kind that is made up, or a folder of recordings. Light: the commands ask it first."""

from __future__ import annotations

import re
from pathlib import Path

from moegate.errors import UsageError

__all__ = ["KINDS", "recorded_files", "source_of"]

KINDS: dict[str, float] = {"uniform": 0.0, "skewed": 0.6}
"""Kinds that are made up, with the spread of the experts' popularity in units of a token's own preference."""

_NAME = re.compile(r"topk_ids_layer(\d{1,5})_idx(\d{1,5})\.(npy|safetensors|pt)")


def source_of(text: str) -> str:
    """What `--routing` says, such that a process in another folder understands it: a kind, or an absolute folder.

    Raises:
        UsageError: neither a kind nor a folder with recorded routing.
    """
    if text in KINDS:
        return text
    folder = Path(text).absolute()
    if not folder.is_dir():
        raise UsageError("no such folder", file=text, field="--routing",
                         fix=f"{', '.join(KINDS)} or a folder of recorded routing")  # fmt: skip
    recorded_files(folder)
    return str(folder)


def recorded_files(folder: Path) -> dict[tuple[int, int], Path]:
    """The files of a recording by layer and snapshot.

    Raises:
        UsageError: the folder holds none, one that is empty or no file, or two of the same layer and snapshot.
    """
    files: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is not None:
            if not path.is_file():  # a pipe would be waited for
                raise UsageError("is no regular file", file=path)
            if not path.stat().st_size:
                raise UsageError("is empty: no routing was recorded", file=path)
            place = int(match[1]), int(match[2])
            if place in files:
                raise UsageError(f"is layer {place[0]}, snapshot {place[1]} as {files[place].name} is", file=path,
                                 fix="keep one of the two")  # fmt: skip
            files[place] = path
    if not files:
        raise UsageError(
            "holds no recorded routing",
            file=folder,
            fix="files named topk_ids_layer<L>_idx<S>.npy, .safetensors or .pt",
        )
    return files
