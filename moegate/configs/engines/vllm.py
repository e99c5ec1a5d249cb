"""vLLM 0.32.0's lookup: one flat folder, no Triton version, one config for both projections.

Every device with `H200` among the words of its name is `NVIDIA_H200`. A top-level `triton_version` is dropped.
"""

from __future__ import annotations

import re
from pathlib import Path

from moegate.configs.engines.lenient import read_like_engine
from moegate.configs.names import ConfigKey, Projection, format_name
from moegate.configs.tree import Reason, Resolution


def lookup(root: Path | None, key: ConfigKey, projection: Projection, triton: str) -> Resolution:
    """What `get_moe_configs` of vLLM returns with VLLM_TUNED_CONFIG_FOLDER at `root`, its own folder left aside.

    `triton` plays no part. A `down` answer is the up config: vLLM runs both projections with it.

    Raises:
        EngineRaises: vLLM would fail.
    """
    device = re.sub(r"[\s/]+", "_", key.device_name)
    alias = "NVIDIA_H200" if "H200" in device.split("_") and device != "NVIDIA_H200" else None
    name = format_name(key.on(alias or device), "up", "vllm")
    default = Resolution(key, projection, None, "default", None, (name,), engine="vllm")
    if root is None:
        return default
    folder = root / "configs" if (root / "configs").is_dir() else root
    if not (folder / name).exists():
        return default
    configs = read_like_engine("vllm", folder / name, drop=("triton_version",))
    if not configs:
        return default
    reason: Reason = "up-config" if projection == "down" else "alias" if alias else "exact"
    return Resolution(key, projection, name, reason, alias, (name,), configs, "vllm")
