"""Compile config files for the devices they are named after, on a machine that has none of them.

Each file is compiled for its own device's target with our kernel, in the tuner's compile children. What a file does not
say (hidden size, experts per token) does not enter the code beyond its divisibility by 16, so common sizes stand in.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moegate import devices
from moegate.configs import ConfigKey, ConfigTree, TreeFile
from moegate.errors import UsageError
from tuner.ahead import Compiled, CompilePool
from tuner.child.client import ChildSpec
from tuner.config import Config
from tuner.problem import Problem, Projection

__all__ = ["TARGETS", "Row", "compile_tree", "target_of"]

_HIDDEN, _TOPK = 2048, 8
_L2_BYTES, _UNITS, _BLOCKS = 50 << 20, 132, 2112

# Target -> Triton's backend, architecture, warp size, and what kernels may use there.
TARGETS: Mapping[str, tuple[str, str, int, tuple[str, ...]]] = {
    "sm_80": ("cuda", "80", 32, ()),
    "sm_86": ("cuda", "86", 32, ()),
    "sm_89": ("cuda", "89", 32, ()),
    "sm_90": ("cuda", "90", 32, ("pdl",)),
    "sm_100": ("cuda", "100", 32, ("pdl",)),
    "sm_103": ("cuda", "103", 32, ("pdl",)),
    "sm_120": ("cuda", "120", 32, ("pdl",)),
    "sm_121": ("cuda", "121", 32, ("pdl",)),
    "gfx942": ("hip", "gfx942", 64, ()),
    "gfx950": ("hip", "gfx950", 64, ()),
}
# Intel's compiler is another package that replaces triton, so that it needs an environment of its own.
ELSEWHERE: Mapping[str, str] = {"bmg": "needs triton-xpu in an environment of its own"}


@dataclass(frozen=True)
class Row:
    """What compiling one config of one file came to.

    `shared` is bytes per block, `spills` bytes per thread (None where the compiler does not say), `block_loads`
    whether descriptor loads became hardware block loads (None without descriptors, or where that cannot be read).
    """

    file: str
    batch_size: int
    projection: str
    target: str
    triton: str
    status: str
    error: str = ""
    shared: int | None = None
    spills: int | None = None
    block_loads: bool | None = None


def target_of(name: str) -> str:
    """A target's name as the table spells it; UsageError for one that is unknown."""
    text = name.strip().lower()
    text = f"sm_{text[2:].lstrip('_')}" if text.startswith("sm") else text
    if text not in TARGETS and text not in ELSEWHERE:
        raise UsageError(f"unknown target {name!r:.40}", field="--targets", fix=f"some of {', '.join(TARGETS)}")
    return text


def compile_tree(root: Path, targets: list[str], workers: int) -> list[Row]:
    """Compile every config file below `root` whose device has one of `targets`.

    Args:
        root: as for a config lookup. targets: names of `TARGETS`. workers: compile children at a time.
    """
    wanted = [target_of(name) for name in targets]
    tree = ConfigTree(root)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="moegate-compile-") as folder:
        spec = ChildSpec(Path(folder), env={"TRITON_CACHE_DIR": str(Path(folder) / "cache")})
        for item in tree.files():
            key = item.parsed.key if item.parsed is not None else None
            device = devices.find(key.device_name) if isinstance(key, ConfigKey) else None
            if device is not None and device.target in wanted and isinstance(key, ConfigKey):
                rows += _compile_file(tree, item, key, device, spec, workers)
    return rows


def _compile_file(
    tree: ConfigTree, item: TreeFile, key: ConfigKey, device: devices.Device, spec: ChildSpec, workers: int
) -> list[Row]:
    projection = item.parsed.projection if item.parsed is not None else "up"
    configs = {size: Config.of(entry) for size, entry in tree.load(item.path).items()}
    problem, why = _problem(key)
    why = ELSEWHERE.get(device.target, why)
    if problem is None or why:
        return [_row(item, size, projection, device.target, Compiled(None), why) for size in configs]
    distinct = list(dict.fromkeys(configs.values()))
    pool = CompilePool(spec, "moegate", problem, min(workers, len(distinct)))
    try:
        pool.aim(_aim(device))
        pool.prepare((projection, config) for config in distinct)
        done = {config: pool.wait((projection, config)) for config in distinct}
    finally:
        pool.close()
    return [_row(item, size, projection, device.target, done[config], "") for size, config in configs.items()]


def _problem(key: ConfigKey) -> tuple[Problem | None, str]:
    if key.per_channel_quant or key.dtype not in (None, "float32", "fp8_w8a8"):
        return None, f"our kernels have no {key.dtype or 'bfloat16'}" + (
            " per channel" if key.per_channel_quant else ""
        )
    dtype = key.dtype or "bfloat16"
    return Problem("fused_experts", key.E, key.N, _HIDDEN, min(_TOPK, key.E), dtype, key.block_shape), ""


def _aim(device: devices.Device) -> dict[str, Any]:
    backend, arch, warp, features = TARGETS[device.target]
    limits = [device.smem_bytes or 0, _L2_BYTES, _UNITS, _BLOCKS]
    return {"backend": backend, "arch": arch, "warp": warp, "features": list(features), "limits": limits}


def _row(item: TreeFile, size: int, projection: Projection, target: str, done: Compiled, skipped: str) -> Row:
    place = (item.path, size, projection, target, version("triton"))
    if skipped:
        return Row(*place, "skipped", skipped)
    if done.facts is None:
        return Row(*place, "failed", f"{done.error}: {done.reason}"[:400])
    facts = done.facts
    return Row(*place, "ok", "", facts["shared"], facts["spill_bytes"], facts.get("block_loads"))
