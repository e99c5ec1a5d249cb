"""Where shipped data lies, and how a file comes into being: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from moegate.errors import UsageError

__all__ = [
    "config_root",
    "ensure_inside",
    "ensure_writable",
    "exists",
    "fsync_directory",
    "is_file",
    "is_folder",
    "new_folder",
    "user_cache",
    "write_atomic",
]

_PACKAGE = Path(__file__).resolve().parent
_ELSEWHERE = "move what is there away, or name another place"


def config_root() -> Path:
    """Return the folder with the `triton_X_Y_Z` directories that we ship.

    In a checkout that is `kernels/configs`; in an installed wheel the same files lie in `moegate/_configs`.
    """
    packaged = _PACKAGE / "_configs"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "kernels" / "configs"


def is_file(path: Path) -> bool:
    """Whether a regular file is there; False for a name that the system refuses to look up.

    Such a name is too long, or lies in a folder that this user may not enter. `Path.is_file` raises OSError for it: a
    traceback, where somebody else wrote the name.
    """
    return os.path.isfile(path)  # noqa: PTH113 - see above


def is_folder(path: Path) -> bool:
    """Whether a folder is there; as `is_file`."""
    return os.path.isdir(path)  # noqa: PTH112 - as above


def exists(path: Path) -> bool:
    """Whether anything is there; as `is_file`."""
    return os.path.exists(path)  # noqa: PTH110 - as above


def user_cache() -> Path:
    """Return the folder for what can be made again, of this user on this host (`XDG_CACHE_HOME` is followed)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moegate"


def ensure_writable(path: Path, field: str | None = None) -> Path:
    """Return `path` where a file can be written; a command asks before it works for hours.

    `field`: the option that leads there, which errors name.

    Raises:
        UsageError: as for `write_atomic`; or what should be its folder is none, this user may not write there, or
            nothing can have that name.
    """
    try:
        _ensure_file(path)
        folder = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
        if not folder.is_dir():
            raise UsageError("is no folder", file=folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError("cannot be written to", file=folder)
    except UsageError as error:
        raise UsageError(error.message, file=error.file, field=field, fix=_ELSEWHERE) from None
    except OSError as error:  # a name that is too long, or links in a circle
        raise UsageError(error.strerror or str(error), file=path, field=field, fix=_ELSEWHERE) from None
    return path


def new_folder(path: Path) -> Path | None:
    """The topmost folder that writing `path` will make; None where all of them are there."""
    missing = [parent for parent in path.absolute().parents if not os.path.lexists(parent)]
    return missing[-1] if missing else None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part.

    The parent folder is made when missing. Data and directory entry are on disk when this returns. A link is replaced
    and not followed: one that a launch has left leads nowhere.

    Raises:
        UsageError: a folder, a device or a pipe is there (whoever may would replace `/dev/null` for all), or the name
            is a stream's.
    """
    _ensure_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    # Cut by bytes, which is what file systems count.
    temporary = path.with_name(f".{os.fsdecode(os.fsencode(path.name)[:200])}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a read-only file system refuses that too, and names the temporary file
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # a full disk names no file, other failures name the temporary one
            error.filename, error.filename2 = str(path), None
        raise
    fsync_directory(path.parent)


def _ensure_file(path: Path) -> None:
    """Refuse a name under which `write_atomic` may put no file.

    A shell's redirection makes a regular file of `/dev/stdout`, which is still to be written to and not to be replaced.
    """
    if path.name in ("", "..") or path.is_dir():
        raise UsageError("is a folder, not the name of a file", file=path)
    folder = Path(os.path.realpath(path.parent))  # resolve() raises RuntimeError at links that go in a circle
    if folder == Path("/dev") or folder.is_relative_to("/proc"):
        raise UsageError("is a device or a stream: name a file", file=path)
    if path.exists() and not path.is_file():
        raise UsageError("is no regular file", file=path)


def fsync_directory(path: Path) -> None:
    """Make the entries of a folder durable (renames and new names)."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_folder(path: Path) -> None:
    """Remove a folder as far as that goes, also where its maker has locked folders in it. Links are not followed."""
    if path.is_symlink():
        return
    with contextlib.suppress(OSError):
        path.chmod(0o700)
    for where, names, _ in os.walk(path):
        for inner in (Path(where, name) for name in names):
            with contextlib.suppress(OSError):
                if not inner.is_symlink():
                    inner.chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)


def ensure_inside(root: Path, path: Path) -> Path:
    """Return `path` resolved.

    Raises:
        UsageError: it leads outside `root` (by `..`, absolute name or link), or no file can have that name.
    """
    try:
        resolved = Path(os.path.realpath(root / path))  # resolve() raises RuntimeError at links in a circle
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UsageError(f"{str(path)[:100]!r} is no name of a file: {error}", file=root) from None
    if not resolved.is_relative_to(root.resolve()):
        raise UsageError(f"{path} leads outside {root}", file=path)
    return resolved
