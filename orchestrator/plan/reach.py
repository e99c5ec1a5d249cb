"""Can tuning reach a cell at all? Where dispatch picks a backend that looks no config up, the cell is a control."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moegate import devices
from moegate.dispatch import Capabilities, DispatchRefused, Problem, Selection, select
from moegate.records import PoolSpec

__all__ = ["Reach", "platform_of", "reach"]

# What asks moegate.dispatch about a pool that is not here: the versions of our own constraints.
_TORCH, _TRITON = "2.13.0", "3.8.0"
_PLATFORMS = {"cpu": "cpu", "cuda": "cuda-sm90", "rocm": "rocm-gfx942", "xpu": "xpu-bmg"}
# Kernel packages that an engine's own image brings and that its `auto` takes first.
_ENGINE_PACKAGES: Mapping[str, frozenset[str]] = {
    "moegate": frozenset(),
    "sglang": frozenset({"sgl_kernel"}),
    "vllm": frozenset({"sgl_kernel"}),
}
_LOOKS_UP = frozenset({"triton"})


@dataclass(frozen=True)
class Reach:
    """Whether a config is looked up, through which backend, and in words why. `refused` ends planning with exit 2."""

    reachable: bool
    backend: str
    why: str
    refused: str | None = None


def platform_of(pool: PoolSpec) -> str:
    """The dispatch platform of a pool: by its device's name where it is known, else the vendor's most common one."""
    device = devices.find(pool.device_name) if pool.device_name else None
    return device.platform if device else _PLATFORMS[pool.device]


def reach(pool: PoolSpec, axes: Mapping[str, Any], env: Mapping[str, str]) -> Reach:
    """Say whether the config lookup of a kernel-bench, serve or accuracy cell is reachable."""
    request, engine = str(axes["moe_runner_backend"]), str(axes["engine"])
    op, dtype = str(axes.get("op", "fused_experts")), str(axes.get("dtype", "bfloat16"))
    platform = platform_of(pool)
    try:
        chosen = _select(op, platform, dtype, engine, request, env)
    except DispatchRefused as error:
        if engine == "moegate":
            return Reach(False, request, "", refused=f"{error.message} (fix: {error.fix})")
        # Another engine has names that our table does not know; its own refusal will be the cell's result.
        return Reach(request.startswith("triton"), request, f"{request} is {engine}'s own name for a backend")
    found = chosen.resolved in _LOOKS_UP
    how = f"{request} resolves to {chosen.resolved} on {platform}" if request == "auto" else f"asked for {request}"
    tail = "which looks a config up" if found else "which looks no config up"
    return Reach(found, chosen.resolved, f"{how}, {tail}")


def _select(op: str, platform: str, dtype: str, engine: str, request: str, env: Mapping[str, str]) -> Selection:
    quant = dtype if dtype not in ("bfloat16", "float16", "float32") else None
    caps = Capabilities(
        platform=platform,
        torch=_TORCH,
        triton=_TRITON,
        interpreter=platform == "cpu",
        packages=_ENGINE_PACKAGES[engine],
        env=tuple(sorted(env.items())),
    )
    return select(op, Problem(dtype=dtype if quant is None else "bfloat16", quant=quant), caps, request)
