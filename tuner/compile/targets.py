"""What can be compiled for: a table of targets, and the stand-ins that Triton and our launchers ask meanwhile."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

from moegate.errors import UsageError
from xkernels.device import Limits
from xkernels.device.cuda import served

__all__ = ["TARGETS", "SimulatedDevice", "Target", "activate", "activate_target", "find", "missing"]


@dataclass(frozen=True)
class Target:
    """One architecture.

    `backend`, `arch`, `warp`: Triton's target. `shared`: bytes of shared memory one block may use. `units`:
    multiprocessors of the largest device of the kind. `fp8`: torch's name of its FP8 type. `features`: as
    `xkernels.device` names them. `package`: what brings the Triton backend, for the message where it is missing.
    `block_loads`: where the hardware has loads that descriptor loads should become, the text that Triton keeps and what
    is found in it then.
    """

    name: str
    backend: str
    arch: Any
    warp: int
    shared: int
    units: int
    fp8: str = "float8_e4m3fn"
    features: frozenset[str] = frozenset()
    package: str = "triton"
    block_loads: tuple[str, str] | None = None


# TMA, which came with sm_90.
_TMA = ("ptx", r"cp\.async\.bulk\.tensor")
_BMG: dict[str, Any] = {
    "name": "Intel(R) Arc(TM) Pro B60 Graphics", "vendor": "Intel(R) Corporation", "version": "12.60.7",
    "device_arch": "bmg", "architecture": 85899345920, "max_work_group_size": 1024, "max_num_sub_groups": 64,
    "sub_group_sizes": [16, 32], "gpu_eu_count": 160, "max_compute_units": 160, "local_mem_size": 131072,
    "has_subgroup_matrix_multiply_accumulate": True, "has_subgroup_matrix_multiply_accumulate_tensor_float32": False,
    "has_subgroup_2d_block_io": True, "has_subgroup_local_block_io": True, "has_bfloat16_conversions": True,
    "has_atomic64": True, "has_fp16": True, "has_fp64": True,
}  # fmt: skip

TARGETS: tuple[Target, ...] = (
    Target("sm_90", "cuda", 90, 32, 232448, 132, features=frozenset({"pdl", "wgmma"}), block_loads=_TMA),
    Target("sm_100", "cuda", 100, 32, 232448, 148, features=frozenset({"pdl"}), block_loads=_TMA),
    Target("gfx942", "hip", "gfx942", 64, 65536, 304, fp8="float8_e4m3fnuz"),
    Target("gfx950", "hip", "gfx950", 64, 163840, 256),
    Target(
        "bmg",
        "xpu",
        _BMG,
        16,
        131072,
        20,
        package="triton-xpu 3.3.0b1 in an environment of its own and name its Python with --python",
        block_loads=("llir", r"2DBlockRead|2d_block_read"),
    ),
)


def find(name: str) -> Target:
    """The target called `name` (`sm90` and `sm_90` alike). UsageError for an unknown one."""
    word = name.strip().lower().replace("sm_", "sm")
    for target in TARGETS:
        if target.name.replace("sm_", "sm") == word:
            return target
    raise UsageError(f"unknown target {name!r}", field="--targets", fix=", ".join(t.name for t in TARGETS))


def missing(target: Target) -> str | None:
    """Why the installed Triton cannot compile for a target; None if it can."""
    module = {"cuda": "nvidia", "hip": "amd", "xpu": "intel"}[target.backend]
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if importlib.util.find_spec(f"triton.backends.{module}") is None:
        return f"this Triton has no {module} backend: install {target.package}"
    return None


class _Driver:
    """Answers what a compile asks of a driver."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        """The target compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """Always device 0."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Always the default stream."""
        del device
        return 0

    def is_active(self) -> bool:
        """As a driver that found its device."""
        return True


def activate(target: Target) -> None:
    """Make Triton compile for `target` in this process; once per process, since Triton keeps what it compiled."""
    activate_target(target.backend, target.arch, target.warp)


def activate_target(backend: str, arch: int | str, warp: int) -> None:
    """As `activate`, for a target by its parts, such as ("cuda", 90, 32)."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(_Driver(GPUTarget(backend, arch, warp)))


@dataclass(frozen=True)
class SimulatedDevice:
    """What our launchers ask of a device, answered for a target."""

    target: Target
    index: int = 0
    kind: str = field(default="cuda")

    def features(self) -> frozenset[str]:
        """As the live device would say."""
        return served(self.target.features)

    def limits(self) -> Limits:
        """As the live device would say; the cache size matters to nobody who compiles."""
        return Limits(self.target.shared, 0, self.target.units, self.target.units * 16)
