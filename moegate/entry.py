"""How each of our programs starts and ends: every failure that is not a defect becomes one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn, TextIO, cast

from moegate.errors import InfraError, MoegateError, UsageError
from moegate.exits import Exit
from moegate.extras import EXTRAS, install
from moegate.paths import ensure_writable, new_folder
from moegate.text import plain

__all__ = ["asked_to_end", "from_os", "guard", "open_streams", "ready_to_write", "unwind_on_termination"]

# What a path that somebody named can be; any other refusal of the system (no space, no descriptor) is the machine's.
_OF_A_PATH = frozenset(
    {
        errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENODEV, errno.ENOENT,
        errno.ENOTDIR, errno.ENOTEMPTY, errno.ENXIO, errno.EPERM,
    }
)  # fmt: skip


def from_os(error: OSError) -> MoegateError:
    """Say what the operating system refused: UsageError where a path is at fault, else InfraError."""
    what = error.strerror or str(error) or type(error).__name__
    name = error.filename if isinstance(error.filename, str | os.PathLike) else None
    if name is not None and error.errno in _OF_A_PATH:
        return UsageError(what, file=os.fspath(name))
    return InfraError(what if name is None else f"{os.fspath(name)}: {what}")


def ready_to_write(path: Path, field: str) -> Path:
    """Refuse the name of a file that cannot be written, before a command works for it.

    Where the file will lie in a folder that is not there yet, a note says so: its name may be misspelled.

    Raises:
        UsageError: naming `field`, the option that leads there, and what is in the way.
    """
    ensure_writable(path, field)
    folder = new_folder(path)
    if folder is not None:
        print(
            f"note: there is no folder {plain(str(folder))} yet: it will be made for {plain(path.name)}",
            file=sys.stderr,
        )
    return path


def open_streams() -> None:
    """Let nothing that we open take the place of a standard stream that somebody closed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


_ENDS = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED, signal.SIGHUP: Exit.TERMINATED}
_asked: list[tuple[Exit, float]] = []


def unwind_on_termination() -> None:
    """Let SIGINT, SIGTERM and SIGHUP end this program through its `finally` blocks, with the exit code that they have.

    A second one within a second is the same one: `timeout` and a terminal send it to the program and to its group.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if _asked and now - _asked[-1][1] < 1.0:
            return
        _asked.append((_ENDS[signal.Signals(number)], now))
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(int(Exit.TERMINATED))

    for number in _ENDS:
        # What `nohup`, or a shell for what runs behind its `&`, has ignored stays so.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, leave)


def asked_to_end() -> Exit | None:
    """The exit code of the first signal that asked this program to end, if one did.

    Python drops an exception that a handler raises within a finaliser, and there are many while modules are imported:
    what is about to begin long work asks here first.
    """
    return _asked[0][0] if _asked else None


def guard(program: str, command: Callable[[], object], *, interrupted: str = "") -> NoReturn:
    """Run a program's command line and exit with what it returns (an int, or None for 0).

    Args:
        program: name that begins each message.
        command: parses sys.argv and works; may exit by itself.
        interrupted: printed where a person interrupts it.
    """
    open_streams()
    sys.stdout, sys.stderr = _patient(sys.stdout), _patient(sys.stderr)
    try:
        code = _finished(command)
        if code == Exit.INTERRUPTED and interrupted:  # what the library makes of Ctrl-C
            print(f"{program}: {interrupted}", file=sys.stderr)
    except MoegateError as error:
        code = _say(program, error)
    except KeyboardInterrupt:
        if interrupted:
            print(f"{program}: {interrupted}", file=sys.stderr)
        code = int(Exit.INTERRUPTED)
    except ModuleNotFoundError as error:
        code = _say(program, _not_installed(error))
    except OSError as error:
        code = _say(program, from_os(error))
    except RuntimeError as error:
        code = _say(program, from_os(_circle(error)))
    _drop_output()
    sys.exit(code)


_STDERR = 2


class _Outlet(io.FileIO):
    """A standard stream whose reader may go away (`| head`): what is written then is dropped, and the work goes on.

    So the exit code is the command's own, however much of its output was read: a gate that fails fails behind a pipe.
    Standard error drops what a full disk or a terminal that is gone refuses too: there is nowhere left to say so.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _to_nowhere(self.fileno())
        except OSError:
            if self.fileno() != _STDERR:
                raise
        return len(data)


def _patient(stream: TextIO) -> TextIO:
    """The stream, able to lose its reader, and to print what no encoding can spell: file names and logs hold that."""
    raw = getattr(getattr(stream, "buffer", None), "raw", getattr(stream, "buffer", None))
    if not isinstance(stream, io.TextIOWrapper) or type(raw) is not io.FileIO:  # a test's, or a notebook's
        return stream
    stream.flush()
    outlet = _Outlet(raw.fileno(), "w", closefd=False)
    through = stream.buffer is raw  # `python -u`
    return io.TextIOWrapper(
        cast("BinaryIO", outlet) if through else io.BufferedWriter(outlet),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=through,
    )


def _to_nowhere(number: int) -> None:
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def _circle(error: RuntimeError) -> OSError:
    """What the system said of links that lead in a circle, which pathlib up to Python 3.12 turns into this."""
    told = error.__context__
    if isinstance(told, OSError) and told.errno == errno.ELOOP:
        return told
    raise error


def _not_installed(error: ModuleNotFoundError) -> InfraError:
    """Name the extra that brings a missing module; one that no extra brings is a defect."""
    name = (error.name or "").partition(".")[0]
    if name not in EXTRAS:
        raise error
    return InfraError(f"{name} is not installed (fix: {install(EXTRAS[name])})")


def _finished(command: Callable[[], object]) -> int:
    """The command's code, with all that it printed handed over, so that a full disk is noticed here."""
    try:
        code = command()
    except SystemExit as left:
        code = left.code
    except Exception as error:
        code = _of_the_library(error)
    if sys.stdout is not None:
        sys.stdout.flush()
    return int(code) if isinstance(code, int) else int(Exit.OK)


def _of_the_library(error: Exception) -> Exit:
    """The command-line library's own exceptions: usage errors print themselves; all others go on."""
    show = getattr(error, "show", None)
    if show is not None:
        show(file=sys.stderr)
        return Exit.USAGE
    if type(error).__name__ == "Abort":
        return Exit.INTERRUPTED
    raise error


def _say(program: str, error: MoegateError) -> int:
    """Print the error; its lines (the end of a log may be among them) without what a terminal would obey."""
    print("\n".join(plain(line) for line in f"{program}: {error}".split("\n")), file=sys.stderr)
    return int(error.exit)


def _drop_output() -> None:
    """What cannot be handed over any more is dropped, or Python would complain about it at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        _to_nowhere(1)
