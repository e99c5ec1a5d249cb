"""Facts per device: canonical names, aliases, platform, shared memory and peaks (a table and its readers).

A device's `name` is what its driver reports with spaces as underscores, because that is the `device_name` field of a
config file. An alias is a reviewed statement that another spelling, or a sibling part, may lend its config files; each
one carries its source. Nothing here looks at the machine: see `orchestrator.pools.discovery` and `xkernels.device`.

Shared-memory limits are the most that one block or work-group can use: CUDA C Programming Guide, table of compute
capabilities (163 KiB at 8.0, 99 KiB at 8.6, 8.9 and 12.x, 227 KiB at 9.0 and 10.x); AMD CDNA3 and CDNA4 ISA guides
(64 and 160 KiB of LDS); `local_mem_size` of torch's XPU device properties for Intel. Peaks are dense, from the vendors'
data sheets; `None` means that no source was found, never zero.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from moegate.errors import UsageError

Vendor = Literal["nvidia", "amd", "intel", "cpu"]

KIB = 1024


@dataclass(frozen=True)
class Alias:
    """Another device name whose config files this device may use.

    `spelling` is the same part under another driver or image; `variant` is a sibling with the same compute units.
    """

    name: str
    relation: Literal["spelling", "variant"]
    source: str


@dataclass(frozen=True)
class Device:
    """What is known about one device without touching it.

    Units: `smem_bytes` bytes per block, `bandwidth_gbs` GB/s, `tflops` dense TFLOP/s by dtype, `memory_gib` GiB.
    """

    name: str
    vendor: Vendor
    platform: str
    target: str
    smem_bytes: int | None = None
    bandwidth_gbs: float | None = None
    tflops: Mapping[str, float] = field(default_factory=dict)
    memory_gib: int | None = None
    aliases: tuple[Alias, ...] = ()

    @property
    def fp8_matrix_unit(self) -> bool:
        """Whether the device multiplies FP8 matrices in hardware."""
        return self.platform in FP8_PLATFORMS


FP8_PLATFORMS = frozenset(
    {"cuda-sm89", "cuda-sm90", "cuda-sm100", "cuda-sm110", "cuda-sm120"}
    | {"rocm-gfx942", "rocm-gfx950", "rocm-gfx12", "rocm-gfx1250"}
)

_SM80 = {"vendor": "nvidia", "platform": "cuda-sm80", "target": "sm_80", "smem_bytes": 163 * KIB}
_SM86 = {"vendor": "nvidia", "platform": "cuda-sm80", "target": "sm_86", "smem_bytes": 99 * KIB}
_SM89 = {"vendor": "nvidia", "platform": "cuda-sm89", "target": "sm_89", "smem_bytes": 99 * KIB}
_SM90 = {"vendor": "nvidia", "platform": "cuda-sm90", "target": "sm_90", "smem_bytes": 227 * KIB}
_SM100 = {"vendor": "nvidia", "platform": "cuda-sm100", "target": "sm_100", "smem_bytes": 227 * KIB}
_SM103 = {"vendor": "nvidia", "platform": "cuda-sm100", "target": "sm_103", "smem_bytes": 227 * KIB}
_SM120 = {"vendor": "nvidia", "platform": "cuda-sm120", "target": "sm_120", "smem_bytes": 99 * KIB}
_SM121 = {"vendor": "nvidia", "platform": "cuda-sm120", "target": "sm_121", "smem_bytes": 99 * KIB}
_GFX942 = {"vendor": "amd", "platform": "rocm-gfx942", "target": "gfx942", "smem_bytes": 64 * KIB}
_GFX950 = {"vendor": "amd", "platform": "rocm-gfx950", "target": "gfx950", "smem_bytes": 160 * KIB}
_BMG = {"vendor": "intel", "platform": "xpu-bmg", "target": "bmg", "smem_bytes": 128 * KIB}

_H200_FAMILY = "vllm-project/vllm#23642: one set of fused-MoE configs for every H200"
_OAM = "ROCm/vllm#304 and #359: the same part is reported with and without the OAM suffix"
_RADEON = "sgl-project/sglang#3418 and #3492: tuned on an MI300X that called itself AMD Radeon Graphics"
_MI308 = "vllm-project/vllm#27623: one MI308X, three names, depending on the image"
_H20_3E = "sgl-project/sglang#4028 and #6835: an H20 with 141 GB; four pairs of sglang 0.5.23 are the same for both"
_BMG_ID = "intel/torch-xpu-ops#2990 (device id 0xE211), intel/compute-runtime#590: drivers without the brand string"


def _device(
    name: str,
    base: Mapping[str, object],
    gbs: float | None = None,
    memory: int | None = None,
    bf16: float | None = None,
    fp8: float | None = None,
    aliases: tuple[Alias, ...] = (),
) -> Device:
    peaks = {dtype: value for dtype, value in (("bf16", bf16), ("fp16", bf16), ("fp8", fp8)) if value is not None}
    return Device(name, bandwidth_gbs=gbs, memory_gib=memory, tflops=peaks, aliases=aliases, **base)  # type: ignore[arg-type]


DEVICES: tuple[Device, ...] = (
    Device("cpu", "cpu", "cpu", "cpu"),
    _device("NVIDIA_A100-SXM4-80GB", _SM80, 2039, 80, 312),
    _device("NVIDIA_A100-SXM4-40GB", _SM80, 1555, 40, 312),
    _device("NVIDIA_A100_80GB_PCIe", _SM80, 1935, 80, 312),
    _device("NVIDIA_A800-SXM4-80GB", _SM80, 2039, 80, 312),
    _device("NVIDIA_A10", _SM86, 600, 24, 125),
    _device("NVIDIA_A40", _SM86, 696, 48, 149.7),
    _device("NVIDIA_GeForce_RTX_3090", _SM86, 936, 24, 71),
    _device("NVIDIA_L4", _SM89, 300, 24, 121, 242.5),
    _device("NVIDIA_L20", _SM89, 864, 48, 119.5, 239),
    _device("NVIDIA_L40", _SM89, 864, 48, 181, 362),
    _device("NVIDIA_L40S", _SM89, 864, 48, 362, 733),
    _device("NVIDIA_GeForce_RTX_4090", _SM89, 1008, 24, 165.2, 330.3),
    _device("NVIDIA_RTX_6000_Ada_Generation", _SM89, 960, 48, 364.2, 728.5),
    _device("NVIDIA_RTX_5880_Ada_Generation", _SM89, 960, 48),
    _device("NVIDIA_H100_80GB_HBM3", _SM90, 3350, 80, 989.4, 1978.9),
    _device("NVIDIA_H100_PCIe", _SM90, 2039, 80, 756, 1513),
    _device("NVIDIA_H100_NVL", _SM90, 3938, 94, 835.5, 1670.5),
    _device("NVIDIA_H800", _SM90, 3350, 80, 989.4, 1978.9),
    _device("NVIDIA_H20", _SM90, 4000, 96, 148, 296),
    _device("NVIDIA_H20-3e", _SM90, 4800, 141, 148, 296, (Alias("NVIDIA_H20", "variant", _H20_3E),)),
    _device("NVIDIA_H200", _SM90, 4800, 141, 989.4, 1978.9),
    _device("NVIDIA_H200_NVL", _SM90, 4800, 141, 835.5, 1670.5, (Alias("NVIDIA_H200", "variant", _H200_FAMILY),)),
    _device("NVIDIA_B200", _SM100, 8000, 180, 2250, 4500),
    _device("NVIDIA_GB200", _SM100, 8000, 186, 2500, 5000),
    _device("NVIDIA_B300_SXM6_AC", _SM103, 8000, 270, 2250, 4500),
    _device("NVIDIA_GB300", _SM103, 8000, 279, 2500, 5000),
    _device("NVIDIA_GeForce_RTX_5090", _SM120, 1792, 32, 209.5, 419),
    _device("NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition", _SM120, 1597, 96),
    _device("NVIDIA_RTX_PRO_6000_Blackwell_Workstation_Edition", _SM120, 1792, 96),
    _device("NVIDIA_RTX_PRO_6000_Blackwell_Max-Q_Workstation_Edition", _SM120, 1792, 96),
    _device("NVIDIA_GB10", _SM121, 273, 119),
    _device(
        "AMD_Instinct_MI300X",
        _GFX942,
        5300,
        192,
        1307.4,
        2614.9,
        (Alias("AMD_Instinct_MI300X_OAM", "spelling", _OAM), Alias("AMD_Radeon_Graphics", "spelling", _RADEON)),
    ),
    _device(
        "AMD_Instinct_MI308X", _GFX942, 5300, 192, None, None, (Alias("AMD_Instinct_MI308X_OAM", "spelling", _MI308),)
    ),
    _device(
        "AMD_Instinct_MI325X", _GFX942, 6000, 256, 1307.4, 2614.9, (Alias("AMD_Instinct_MI325X_OAM", "spelling", _OAM),)
    ),
    _device("AMD_Instinct_MI350X", _GFX950, 8000, 288, 2306.9, 4613.7),
    _device("AMD_Instinct_MI355X", _GFX950, 8000, 288, 2516.6, 5033.2),
    # Arc Pro B60: 20 Xe2 cores, 456 GB/s, no FP8 matrix unit; local_mem_size 128 KiB (intel/torch-xpu-ops#2990).
    _device(
        "Intel(R)_Arc(TM)_Pro_B60_Graphics",
        _BMG,
        456,
        24,
        98.5,
        aliases=(Alias("Intel(R)_Graphics_[0xe211]", "spelling", _BMG_ID),),
    ),
    _device("Intel(R)_Arc(TM)_Pro_B50_Graphics", _BMG, 224, 16, 85),
    _device("Intel(R)_Arc(TM)_Pro_B70_Graphics", _BMG, 608, 32),
    _device("Intel(R)_Arc(TM)_B580_Graphics", _BMG, 456, 12, 116.5),
    _device("Intel(R)_Arc(TM)_B570_Graphics", _BMG, 380, 10),
)

# Names that drivers report, by the tuned files of the engines, of parts whose facts are not in the table.
NAMES_WITHOUT_FACTS: Mapping[str, str] = {
    "NVIDIA_L20Y": "sglang 0.5.23, vllm 0.32.0",
    "AMD_Instinct_MI455X": "sglang 0.5.23",
    "AMD_Instinct_MI300A": "vllm 0.32.0, platforms/rocm.py",
    "AMD_Instinct_MI300X_HF": "vllm 0.32.0, platforms/rocm.py",
    "AMD_Instinct_MI325_OAM": "vllm 0.32.0",
    "AMD_Instinct_MI350_OAM": "vllm 0.32.0",
    "AMD_Instinct_MI355_OAM": "vllm 0.32.0",
    "AMD_Radeon_R9700": "vllm 0.32.0, platforms/rocm.py",
    "AMD_Radeon_8060S": "vllm 0.32.0, platforms/rocm.py",
    "AMD_Radeon_890M": "vllm 0.32.0, platforms/rocm.py",
    "AMD_Radeon_RX7900XTX": "vllm 0.32.0, platforms/rocm.py",
    "AMD_Radeon_RX9070XT": "vllm 0.32.0, platforms/rocm.py",
}

# Names that a driver gives to a part it does not know: many different devices share them.
FALLBACK_NAMES: Mapping[str, str] = {
    "AMD_Radeon_Graphics": "an MI300X, an MI308X or any consumer part, depending on driver and image",
    "Intel(R)_Graphics": "any Intel part whose brand string the driver does not have",
    "Intel(R)_Arc(TM)_Graphics": "any integrated Arc part",
    "AMD_Instinct": "any Instinct part",
    "NVIDIA_Graphics_Device": "any NVIDIA part that is newer than the driver",
}


def normalise(name: str) -> str:
    """The `device_name` field for a name as a driver prints it (`NVIDIA H200` -> `NVIDIA_H200`)."""
    return name.strip().replace(" ", "_")


@cache
def _by_name() -> Mapping[str, Device]:
    table: dict[str, Device] = {}
    for device in DEVICES:
        table[device.name] = device
    for device in DEVICES:
        for alias in device.aliases:
            if alias.relation == "spelling" and alias.name not in FALLBACK_NAMES:
                table.setdefault(alias.name, device)
    return table


def find(name: str) -> Device | None:
    """The device that reports `name` (spaces or underscores, canonical or another spelling), or None."""
    return _by_name().get(normalise(name))


def vendor_of(name: str) -> str | None:
    """The vendor of the device that reports `name`, known or not; None where the name does not tell."""
    own = normalise(name)
    device = find(own)
    if device is not None:
        return device.vendor
    brand = own.split("_")[0].removesuffix("(R)").lower()
    return brand if brand in {d.vendor for d in DEVICES} else None


KIND_VENDORS: Mapping[str, Vendor] = {"cpu": "cpu", "cuda": "nvidia", "rocm": "amd", "xpu": "intel"}


def vendor_by(kind: str, name: str) -> Vendor:
    """The vendor of a live device of a kind: what its name means where that is known, else whose the kind is."""
    device = find(name)
    return KIND_VENDORS[kind] if device is None else device.vendor


def is_reported(name: str) -> bool:
    """Whether some driver is known to report `name`: a device, a spelling of one, or a name without facts."""
    own = normalise(name)
    return (
        own in _by_name()
        or own in NAMES_WITHOUT_FACTS
        or own in FALLBACK_NAMES
        or any(alias.name == own for device in DEVICES for alias in device.aliases)
    )


def is_field(name: str) -> bool:
    """Whether some device's config files carry `name`, which no lookup forms with spaces in it or around it."""
    return name == normalise(name) and is_reported(name)


