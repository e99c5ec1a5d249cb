"""Every exception of ours, in one tree.

A failure that a person or a machine can cause is a value or one of these; anything else is a programming error.

    MoegateError                 exit 3 unless a subclass says otherwise
    ├── UsageError               exit 2: the command line, the matrix or an input file is wrong
    │   └── RecordError          a file of ours that is damaged, foreign or of an unknown schema
    └── InfraError               exit 3: image, pool, device or run directory
        ├── RunLocked            another orchestrator holds the run directory
        ├── DeviceLost           a device vanished, was claimed twice or does not answer
        ├── PoolError            a pool cannot offer what the matrix asks of it
        └── ImageError           an image does not build, or is not there
"""

from __future__ import annotations

from pathlib import Path

from moegate.exits import Exit

__all__ = [
    "DeviceLost",
    "ImageError",
    "InfraError",
    "MoegateError",
    "PoolError",
    "RecordError",
    "RunLocked",
    "UsageError",
]


class MoegateError(Exception):
    """Base of all our exceptions; `exit` is the process exit code that it asks for."""

    exit: Exit = Exit.INFRA


class UsageError(MoegateError):
    """Something a person wrote is wrong.

    Args:
        message: what is wrong.
        file: where it was read from.
        line: line in that file, from 1.
        field: dotted path of the field, such as `pools.b60.slots`.
        fix: what would be right.
    """

    exit = Exit.USAGE

    def __init__(
        self,
        message: str,
        *,
        file: str | Path | None = None,
        line: int | None = None,
        field: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.message, self.line, self.field, self.fix = message, line, field, fix
        self.file = None if file is None else str(file)
        super().__init__(str(self))

    def __str__(self) -> str:
        """`file:line: field: message (fix: ...)`, each part only where it is known."""
        where = "" if self.file is None else self.file + (f":{self.line}" if self.line is not None else "") + ": "
        field = f"{self.field}: " if self.field else ""
        fix = f" (fix: {self.fix})" if self.fix else ""
        return f"{where}{field}{self.message}{fix}"


class RecordError(UsageError):
    """A journal, plan, result or other file of ours that cannot be believed."""


class InfraError(MoegateError):
    """The machinery failed, not the thing under test."""


class RunLocked(InfraError):
    """Another process holds the run directory."""


class DeviceLost(InfraError):
    """A device is gone, answers wrongly, or two workers hold the same one."""


class PoolError(InfraError):
    """A pool offers less than the matrix asks for."""


class ImageError(InfraError):
    """An image could not be built or found."""
