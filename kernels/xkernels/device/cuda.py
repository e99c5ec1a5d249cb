"""NVIDIA devices through `torch.cuda`."""

from __future__ import annotations

import functools
from typing import Any

from moegate.records.measurement import DeviceIdentity
from xkernels.device._accelerator import Accelerator
from xkernels.device.protocol import Kind, Limits

# Blocks that one multiprocessor keeps resident (CUDA C++ programming guide, table of technical specifications).
_BLOCKS_PER_UNIT = {80: 32, 86: 16, 87: 16, 89: 24, 90: 32, 100: 32, 103: 32, 120: 24}
_BLOCKS_PER_UNIT_FLOOR = 16
# Compute capabilities that have a feature: dependent launches came to stay, Hopper's matrix products are its alone.
_FEATURES = {"pdl": range(90, 1000), "wgmma": range(90, 91)}
# `wgmma` is asked for in Gluon, whose names change between releases: our kernels have those of 3.6 to 3.8. Triton 3.9
# still lets them be imported and fails as it compiles them.
_GLUON_CHANGES = (3, 9)


class CudaDevice(Accelerator):
    """One NVIDIA GPU."""

    kind: Kind = "cuda"
    torch_type = "cuda"
    graph_class = "CUDAGraph"

    def capability(self) -> int:
        """Compute capability as one number: 90 for 9.0."""
        p = self.properties()
        return int(p.major) * 10 + int(p.minor)

    def arch(self) -> str:
        """`sm_90` and the like."""
        return f"sm_{self.capability()}"

    def platform(self) -> str:
        """`cuda-sm90` and the like."""
        return f"cuda-sm{self.capability()}"

    def identity(self) -> DeviceIdentity:
        """UUID of the physical GPU; the mask that hid other GPUs does not change it."""
        p = self.properties()
        uuid = getattr(p, "uuid", None)
        identity = f"GPU-{uuid}" if uuid is not None else _pci(p)
        return DeviceIdentity("cuda", str(p.name), identity, self.arch(), "", int(p.total_memory))

    def features(self) -> frozenset[str]:
        """What this compute capability has of `_FEATURES`, as far as the installed Triton serves our kernels."""
        capability = self.capability()
        return served(frozenset(name for name, having in _FEATURES.items() if capability in having))

    def limits(self) -> Limits:
        """Opt-in shared memory per block, L2 size, multiprocessors."""
        p = self.properties()
        shared = int(getattr(p, "shared_memory_per_block_optin", 0) or getattr(p, "shared_memory_per_block", 49152))
        units = int(p.multi_processor_count)
        per_unit = _BLOCKS_PER_UNIT.get(self.capability(), _BLOCKS_PER_UNIT_FLOOR)
        return Limits(shared, int(getattr(p, "L2_cache_size", 0)), units, units * per_unit)


def served(features: frozenset[str]) -> frozenset[str]:
    """Those of a device's features that our kernels can use under the installed Triton."""
    return features if _gluon_of_ours() else features - {"wgmma"}


@functools.cache
def _gluon_of_ours() -> bool:
    try:
        from triton import __version__ as version
    except ImportError:
        return True  # nothing is launched then
    major, minor, *_ = version.split(".")
    return (int(major), int(minor)) < _GLUON_CHANGES


def _pci(p: Any) -> str:
    return f"{int(p.pci_domain_id):08x}:{int(p.pci_bus_id):02x}:{int(p.pci_device_id):02x}.0"
