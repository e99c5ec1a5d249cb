"""From config files to compile jobs: one per distinct config, projection and scheme."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegate import canonical, devices
from moegate.configs import ConfigKey, parse_name

__all__ = ["FileJobs", "jobs_of"]

# The name of a file holds no hidden size; a compile depends on it only through its divisors, which this one has all.
_HIDDEN = 4096
_KINDS = {None: "none", "float32": "none"}


@dataclass(frozen=True)
class FileJobs:
    """A file's entries: the jobs of its batch sizes, or the reason why it has none."""

    file: str
    entries: tuple[tuple[int, dict[str, Any]], ...] = ()
    targets: tuple[str, ...] = ()
    reason: str | None = None
    projection: str = "up"


def jobs_of(path: Path, targets: tuple[str, ...]) -> FileJobs:
    """What to compile of one file: for its own device's target where that is among `targets`, else for all of them."""
    parsed = parse_name(path.name)
    if parsed is None:
        return FileJobs(str(path), reason="no config file's name")
    key = parsed.key
    if not isinstance(key, ConfigKey):
        return FileJobs(str(path), reason="no file of routed experts")
    kind = _kind(key)
    if kind is None:
        return FileJobs(
            str(path), reason=f"moegate has no kernel for dtype {key.dtype} {key.block_shape or ''}".strip()
        )
    device = devices.find(key.device_name)
    own = (device.target,) if device is not None and device.target in targets else ()
    projection = parsed.projection
    entries = tuple(_entries(canonical.load_json(path), key, kind, projection))
    return FileJobs(str(path), entries, own or targets, None, projection)


def _entries(content: Any, key: ConfigKey, kind: str, projection: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for size, config in content.items():
        words = {
            "projection": projection, "kind": kind, "dtype": "float32" if key.dtype == "float32" else "bfloat16",
            "N": key.N, "hidden": _HIDDEN, "config": config,
        }  # fmt: skip
        yield int(size), {**words, "key": json.dumps(words, sort_keys=True)}


def _kind(key: ConfigKey) -> str | None:
    if key.dtype in _KINDS:
        return _KINDS[key.dtype]
    if key.dtype != "fp8_w8a8":
        return None
    if key.block_shape is None:
        return "fp8_channel" if key.per_channel_quant else "fp8_tensor"
    return "fp8_block" if tuple(key.block_shape) == (128, 128) else None
