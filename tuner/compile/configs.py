"""From config files to compile jobs: one per distinct config, projection and scheme."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegate import canonical, devices
from moegate.configs import ConfigKey, parse_name
from moegate.configs.values import is_batch_size, launch_problems
from moegate.errors import UsageError

__all__ = ["FileJobs", "jobs_of"]

# The name of a file holds no hidden size; a compile depends on it only through its divisors, which this one has all.
_HIDDEN = 4096
_KINDS = {None: "none", "float32": "none"}


@dataclass(frozen=True)
class FileJobs:
    """A file's entries: the jobs of its batch sizes, or the reason why it has none.

    `refused`: what nothing can be launched with, by batch size (None: no batch size at all), and why.
    """

    file: str
    entries: tuple[tuple[int, dict[str, Any]], ...] = ()
    targets: tuple[str, ...] = ()
    reason: str | None = None
    projection: str = "up"
    refused: tuple[tuple[int | None, str], ...] = ()


def jobs_of(path: Path, targets: tuple[str, ...]) -> FileJobs:
    """What to compile of one file: for its own device's target where that is among `targets`, else for all of them.

    Raises:
        UsageError: the file cannot be read, or holds no batch sizes.
    """
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
    content = canonical.load_json(path)
    if isinstance(content, dict):
        content.pop("triton_version", None)  # vLLM's files may have it
    refused = _refused(path, content)
    good = {size: config for size, config in content.items() if size not in refused}
    return FileJobs(
        str(path), tuple(_entries(good, key, kind, projection)), own or targets, None, projection,
        tuple((int(size) if is_batch_size(size) else None, why) for size, why in refused.items()),
    )  # fmt: skip


def _refused(path: Path, content: Any) -> dict[str, str]:
    """The keys of a file that nothing can be launched for, each with what is wrong first."""
    refused: dict[str, str] = {}
    for problem in launch_problems(content):
        if not problem.path:
            raise UsageError(problem.message, file=path, fix=problem.fix)
        refused.setdefault(problem.path[0], problem.message)
    return refused


def _entries(
    content: dict[str, Any], key: ConfigKey, kind: str, projection: str
) -> Iterator[tuple[int, dict[str, Any]]]:
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
