"""The CPU as a device: eager work, wall-clock events, no graphs."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from moegate.records.measurement import DeviceIdentity
from xkernels.device.protocol import Event, Graph, Kind, Limits

_CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_UNIT = {"K": 1024, "M": 1024**2, "G": 1024**3}


class CpuEvent:
    """A wall-clock reading: work on the CPU is done when its call returns."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        """Read the clock."""
        self.at = time.perf_counter()

    def elapsed_ms(self, later: Event) -> float:
        """Milliseconds between two readings."""
        if not isinstance(later, CpuEvent):
            raise TypeError(f"elapsed_ms needs an event of the same device, not {type(later).__name__}")
        return (later.at - self.at) * 1e3


class CpuDevice:
    """The processor this process runs on."""

    kind: Kind = "cpu"
    transport = "gloo"

    def __init__(self, index: int = 0) -> None:
        self.index = index

    def torch_device(self) -> torch.device:
        """torch's CPU device."""
        return torch.device(self.kind)

    def identity(self) -> DeviceIdentity:
        """The machine is the device: its host name, and the processor's name as the operating system gives it."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return DeviceIdentity("cpu", _processor_name(), f"cpu:{platform.node()}", self.arch(), "", total)

    def arch(self) -> str:
        """Always `cpu`."""
        return "cpu"

    def platform(self) -> str:
        """Always `cpu`."""
        return "cpu"

    def limits(self) -> Limits:
        """No shared memory; last-level cache and usable cores."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return Limits(0, _last_level_cache(), cores, cores)

    def features(self) -> frozenset[str]:
        """Nothing beyond plain Triton."""
        return frozenset()

    def queue(self) -> int:
        """There is only one stream."""
        return 0

    def capturing(self) -> bool:
        """There are no graphs."""
        return False

    def current(self) -> AbstractContextManager[Any]:
        """Nothing to switch."""
        return nullcontext()

    def synchronize(self) -> None:
        """CPU work is synchronous."""

    def event(self) -> Event:
        """A wall-clock event."""
        return CpuEvent()

    def stream(self) -> AbstractContextManager[Any]:
        """There is only one stream."""
        return nullcontext()

    def beside(self, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
        """One after the other."""
        return first(), second()

    def capture(self, work: Callable[[], Any], warmups: int = 1, small: bool = False) -> Graph | None:
        """The CPU has no graphs: None."""
        del work, warmups, small
        return None

    def seed(self, value: int) -> None:
        """Seed torch's CPU generator."""
        torch.manual_seed(value)

    def memory_info(self) -> tuple[int, int]:
        """Available and total RAM in bytes."""
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")

    def peak_memory(self) -> int:
        """Peak resident set of this program in bytes (since its start: it cannot be reset)."""
        # Linux counts into ru_maxrss what the process was before exec, which is its parent; VmHWM starts with exec.
        status = Path("/proc/self/status")
        found = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), re.MULTILINE) if status.is_file() else None
        if found is not None:
            return int(found[1]) * 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def reset_peak_memory(self) -> None:
        """The operating system keeps the peak for the life of a process."""

    def empty_cache(self) -> None:
        """torch's CPU allocator keeps no cache."""


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _last_level_cache() -> int:
    if not _CACHE_SIZE.is_file():
        return 0
    text = _CACHE_SIZE.read_text(encoding="ascii").strip()
    return int(text.rstrip("KMG")) * _UNIT.get(text[-1:], 1)
