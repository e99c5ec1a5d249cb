"""Platforms that dispatch can be asked about: one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moegate.errors import UsageError


@dataclass(frozen=True)
class Platform:
    """One platform name and the other words for it."""

    name: str
    vendor: str
    spellings: tuple[str, ...] = ()


PLATFORMS: tuple[Platform, ...] = (
    Platform("cuda-sm80", "nvidia", ("sm_80", "sm80", "sm_86", "sm86")),
    Platform("cuda-sm89", "nvidia", ("sm_89", "sm89")),
    Platform("cuda-sm90", "nvidia", ("sm_90", "sm90")),
    Platform("cuda-sm100", "nvidia", ("sm_100", "sm100", "sm_103", "sm103")),
    Platform("cuda-sm120", "nvidia", ("sm_120", "sm120", "sm_121", "sm121")),
    Platform("rocm-gfx942", "amd", ("gfx942",)),
    Platform("rocm-gfx950", "amd", ("gfx950",)),
    Platform("xpu-bmg", "intel", ("bmg", "xpu")),
    Platform("npu", "huawei", ("ascend",)),
    Platform("cpu", "cpu"),
)

NAMES: tuple[str, ...] = tuple(platform.name for platform in PLATFORMS)
CUDA: frozenset[str] = frozenset(name for name in NAMES if name.startswith("cuda"))
ROCM: frozenset[str] = frozenset(name for name in NAMES if name.startswith("rocm"))
BLACKWELL: frozenset[str] = frozenset({"cuda-sm100", "cuda-sm120"})
XPU: frozenset[str] = frozenset({"xpu-bmg"})
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
