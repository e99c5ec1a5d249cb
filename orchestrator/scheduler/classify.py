"""How a launch ended, as a state and a reason. A table of signs, read in order; the first that holds decides."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from moegate.masking import mask
from moegate.records import State
from orchestrator.pools.isolation import LaunchResult

__all__ = ["SIGNS", "Ending", "ending", "last_line", "tail"]

_TAIL_BYTES = 16 << 10

# What vendors print when a device is gone or out of memory. The process's exit status says neither.
SIGNS: tuple[tuple[State, re.Pattern[str]], ...] = (
    (
        "DEVICE_LOST",
        re.compile(
            r"UR_RESULT_ERROR_DEVICE_LOST|DEVICE_LOST|CUDA error: (unspecified launch failure|device-side assert)"
            r"|NVRM: Xid|GPU has fallen off the bus|hipErrorNoDevice|Failed to initialize NVML: Unknown Error"
        ),
    ),
    (
        "OOM",
        re.compile(
            r"OutOfMemoryError|out of memory|UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY|^MemoryError\b"
            r"|std::bad_alloc|Cannot allocate memory",
            re.MULTILINE,
        ),
    ),
)


@dataclass(frozen=True)
class Ending:
    """A state other than PASSED with its reason, and whether the scheduler may try again."""

    state: State
    reason: str
    retry: bool = False


def ending(result: LaunchResult, stderr: str, timeout_s: float) -> Ending | None:
    """Judge how a launch ended, from what is known outside of it; None where it exited with 0.

    stderr: the end of its standard error.
    """
    if result.cancelled:
        return Ending("CANCELLED", "stopped on request")
    if result.infra is not None:
        return Ending("INFRA_ERROR", result.infra, retry=True)
    if result.timed_out:
        return Ending("TIMEOUT", f"did not end within {timeout_s:g} s")
    if result.oom:
        return Ending("OOM", "the kernel or the memory limit ended it")
    if result.returncode == 0 and result.signal is None:
        return None
    for state, pattern in SIGNS:
        match = pattern.search(stderr)
        if match:
            return Ending(state, match[0], retry=state == "DEVICE_LOST")
    if result.signal is not None:
        return Ending("CRASHED", f"killed by {_signal(result.signal)}")
    said = last_line(stderr)
    if result.returncode == 3:
        return Ending("INFRA_ERROR", said or "exit status 3", retry=True)
    return Ending("FAILED", said or f"exit status {result.returncode}")


def last_line(text: str) -> str:
    """The last line that says something, cut to a readable length, without control characters."""
    lines = [re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", line).strip() for line in text.splitlines()]
    return next((line[:300] for line in reversed(lines) if line), "")


def tail(path: Path, size: int = _TAIL_BYTES) -> str:
    """The end of a log as text, secrets masked; empty where there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - size))
            return mask(stream.read(size).decode("utf-8", errors="replace"))
    except OSError:
        return ""


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
