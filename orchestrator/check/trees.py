"""Config folders inside a tree: ours, SGLang's or vLLM's as it is, or a plain folder of files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moegate.configs import parse_directory, parse_name
from moegate.errors import UsageError
from moegate.paths import is_folder
from orchestrator.check.optable import op_of

_SKIP = frozenset({".git", ".venv", "node_modules", "__pycache__", "build", "dist"})
_MAX_DEPTH = 10
_MARKS = ("E=", "N=")
LOOKED_FOR = (
    "E=..,N=..,device_name=..[..].json or N=..,K=..,device_name=..[..].json, in it, in triton_X_Y_Z/, or in such a "
    "folder further down"
)
"""What `find_folders` seeks, in words."""


@dataclass(frozen=True)
class ConfigFolder:
    """One folder that a lookup may be pointed at. `flat`: files lie in it directly, without Triton directories."""

    path: Path
    flat: bool


@dataclass(frozen=True)
class Entry:
    """One file or directory of a config folder. `directory` is empty for files of a flat folder."""

    kind: Literal["file", "bad-directory"]
    path: Path
    directory: str
    name: str


def find_folders(root: Path) -> tuple[ConfigFolder, ...]:
    """The config folders at or below `root`: itself or `configs/`, and `dense/`; or wherever a repository has them.

    Raises:
        UsageError: `root` is no folder.
    """
    if not is_folder(root):
        raise UsageError("is no folder", file=root, fix="name a folder of config files or a repository that holds some")
    dense = root / "dense"  # beside `configs/`, where the tuner writes a dense op's
    beside = [ConfigFolder(dense, True)] if is_folder(dense) and _kind(dense) == "flat" else []
    for folder in (root / "configs", root):
        if is_folder(folder) and (kind := _kind(folder)) is not None:
            return (ConfigFolder(folder, kind == "flat"), *beside)
    return tuple(_search(root, 0)) or (ConfigFolder(root, True),)


def moe_folder(root: Path, engine: str) -> Path:
    """The folder that the engine's fused-MoE lookup would be pointed at: with Triton directories, flat for vLLM.

    Raises:
        UsageError: `root` is no folder.
    """
    folders = find_folders(root)
    fit = [folder for folder in folders if folder.flat == (engine == "vllm") and _has_experts(folder)]
    return (fit or [folder for folder in folders if _has_experts(folder)] or list(folders))[0].path


def _has_experts(folder: ConfigFolder) -> bool:
    return not folder.flat or any(entry.name.startswith("E=") for entry in entries(folder))


def entries(folder: ConfigFolder) -> Iterator[Entry]:
    """What the rules look at in `folder`, sorted: config files, and directories whose names look like mistakes."""
    if folder.flat:
        for item in _scan(folder.path):
            if op_of(item.name) is not None:
                continue
            if _is_config(item) and (item.name.startswith(_MARKS) or "device_name=" in item.name):
                yield Entry("file", Path(item.path), "", item.name)
        return
    for item in _scan(folder.path):
        if not _is_dir(item):
            continue
        if parse_directory(item.name) is None and not _holds_configs(Path(item.path)):
            continue
        if not _plain_version(item.name):
            yield Entry("bad-directory", Path(item.path), item.name, item.name)
        for file in _scan(Path(item.path)):
            if _is_config(file):
                yield Entry("file", Path(file.path), item.name, file.name)


def op_files(root: Path) -> Iterator[tuple[str, Entry]]:
    """Files of ops that no engine looks up, each with its op: in `root` and its `dense/`, where the tuner writes."""
    for folder in (folder for folder in (root, root / "dense") if is_folder(folder)):
        for item in _scan(folder):
            if _is_config(item) and (op := op_of(item.name)) is not None:
                yield op, Entry("file", Path(item.path), "", item.name)


def files_below(root: Path) -> Iterator[Path]:
    """Every config file at or below `root` that the rules look at.

    Raises:
        UsageError: `root` is no folder.
    """
    for folder in find_folders(root):
        yield from (entry.path for entry in entries(folder) if entry.kind == "file")
    yield from (entry.path for _, entry in op_files(root))


def is_empty(root: Path) -> bool:
    """Whether no rule has anything to look at in `root`: no config file, and no directory that should hold some.

    Raises:
        UsageError: `root` is no folder.
    """
    return not any(any(entries(folder)) for folder in find_folders(root)) and not any(op_files(root))


def _plain_version(name: str) -> bool:
    """Whether some engine looks for exactly this directory: three numbers, nothing else."""
    return re.fullmatch(r"triton(_(0|[1-9][0-9]{0,5})){3}", name) is not None


def _holds_configs(folder: Path) -> bool:
    """Whether a directory is one of a tree's, whatever it is called: JSON under `triton...`, or config names."""
    names = [item.name for item in _scan(folder) if _is_config(item)]
    return (
        bool(names) if folder.name.lower().startswith("triton") else any(parse_name(name) is not None for name in names)
    )


def _kind(folder: Path, *, sure: bool = False) -> Literal["tree", "flat"] | None:
    """What a folder is; `sure` wants a file that is a config's by its name, as a search through a repository must."""
    items = _scan(folder)
    for item in items:
        if item.name.startswith("triton") and _is_dir(item) and _holds_configs(Path(item.path)):
            names = [file.name for file in _scan(Path(item.path))]
            if not sure or any(parse_name(name) is not None for name in names):
                return "tree"
    if any(item.name.startswith(_MARKS) and _is_config(item) for item in items):
        return "flat"
    return None


def _search(folder: Path, depth: int) -> Iterator[ConfigFolder]:
    if depth > _MAX_DEPTH:
        return
    kind = _kind(folder, sure=True)
    if kind is not None:
        yield ConfigFolder(folder, kind == "flat")
        return
    for item in _scan(folder):
        if item.is_dir(follow_symlinks=False) and item.name not in _SKIP:
            yield from _search(Path(item.path), depth + 1)


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda item: item.name)
    except OSError as error:
        raise UsageError(error.strerror or str(error), file=folder) from None


def _is_config(item: os.DirEntry[str]) -> bool:
    if not item.name.endswith(".json") or item.name.endswith(".provenance.json"):
        return False
    # Pipes and devices too: an engine that finds such a name opens it and waits.
    return _leads_to(item.is_file) or (not _is_dir(item) and _leads_to(Path(item.path).exists))


def _is_dir(item: os.DirEntry[str]) -> bool:
    return _leads_to(item.is_dir)


def _leads_to(question: Callable[[], bool]) -> bool:
    """The answer; no where a link leads in a circle or out of reach, as for one that leads nowhere."""
    try:
        return question()
    except OSError:
        return False
