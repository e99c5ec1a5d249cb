"""What every live device can do: one protocol, implemented by one leaf file per vendor.

A live device is a device of this process, reached through torch. Facts that need no device (peaks, bandwidths, names
and aliases) are in `moegate.devices`. Nothing outside `xkernels.device` asks which vendor it runs on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from moegate.records.measurement import DeviceIdentity

Kind = Literal["cpu", "cuda", "rocm", "xpu"]


@runtime_checkable
class Event(Protocol):
    """A point in the device's work."""

    def record(self) -> None:
        """Mark this point after all work issued so far on the current stream."""

    def elapsed_ms(self, later: Event) -> float:
        """Milliseconds of device time from this event to `later`; waits for `later`."""


@runtime_checkable
class Graph(Protocol):
    """Captured device work that can be replayed."""

    def replay(self) -> None:
        """Issue the captured work again."""


@dataclass(frozen=True)
class Limits:
    """What one device can hold at once.

    `shared_bytes`: shared memory one block may ask for (0: no such limit). `l2_bytes`: last-level cache. `units`:
    multiprocessors, compute units or Xe cores. `resident_blocks`: blocks that can be resident at the same time; a
    grid that synchronises between its blocks must not be larger.
    """

    shared_bytes: int
    l2_bytes: int
    units: int
    resident_blocks: int


@runtime_checkable
class Device(Protocol):
    """One live device of this process.

    `index` counts the devices that this process may see. `transport` is torch's name of what moves tensors between
    processes that hold such devices.
    """

    kind: Kind
    index: int
    transport: str

    def torch_device(self) -> torch.device:
        """The torch device that tensors of this device live on."""

    def identity(self) -> DeviceIdentity:
        """Name, UUID or PCI address, architecture, driver and memory of the physical device."""

    def arch(self) -> str:
        """Architecture as compilers name it: `sm_90`, `gfx942`, `bmg`, `cpu`."""

    def platform(self) -> str:
        """Platform as the dispatch tables name it: `cuda-sm90`, `rocm-gfx942`, `xpu-bmg`, `cpu`."""

    def limits(self) -> Limits:
        """What this device can hold at once."""

    def features(self) -> frozenset[str]:
        """What kernels may use beyond plain Triton.

        `pdl`: a kernel may start while its predecessor drains. `wgmma`: matrix products that four warps issue together
        on operands in shared memory, as Hopper alone has them; not under a Triton that does not compile ours.
        """

    def queue(self) -> int:
        """A number for the stream that work is issued to now: what has the same number runs one after the other."""

    def capturing(self) -> bool:
        """Whether work issued now goes into a graph instead of running."""

    def current(self) -> AbstractContextManager[Any]:
        """Make this the process's current device for a `with` block."""

    def synchronize(self) -> None:
        """Wait until all work issued to this device is done."""

    def event(self) -> Event:
        """A new timing event."""

    def stream(self) -> AbstractContextManager[Any]:
        """Run a `with` block on a side stream that starts after, and is joined to, the current one."""

    def beside(self, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
        """Run two pieces of work that need nothing of each other, `first` on a side stream where the device has any.

        Work issued after this returns starts when both are done.
        """

    def capture(self, work: Callable[[], Any], warmups: int = 1, small: bool = False) -> Graph | None:
        """Capture `work` in a device graph after `warmups` eager calls; None where the device has no graphs.

        `small`: one of many graphs whose outputs nobody keeps. They share their memory, so that a replay overwrites
        what another one's wrote, and capturing costs little.
        """

    def seed(self, value: int) -> None:
        """Seed this device's random generator and the CPU's."""

    def memory_info(self) -> tuple[int, int]:
        """Free and total device memory in bytes."""

    def peak_memory(self) -> int:
        """Largest number of bytes this process had allocated since `reset_peak_memory`."""

    def reset_peak_memory(self) -> None:
        """Start counting `peak_memory` anew."""

    def empty_cache(self) -> None:
        """Give cached but unused memory back to the device."""
