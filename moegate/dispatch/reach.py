"""Whether dispatch ever gets to the lookup of Triton configs: a tuned file on an unreachable path changes nothing."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from moegate import devices
from moegate.configs.names import ConfigKey
from moegate.configs.values import Engine
from moegate.dispatch.engines import sglang, vllm
from moegate.dispatch.model import Capabilities, DispatchRefused, Problem, Step
from moegate.dispatch.rows import rows_of
from moegate.dispatch.select import AUTO, select
from moegate.errors import UsageError
from moegate.families import Layout

# Enough to ask about any platform; the versions only have to be ones that the rows accept.
_TORCH, _TRITON = "2.13.0", "3.8.0"
_OP = "fused_experts"
REQUESTS: Mapping[Engine, tuple[str, ...]] = {
    "moegate": (AUTO, *dict.fromkeys(row.backend for row in rows_of(_OP))),
    "sglang": sglang.REQUESTS,
    "vllm": vllm.REQUESTS,
}
"""The MoE backends that each engine may be asked for."""

_BY_PREFIX = (("NVIDIA", "cuda-sm90"), ("AMD", "rocm-gfx942"), ("Intel", "xpu-bmg"))


@dataclass(frozen=True)
class Reach:
    """Whether the Triton lookup is on the served path, why, and the backends that were looked at."""

    reachable: bool
    why: str
    platform: str | None
    resolved: str
    chain: tuple[Step, ...] = ()


def platform_of(device_name: str) -> tuple[str | None, bool]:
    """(platform, whether it is known rather than read off the vendor's name)."""
    device = devices.find(device_name)
    if device is not None:
        return device.platform, True
    name = devices.normalise(device_name)
    return next((platform for prefix, platform in _BY_PREFIX if name.startswith(prefix)), None), False


def ensure_request(engine: Engine, request: str, field: str = "--backend") -> None:
    """Refuse a word that names no MoE backend of `engine`: nothing can be said of it.

    Raises:
        UsageError: naming those that there are, first the one that may be meant.
    """
    known = REQUESTS[engine]
    if request not in known:
        meant = difflib.get_close_matches(request, known, n=1)
        hint = f"did you mean {meant[0]}? There are" if meant else "one of"
        raise UsageError(f"{engine} has no MoE backend {request!r:.60}", field=field, fix=f"{hint} {', '.join(known)}")


def reachability(engine: Engine, layout: Layout, key: ConfigKey, request: str = "auto") -> Reach:
    """Whether `engine`, asked for `request`, looks `key` up at all.

    Args:
        engine: whose dispatch is asked. layout: the model. key: shape and device. request: a backend or `auto`.
    """
    platform, known = platform_of(key.device_name)
    if platform is None:
        return Reach(True, f"{key.device_name} is an unknown device: assumed to run Triton kernels", None, "triton")
    guess = "" if known else f" ({key.device_name} is an unknown device, taken for {platform})"
    if engine == "moegate":
        return _ours(layout, key, request, platform, guess)
    rule = (sglang.moe_backend if engine == "sglang" else vllm.moe_backend)(layout, key, platform, request)
    return Reach(rule.backend == "triton", rule.why + guess, platform, rule.backend, rule.chain)


def _ours(layout: Layout, key: ConfigKey, request: str, platform: str, guess: str) -> Reach:
    problem = Problem(
        layout.dtype, key.dtype if key.dtype != "float32" else None, key.block_shape, key.per_channel_quant
    )
    # On XPU the engines' library stands before Triton: ask as if it were installed, as it is where people serve.
    packages = frozenset({"sgl_kernel"}) if platform.startswith("xpu") else frozenset()
    caps = Capabilities(platform, _TORCH, _TRITON, interpreter=platform == "cpu", packages=packages)
    try:
        selection = select(_OP, problem, caps, request)
    except DispatchRefused as refused:
        return Reach(False, refused.message + guess, platform, "refused", refused.chain)
    if selection.resolved == "triton":
        return Reach(True, f"{request} resolves to triton on {platform}{guess}", platform, "triton", selection.chain)
    why = f"{request} resolves to {selection.resolved} on {platform}, which looks no Triton config up{guess}"
    if request == "auto":
        why += "; ask for triton by name"
    return Reach(False, why, platform, selection.resolved, selection.chain)
