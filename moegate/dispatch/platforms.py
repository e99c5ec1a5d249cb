"""Platforms that dispatch can be asked about: one table.

A platform is a family of architectures with the same answers. Every architecture that a live device may report
(`xkernels.device`) belongs to one; what Triton does not compile for and torch no longer runs on has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moegate.devices import FP8_PLATFORMS
from moegate.errors import UsageError


@dataclass(frozen=True)
class Platform:
    """One platform: its name, and the architectures of its family as devices and compilers name them."""

    name: str
    vendor: str
    architectures: tuple[str, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        """The other words for it: each architecture bare, with an underscore, and as a live device reports it."""
        prefix = f"{self.name.split('-')[0]}-" if "-" in self.name else ""
        words = (word for arch in self.architectures for word in (arch, _underscored(arch), f"{prefix}{arch}"))
        return tuple(word for word in dict.fromkeys(words) if word != self.name)


def _underscored(architecture: str) -> str:
    return f"sm_{architecture[2:]}" if architecture.startswith("sm") else architecture


PLATFORMS: tuple[Platform, ...] = (
    Platform("cuda-sm80", "nvidia", ("sm80", "sm86", "sm87", "sm88")),
    Platform("cuda-sm89", "nvidia", ("sm89",)),
    Platform("cuda-sm90", "nvidia", ("sm90",)),
    Platform("cuda-sm100", "nvidia", ("sm100", "sm103")),
    Platform("cuda-sm110", "nvidia", ("sm110", "sm101")),  # one part; CUDA 12 gave it the second number
    Platform("cuda-sm120", "nvidia", ("sm120", "sm121")),
    Platform("rocm-gfx90a", "amd", ("gfx90a", "gfx908")),  # CDNA 1 and 2: no FP8 matrix unit
    Platform("rocm-gfx942", "amd", ("gfx942",)),
    Platform("rocm-gfx950", "amd", ("gfx950",)),
    # RDNA 3 and 3.5, without an FP8 matrix unit, and RDNA 4, with one.
    Platform(
        "rocm-gfx11",
        "amd",
        ("gfx11", "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"),
    ),
    Platform("rocm-gfx12", "amd", ("gfx12", "gfx1200", "gfx1201")),
    Platform("rocm-gfx1250", "amd", ("gfx1250",)),
    # Every Intel GPU: what tells them apart for a row is asked of the device itself. `xpu` is one without a known name.
    Platform("xpu-bmg", "intel", ("bmg", "pvc", "acm", "xpu")),
    Platform("npu", "huawei", ("ascend",)),
    Platform("cpu", "cpu"),
)

NAMES: tuple[str, ...] = tuple(platform.name for platform in PLATFORMS)
CUDA: frozenset[str] = frozenset(name for name in NAMES if name.startswith("cuda"))
ROCM: frozenset[str] = frozenset(name for name in NAMES if name.startswith("rocm"))
BLACKWELL: frozenset[str] = frozenset({"cuda-sm100", "cuda-sm110", "cuda-sm120"})
CDNA3_4: frozenset[str] = frozenset({"rocm-gfx942", "rocm-gfx950"})
XPU: frozenset[str] = frozenset({"xpu-bmg"})
# Families without an FP8 matrix unit where torch multiplies no FP8 matrices either; on CPUs and Intel GPUs it does.
NO_FP8_UNIT: frozenset[str] = frozenset(NAMES) - FP8_PLATFORMS - XPU - {"cpu"}
GPUS: frozenset[str] = CUDA | ROCM | XPU
EVERY: frozenset[str] = frozenset(NAMES)

_BY_SPELLING: Mapping[str, str] = {
    spelling: platform.name for platform in PLATFORMS for spelling in (platform.name, *platform.spellings)
}


def platform_name(text: str) -> str:
    """The platform that `text` names in any spelling; UsageError where it names none."""
    name = _BY_SPELLING.get(text.strip().lower())
    if name is None:
        raise UsageError(f"unknown platform {text!r:.60}", field="platform", fix=f"one of {', '.join(NAMES)}")
    return name
