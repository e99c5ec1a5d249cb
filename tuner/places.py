"""What a command is going to write, and where: what cannot be written is refused before it works, with what to do."""

from __future__ import annotations

import os
from pathlib import Path

from moegate.errors import UsageError
from moegate.paths import ensure_writable

__all__ = [
    "CACHE",
    "CHILDREN",
    "CONFIGS",
    "DENSE",
    "JOURNAL",
    "VLLM",
    "ensure_apart",
    "ensure_place",
    "ensure_workplace",
]

JOURNAL = "journal"
CACHE = "cache"
CHILDREN = "children"
"""What a tuning keeps in its folder: outcomes, compiled kernels, and the logs of its children."""

CONFIGS = "configs"
VLLM = "vllm"
DENSE = "dense"
"""What it writes there: SGLang's spelling by version of Triton, vLLM's flat, and files of ops of one kernel."""

_TAKEN = frozenset({JOURNAL, CACHE, CHILDREN, CONFIGS, VLLM, DENSE})


def ensure_place(path: Path, field: str = "--out") -> Path:
    """Return `path` where a file can be written; `field` is the option that leads there.

    Raises:
        UsageError: a folder, a device or a pipe is there, its folder is none or takes no files, or nothing can have
            that name.
    """
    return ensure_writable(path, field)


def ensure_workplace(out: Path) -> None:
    """Refuse a folder in which no tuning can work: where its journal, its children's logs or its cache cannot lie.

    Raises:
        UsageError: naming what is in the way.
    """
    if os.pathsep in os.path.realpath(out):
        raise UsageError(f"a name with {os.pathsep!r} cannot be searched by children", file=out, field="--out",
                         fix="name another place")  # fmt: skip
    ensure_place(out / JOURNAL)
    for folder in (CACHE, CHILDREN):
        for path in (out / folder / "name.log", *(out / folder).glob("*.log")):
            ensure_place(path)


def ensure_apart(result: Path, out: Path) -> None:
    """Refuse a record (`--result`) that would be in the way of what a tuning writes into its folder.

    Raises:
        UsageError: the record's name is that of the folder, lies above it, or among the tuning's own files.
    """
    record, folder = Path(os.path.realpath(result)), Path(os.path.realpath(out))
    wrong = None
    if folder.is_relative_to(record):
        wrong = "is where the folder of --out goes, not the name of a file"
    elif record.is_relative_to(folder) and record.relative_to(folder).parts[0] in _TAKEN:
        wrong = "lies among the files of the tuning itself"
    if wrong is not None:
        raise UsageError(wrong, file=result, field="--result", fix=str(out / "result.json"))
