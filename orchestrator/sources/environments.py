"""Environments of commits: made once per commit and interpreter, kept in a cache, and held while a run uses them.

    <cache>/<commit>-<digest>/      the environment: bin/python and the commit's packages
    <cache>/<commit>-<digest>.lock  held shared by every run that uses it, exclusively by who makes or removes it

Installing is laying out the files that the commit's pyproject.toml names, as its wheel would: no build back end of the
commit runs, neither here nor in a container, because who measures a pull request need not trust it with the host.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from moegate import canonical, kernels, paths
from moegate.errors import InfraError, UsageError
from orchestrator.pools.isolation import PYTHON, Isolation, LaunchResult
from orchestrator.sources import builder
from orchestrator.sources.commit import PROJECT, Layout, layout_of, unpack

__all__ = ["Environment", "Sources", "Start", "cache_root", "old_environments"]

_DONE = "moegate-source.json"
_PAUSE_S = 0.05

Start = Callable[[tuple[str, ...], Path, Sequence[Path]], LaunchResult]
"""Starts a command where the launches will run: (argv, folder that it may write, folders that it reads)."""


@dataclass(frozen=True)
class Environment:
    """An installed commit. kernel_hash: of its kernels, as launches report it, so that they can be believed."""

    sha: str
    root: Path
    kernel_hash: str

    @property
    def python(self) -> Path:
        """The interpreter that imports the commit's packages before all others."""
        return self.root / "bin" / "python"


def cache_root() -> Path:
    """Where environments are kept: of this user, on this host."""
    return paths.user_cache() / "sources"


class Sources:
    """The environments of one run, for a `with` block: after it others may remove them. Several threads may use it.

    Args:
        root: the repository that commits are read from.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._guard = threading.Lock()
        self._held: dict[str, tuple[int, Environment]] = {}

    def prepare(self, sha: str, isolation: Isolation, start: Start) -> Environment:
        """The environment of a commit for launches of `isolation`; made with `start` where the cache lacks it.

        Raises:
            InfraError: it cannot be made.
        """
        detail = {**isolation.detail, "kind": isolation.name, "prefix": sys.prefix, "builder": _program()}
        name = f"{sha}-{canonical.digest(detail)[:12]}"
        with self._guard:
            if name not in self._held:
                self._held[name] = self._found_or_made(sha, cache_root() / name, start)
            return self._held[name][1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._guard:
            for held, _ in self._held.values():
                os.close(held)
            self._held.clear()

    def _found_or_made(self, sha: str, target: Path, start: Start) -> tuple[int, Environment]:
        """The environment with a shared lock on it; an exclusive one is held only while it is made."""
        handle = -1
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            handle = _open_lock(target)
            fcntl.flock(handle, fcntl.LOCK_SH)
            while _kernel_hash(target) is None:
                if _is_ours_alone(handle):
                    self._make(sha, target, start)
                fcntl.flock(handle, fcntl.LOCK_SH)
            os.utime(target)
            kernel_hash = _kernel_hash(target)
            if kernel_hash is None:
                raise InfraError(f"{target / _DONE} cannot be read (fix: orchestrator prune)")
        except BaseException as error:
            if handle >= 0:
                os.close(handle)
            if isinstance(error, UsageError):
                raise InfraError(f"source {sha[:12]}: {error.message}") from None
            if isinstance(error, OSError):
                raise InfraError(f"{target}: {error.strerror or error}") from None
            raise
        return handle, Environment(sha, target, kernel_hash)

    def _make(self, sha: str, target: Path, start: Start) -> None:
        layout = layout_of(self._root, sha)
        scratch = target.with_name(f"{target.name}.partial")
        for path in (scratch, target):
            shutil.rmtree(path, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            tree, packages, made = scratch / "tree", scratch / "packages", scratch / "environment"
            unpack(self._root, sha, tuple(sorted(set(layout.packages.values()))), tree)
            lay_out(layout, sha, tree, packages)
            made.mkdir()
            done = start((PYTHON, "-P", "-c", _program(), str(made), str(packages)), made, (packages,))
            if done.returncode != 0 or not (made / "bin").is_dir():
                why = done.infra or ("no time was left" if done.timed_out else f"exit {done.returncode}")
                raise InfraError(f"source {sha[:12]} cannot be installed: {why} (see the attempt's stderr.log)")
            facts = {"commit": sha, "kernel_hash": kernels.code_hash(packages) or ""}
            (made / _DONE).write_text(json.dumps(facts), encoding="utf-8")
            made.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def lay_out(layout: Layout, sha: str, tree: Path, site: Path) -> None:
    """Put the packages of an unpacked commit where an installation has them, with the record of what they are.

    Only plain files are taken: a link could lead anywhere. Raises UsageError where a package is not there.
    """
    for name, folder in layout.packages.items():
        source, target = tree / folder, site.joinpath(*name.split("."))
        if not source.is_dir():
            raise UsageError(f"package {name} is not in {folder}")
        globs = ("*.py", *layout.data.get("*", ()), *layout.data.get(name, ()))
        for path in {path for glob in globs for path in source.glob(glob)}:
            if path.is_file() and not path.is_symlink():
                place = target / path.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, place)
    version = f"{layout.version.partition('+')[0]}+g{sha[:12]}"
    info = site / f"{PROJECT}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PROJECT}\nVersion: {version}\n", encoding="utf-8")
    (info / "INSTALLER").write_text(f"{PROJECT}\n", encoding="utf-8")


def old_environments(age_s: float, *, remove: bool) -> list[str]:
    """Environments that no run holds and none has used for `age_s` seconds; `remove` takes them away."""
    root = cache_root()
    out = []
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.is_symlink() or not folder.is_dir():
            continue
        handle = _unused(folder)
        if handle is None:
            continue
        # The lock's file stays: removing it would let two holders in.
        if time.time() - folder.stat().st_mtime >= age_s:
            if remove:
                shutil.rmtree(folder, ignore_errors=True)
            out.append(str(folder))
        os.close(handle)
    return out


def _kernel_hash(target: Path) -> str | None:
    """What an environment says of its kernels; None where it is not finished or its record is damaged (a power cut)."""
    try:
        about = canonical.load_json(target / _DONE)
    except UsageError:
        return None
    found = about.get("kernel_hash") if isinstance(about, dict) else None
    return found if isinstance(found, str) else None


def _program() -> str:
    return Path(builder.__file__).read_text(encoding="utf-8")


def _lock_file(target: Path) -> Path:
    return target.with_name(target.name.removesuffix(".partial") + ".lock")


def _open_lock(target: Path) -> int:
    return os.open(_lock_file(target), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _is_ours_alone(handle: int) -> bool:
    """Turn a shared lock into an exclusive one, or lose it.

    Not waited for: whoever else makes the environment goes on holding it, shared, for as long as a run lasts.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_PAUSE_S)
        return False
    return True


def _unused(folder: Path) -> int | None:
    """The exclusive lock of an environment, or None where somebody holds it."""
    handle = _open_lock(folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
