"""The live device of this process: `live()` finds it, a `Device` does everything that depends on its vendor."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from xkernels.device.cpu import CpuDevice
from xkernels.device.cuda import CudaDevice
from xkernels.device.protocol import Device, Event, Graph, Kind, Limits
from xkernels.device.rocm import RocmDevice
from xkernels.device.xpu import XpuDevice

__all__ = [
    "CpuDevice",
    "CudaDevice",
    "Device",
    "Event",
    "Graph",
    "Kind",
    "Limits",
    "RocmDevice",
    "XpuDevice",
    "is_interpreted",
    "live",
    "of",
    "simulated",
]

_SIMULATED: ContextVar[Device | None] = ContextVar("simulated_device", default=None)


def is_interpreted() -> bool:
    """Whether Triton kernels of this process run under Triton's interpreter (TRITON_INTERPRET=1)."""
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)


@contextmanager
def simulated(device: Device) -> Iterator[Device]:
    """Within: `device` answers for the live one, and for tensors of torch's meta device.

    For compiling kernels for a device that is not here, and for tests.
    """
    token = _SIMULATED.set(device)
    try:
        yield device
    finally:
        _SIMULATED.reset(token)


def live(index: int = 0) -> Device:
    """The accelerator of this process, or its CPU; within `simulated`, the device given there.

    Under Triton's interpreter it is the CPU even where a GPU is present: that is where kernels run then.
    """
    return _SIMULATED.get() or _live(index)


@functools.cache
def _live(index: int) -> Device:
    if is_interpreted():
        return CpuDevice()
    if torch.cuda.is_available():
        return RocmDevice(index) if torch.version.hip else CudaDevice(index)
    xpu = getattr(torch, "xpu", None)
    if xpu is not None and xpu.is_available():
        return XpuDevice(index)
    return CpuDevice()


def of(tensor: torch.Tensor) -> Device:
    """The device a tensor lives on."""
    if tensor.device.type == CpuDevice.kind:
        return CpuDevice()
    return live(tensor.device.index or 0)
