"""Read a commit of a repository as data: what it says about its packages, and its files. Nothing of it is executed.

`git archive` and not `git worktree`: a work tree would run the repository's hooks and leave entries in its `.git`.
"""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
import tempfile
import threading
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from moegate import spawn
from moegate.errors import InfraError, UsageError

__all__ = ["PROJECT", "Layout", "layout_of", "unpack"]

PROJECT = "moegate"
MAX_ARCHIVE_BYTES = 256 << 20
_PACKAGE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_VERSION = re.compile(r"[0-9][A-Za-z0-9.!_-]{0,60}", re.ASCII)
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Layout:
    """What a commit's pyproject.toml says about its packages.

    packages: import name -> folder in the commit. data: package name or `*` -> globs of files beside the modules.
    """

    version: str
    packages: Mapping[str, str]
    data: Mapping[str, tuple[str, ...]]


def layout_of(root: Path, sha: str) -> Layout:
    """The layout of commit `sha` of the repository `root`.

    Raises:
        UsageError: it is not a commit of this project, or does not name its packages.
        InfraError: git cannot be asked.
    """
    try:
        text = _git(root, "cat-file", "blob", f"{sha}:pyproject.toml", limit=1 << 20).decode()
        project = tomllib.loads(text)
    except InfraError as error:
        raise UsageError(
            f"commit {sha[:12]} has no pyproject.toml at its root ({error})", fix="a commit of moegate"
        ) from None
    except (ValueError, RecursionError) as error:  # the first also for a number with thousands of digits
        raise UsageError(f"pyproject.toml of commit {sha[:12]} is not TOML: {error}") from None
    name, version = _get(project, "project", "name"), _get(project, "project", "version")
    if name != PROJECT:
        raise UsageError(
            f"commit {sha[:12]} is of {str(name)[:60]!r}", fix="`source` installs a commit of moegate: its kernels"
        )
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise UsageError(f"commit {sha[:12]} has no version that can be installed")
    folders = _get(project, "tool", "setuptools", "package-dir") or {}
    names = _get(project, "tool", "setuptools", "packages")
    if not isinstance(names, list) or not names or not isinstance(folders, dict):
        raise UsageError(f"commit {sha[:12]} does not list its packages in [tool.setuptools]")
    packages = {name: _folder(sha, name, folders) for name in names}
    data = _get(project, "tool", "setuptools", "package-data")
    globs = {str(key): _globs(sha, value) for key, value in (data if isinstance(data, dict) else {}).items()}
    return Layout(version, packages, globs)


def unpack(root: Path, sha: str, folders: Sequence[str], target: Path) -> None:
    """Unpack `folders` of commit `sha` of the repository `root` into `target`, which must not exist.

    Raises:
        InfraError: git refuses, the commit does not have them, or they are too large.
    """
    data = _git(root, "archive", "--format=tar", sha, "--", *folders, limit=MAX_ARCHIVE_BYTES)
    partial = target.with_name(f".{target.name}.partial")
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(partial, filter="data")
        partial.rename(target)
    except (OSError, tarfile.TarError) as error:
        raise InfraError(f"commit {sha[:12]} cannot be unpacked into {target}: {error}") from None


def _get(table: Any, *keys: str) -> Any:
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table


def _folder(sha: str, name: object, folders: Mapping[str, object]) -> str:
    """Where a package lies: its own entry, that of its nearest parent, or its name."""
    if not isinstance(name, str) or not _PACKAGE.fullmatch(name):
        raise UsageError(f"commit {sha[:12]}: {str(name)[:60]!r} is not the name of a package")
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        folder = folders.get(".".join(parts[:count]))
        if isinstance(folder, str):
            break
    else:
        folder, count = str(folders.get("", "")), 0
    path = PurePosixPath(folder, *parts[count:])
    if path.is_absolute() or ".." in path.parts or "\0" in folder:
        raise UsageError(f"commit {sha[:12]}: package {name} lies outside the repository")
    return str(path)


def _globs(sha: str, value: object) -> tuple[str, ...]:
    globs = value if isinstance(value, list) else [value]
    if any(isinstance(glob, str) and not PurePosixPath(glob).parts for glob in globs):
        raise UsageError(f"commit {sha[:12]}: package-data that names no file", fix='such as "*.json"')
    if not all(isinstance(glob, str) and glob and not glob.startswith("/") and ".." not in glob for glob in globs):
        raise UsageError(f"commit {sha[:12]}: package-data leads outside its package")
    if any("**" in str(glob) for glob in globs):  # several of them take for ever in a deep folder
        raise UsageError(f"commit {sha[:12]}: package-data with ** is not read", fix="name the folders")
    return tuple(map(str, globs))


def _git(root: Path, *argv: str, limit: int) -> bytes:
    """What git prints. Its own variables (GIT_DIR and the like) are not inherited."""
    words = ["git", "-C", str(root), *argv]
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, env=spawn.child_env()
            )
        except OSError as error:
            raise InfraError(f"git cannot be run: {error.strerror}") from None
        late = threading.Timer(_TIMEOUT_S, process.kill)
        late.start()
        with process:
            assert process.stdout is not None
            data = process.stdout.read(limit + 1)  # no more than that is ever held, whatever the commit has
            if len(data) > limit:
                process.kill()
        late.cancel()
        errors.seek(0)
        said = errors.read(300).decode(errors="replace").strip()
    if len(data) > limit:
        raise InfraError(f"git {argv[0]} of {root}: more than {limit >> 20} MiB")
    if process.returncode != 0:
        raise InfraError(f"git {argv[0]} of {root}: {said or f'exit {process.returncode}'}")
    return data