def get(name: str) -> Device:
    """As `find`, but an unknown name is a UsageError that lists the nearest known ones."""
    device = find(name)
    if device is None:
        raise UsageError(f"unknown device {name!r}", field="device_name", fix=_hint(name))
    return device


def ensure_asked(name: str, field: str, own: Collection[str] = ()) -> None:
    """Let pass what may be a device: one that is known, one of `own`, or a new one, whose name tells its vendor.

    Args:
        name: what somebody typed. field: the option. own: names that the config files at hand carry.

    Raises:
        UsageError: any other word, and a known name in other capitals, which no driver reports; the nearest are named.
    """
    asked = normalise(name)
    if is_reported(asked) or asked in own:
        return
    same = [known for known in _by_name() if known.casefold() == asked.casefold()]
    if same or vendor_of(asked) is None:
        fix = f"did you mean {same[0]}?" if same else _hint(name)
        raise UsageError(f"unknown device {name!r:.80}", field=field, fix=fix)


def _hint(name: str) -> str:
    close = difflib.get_close_matches(normalise(name), list(_by_name()), n=3, cutoff=0.5)
    meant = tuple(known for known in near(name) if _names(name, known)) or close
    return f"did you mean {', '.join(meant)}?" if meant else "`orchestrator doctor` prints the name of this device"


