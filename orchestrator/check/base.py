"""The state to compare with: a directory, or a git revision laid out in a temporary folder."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moegate.errors import UsageError
from moegate.paths import exists, is_folder

GIT = "git:"
_TIMEOUT_S = 120


@dataclass(frozen=True)
class Base:
    """Finds the base's counterpart of a path of the head; None where it has none. `label` names it in messages."""

    label: str
    locate: Callable[[Path], Path | None]


@contextmanager
def open_base(spec: str, wanted: list[Path], start: Path) -> Iterator[Base]:
    """Make the base readable for the duration.

    Args:
        spec: a directory, or `git:REF`.
        wanted: paths of the head whose counterparts will be asked for (files or folders).
        start: where relative paths begin.

    Raises:
        UsageError: no such directory, no repository, or no such revision.
    """
    if not spec.startswith(GIT):
        folder = Path(spec)
        if not is_folder(folder):
            raise UsageError(
                "is no folder", file=spec, field="base", fix="a directory, or git:REF such as git:origin/main"
            )
        yield Base(spec, lambda path: _beside(folder, path, start))
        return
    ref = spec.removeprefix(GIT)
    with tempfile.TemporaryDirectory(prefix="moegate-base-") as temporary:
        roots: dict[Path, Path] = {}
        for path in wanted:
            top = repository_of(path)
            if top not in roots:
                roots[top] = Path(temporary) / str(len(roots))
            _export(top, ref, path, roots[top])
        yield Base(spec, lambda path: _exported(roots, path))


def repository_of(path: Path) -> Path:
    """The top of the git repository that holds `path`; UsageError where there is none."""
    folder = path if is_folder(path) else path.parent
    done = _git(folder, "rev-parse", "--show-toplevel")
    if done.returncode:
        raise UsageError("is in no git repository", file=path, field="base", fix="compare with a directory instead")
    return Path(done.stdout.decode().strip()).resolve()


def list_files(top: Path, ref: str, below: str) -> list[str]:
    """Files at `ref` below a path relative to the top of the repository (`.` for all of them)."""
    done = _git(top, "ls-tree", "-r", "-z", "--name-only", _commit(top, ref), "--", below)
    return [name for name in done.stdout.decode(errors="replace").split("\0") if name]


def show_file(top: Path, ref: str, name: str) -> bytes:
    """One file's content at `ref`."""
    done = _git(top, "show", f"{_commit(top, ref)}:{name}")
    if done.returncode:
        raise UsageError(done.stderr.decode(errors="replace").strip()[:200], file=name, field="base")
    return done.stdout


def _beside(folder: Path, path: Path, start: Path) -> Path | None:
    absolute = path.resolve()
    for origin in (start, *absolute.parents):
        if absolute.is_relative_to(origin.resolve()):
            candidate = folder / absolute.relative_to(origin.resolve())
            if exists(candidate) and candidate.resolve() != folder.resolve():
                return candidate
    return folder if is_folder(path) else None


def _exported(roots: dict[Path, Path], path: Path) -> Path | None:
    absolute = path.resolve()
    for top, copy in roots.items():
        if absolute.is_relative_to(top):
            candidate = copy / absolute.relative_to(top)
            return candidate if exists(candidate) else None
    return None


def _export(top: Path, ref: str, path: Path, target: Path) -> None:
    relative = path.resolve().relative_to(top).as_posix()
    target.mkdir(parents=True, exist_ok=True)
    if not list_files(top, ref, relative):
        return
    done = _git(top, "archive", "--format=tar", _commit(top, ref), "--", relative)
    if done.returncode:
        raise UsageError(done.stderr.decode(errors="replace").strip()[:200], field="base")
    try:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(target, filter="data")
    except tarfile.TarError as error:  # a link or a name that leads out of the folder
        raise UsageError(f"{relative} of {ref} cannot be unpacked: {error}", field="base") from None


def _commit(top: Path, ref: str) -> str:
    done = _git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    if done.returncode:
        raise UsageError(
            f"{ref!r:.80} is no revision of {top}",
            field="base",
            fix="fetch it first, or name one that exists (git:HEAD~1)",
        )
    return done.stdout.decode().strip()


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            check=False,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise UsageError("git is not installed", field="base", fix="compare with a directory instead") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"git {arguments[0]} took more than {_TIMEOUT_S} s", field="base") from None
