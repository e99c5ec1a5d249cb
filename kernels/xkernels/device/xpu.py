"""Intel devices through `torch.xpu`.

The driver of the Arc Pro B60 reports a wrong memory bus width, so bandwidth never comes from here: see
`moegate.devices`.
"""

from __future__ import annotations

from moegate.devices import physical_identity
from moegate.records.measurement import DeviceIdentity
from xkernels.device._accelerator import Accelerator
from xkernels.device.protocol import Kind, Limits

# Device architecture words of the SYCL device that we have a name for, by the marketing name's part.
_ARCH_BY_NAME = (("B580", "bmg"), ("B570", "bmg"), ("B50", "bmg"), ("B60", "bmg"), ("B65", "bmg"), ("B70", "bmg"),
                 ("Max", "pvc"), ("A770", "acm"), ("A750", "acm"))  # fmt: skip
_GROUPS_PER_CORE = 16


class XpuDevice(Accelerator):
    """One Intel GPU."""

    kind: Kind = "xpu"
    torch_type = "xpu"
    graph_class = "XPUGraph"
    queue_field = "sycl_queue"
    transport = "xccl"

    def arch(self) -> str:
        """`bmg`, `pvc`, `acm`, or `xpu` for a device that the table above does not name."""
        name = str(self.properties().name)
        return next((arch for part, arch in _ARCH_BY_NAME if part in name), "xpu")

    def platform(self) -> str:
        """`xpu-bmg` and the like."""
        return f"xpu-{self.arch()}"

    def identity(self) -> DeviceIdentity:
        """The physical device's PCI address, out of its UUID: the same whatever ZE_AFFINITY_MASK says."""
        p = self.properties()
        uuid = getattr(p, "uuid", None)
        identity = physical_identity("xpu", None if uuid is None else str(uuid), None) or f"xpu:{self.index}"
        driver = str(getattr(p, "driver_version", ""))
        return DeviceIdentity("xpu", str(p.name), identity, self.arch(), driver, int(p.total_memory))

    def limits(self) -> Limits:
        """Local memory per work-group, last-level cache, Xe cores (8 vector engines each on Xe2)."""
        p = self.properties()
        units = int(getattr(p, "gpu_subslice_count", 0) or getattr(p, "max_compute_units", 0))
        shared = int(getattr(p, "local_mem_size", 0) or 131072)
        return Limits(shared, int(getattr(p, "last_level_cache_size", 0)), units, units * _GROUPS_PER_CORE)