def lookup_names(name: str) -> tuple[tuple[str, Alias | None], ...]:
    """Names under which config files are looked for, in order: the device's own, then its reviewed aliases.

    A device that reports one of the other spellings searches that spelling first and the canonical name next.
    """
    own = normalise(name)
    device = find(own)
    names: list[tuple[str, Alias | None]] = [(own, None)]
    if device is None:
        return tuple(names)
    if device.name != own:
        said = next(alias for alias in device.aliases if alias.name == own)
        names.append((device.name, Alias(device.name, said.relation, said.source)))
    names.extend((alias.name, alias) for alias in device.aliases if alias.name != own)
    return tuple(names)


def physical_identity(kind: str, uuid: str | None, pci: str | None) -> str | None:
    """The one name of a physical device that its host and a process on it agree on, or None where neither is known.

    NVIDIA: the UUID, as `nvidia-smi -L` prints it. AMD: the PCI address, because `rocm-smi` and HIP spell the unique id
    differently. Intel: the PCI address too, read out of the Level Zero UUID where a process knows only that.

    Args:
        kind: `cuda`, `rocm` or `xpu`.
        uuid: as torch prints it, without a prefix.
        pci: `domain:bus:device.function` in hexadecimal, of any width.
    """
    address = _address(pci) if pci else None
    if kind == "xpu" and uuid:
        address = address or intel_address(uuid)
    if kind in ("rocm", "xpu") and address:
        return address
    return f"GPU-{uuid}" if uuid else address


