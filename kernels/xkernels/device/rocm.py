"""AMD devices: torch serves them under `torch.cuda` too, with `torch.version.hip` set."""

from __future__ import annotations

from moegate.records.measurement import DeviceIdentity
from xkernels.device._accelerator import Accelerator
from xkernels.device.protocol import Kind, Limits

# LDS bytes that one workgroup may use, by architecture (CDNA 3 and CDNA 4 instruction set references).
_LDS_BYTES = {"gfx90a": 65536, "gfx942": 65536, "gfx950": 163840}
_LDS_FLOOR = 65536
_WAVES_PER_UNIT = 32


class RocmDevice(Accelerator):
    """One AMD GPU."""

    kind: Kind = "rocm"
    torch_type = "cuda"
    graph_class = "CUDAGraph"

    def arch(self) -> str:
        """`gfx942` and the like, without feature suffixes such as `:sramecc+`."""
        return str(self.properties().gcnArchName).split(":")[0]

    def platform(self) -> str:
        """`rocm-gfx942` and the like."""
        return f"rocm-{self.arch()}"

    def identity(self) -> DeviceIdentity:
        """The PCI address: HIP and `rocm-smi` spell the unique id differently."""
        p = self.properties()
        pci = f"{int(p.pci_domain_id):04x}:{int(p.pci_bus_id):02x}:{int(p.pci_device_id):02x}.0"
        return DeviceIdentity("rocm", str(p.name), pci, self.arch(), "", int(p.total_memory))

    def limits(self) -> Limits:
        """LDS per workgroup comes from the architecture: older torch builds report the CUDA default for it."""
        p = self.properties()
        units = int(p.multi_processor_count)
        shared = _LDS_BYTES.get(self.arch(), _LDS_FLOOR)
        return Limits(shared, int(getattr(p, "L2_cache_size", 0)), units, units * _WAVES_PER_UNIT)