def _address(pci: str) -> str | None:
    """`domain:bus:device.function` as the kernel writes it, with four, two and two digits."""
    match = re.fullmatch(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", pci.strip().lower())
    if match is None:
        return None
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def intel_address(uuid: str) -> str | None:
    """The PCI address in a Level Zero UUID, or None for one of another layout.

    Sixteen bytes, little-endian: vendor 8086, device id and revision (2 bytes each), PCI domain (2), bus, device and
    function (1 each), four zeros, sub-device. Management tools print them last byte first: an Arc Pro B60 at
    0000:17:00.0 is `00000000-0000-0017-0000-0000e2118086` there (sgl-project/sglang#38873).
    """
    digits = uuid.replace("-", "").lower()
    if re.fullmatch(r"[0-9a-f]{32}", digits) is None:
        return None
    data = bytes.fromhex(digits)
    if data[:2] != b"\x86\x80":
        data = data[::-1]
    if data[:2] != b"\x86\x80" or any(data[11:15]):
        return None
    return f"{int.from_bytes(data[6:8], 'little'):04x}:{data[8]:02x}:{data[9]:02x}.{data[10]:x}"


def near(name: str, limit: int = 3) -> tuple[str, ...]:
    """Known devices that a person may have meant or may want to compare with.

    Same target first, then those whose name holds the asked one (`B60`, `mi300x`), then by spelling. Never one of
    another vendor; of all vendors where the name does not tell its own.
    """
    own = normalise(name)
    device, vendor = find(own), vendor_of(own)
    ranked = sorted(
        (d for d in DEVICES if d.name != own and d.vendor != "cpu" and vendor in (None, d.vendor)),
        key=lambda d: (
            device is None or d.target != device.target,
            not _names(own, d.name),
            -difflib.SequenceMatcher(None, own, d.name).ratio(),
        ),
    )
    return tuple(d.name for d in ranked[:limit])


def _names(said: str, name: str) -> bool:
    """Whether `said` is a part of a device's name as people say it, capitals aside."""
    part = normalise(said).casefold()
    return bool(part) and part in name.casefold()


def unknown(name: str) -> str | None:
    """A sentence on a device that the table does not have, with those that may be meant; None for one that it has."""
    if find(name) is not None:
        return None
    return f"{normalise(name)} is not in the device table (near: {', '.join(near(name))})"
