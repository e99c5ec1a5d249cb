"""From config files to compile jobs: one per distinct config of a kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegate import canonical, devices
from moegate.configs import ConfigKey, DenseKey, parse_name
from moegate.configs.positions import line_of
from moegate.configs.values import DENSE_FIELDS, FIELDS, is_batch_size, launch_problems
from moegate.errors import UsageError

__all__ = ["FileJobs", "Refused", "jobs_of"]

# The name of a file holds no hidden size; a compile depends on it only through its divisors, which this one has all.
_HIDDEN = 4096
# Schemes of experts' weights that a kernel of ours takes: what a file name says of dtype, block shape and scales per
# channel -> the kind. Activations of a file without a dtype are bf16 or fp16: the tile is compiled for the former.
_EXPERTS: Mapping[tuple[str | None, tuple[int, int] | None, bool], str] = {
    (None, None, False): "none",
    ("float32", None, False): "none",
    ("fp8_w8a8", None, False): "fp8_tensor",
    ("fp8_w8a8", None, True): "fp8_channel",
    ("fp8_w8a8", (128, 128), False): "fp8_block",
    ("mxfp4_w4a16", None, False): "mxfp4",
    ("mxfp4_w4a16", (1, 32), False): "mxfp4",
}
_LINEAR_BLOCKS = ((128, 128), (1, 128))

Words = dict[str, Any]


@dataclass(frozen=True)
class Refused:
    """What nothing can be launched with, and where it stands: a batch size, or (None) no batch size or the whole file.

    `field` is a path in the file, such as `16.num_warps`.
    """

    batch_size: int | None
    error: str
    line: int | None = None
    field: str | None = None


@dataclass(frozen=True)
class FileJobs:
    """A file's entries: the jobs of its batch sizes, or the reason why it has none.

    `projection` is None for a file of a dense layer.
    """

    file: str
    entries: tuple[tuple[int, Words], ...] = ()
    targets: tuple[str, ...] = ()
    reason: str | None = None
    projection: str | None = None
    refused: tuple[Refused, ...] = ()


def jobs_of(path: Path, targets: tuple[str, ...]) -> FileJobs:
    """What to compile of one file, for its own device's target; what keeps it from that is in the answer."""
    parsed = parse_name(path.name)
    if parsed is None:
        return FileJobs(str(path), reason="no config file's name")
    projection = parsed.projection if isinstance(parsed.key, ConfigKey) else None
    if parsed.backend is not None:
        return FileJobs(str(path), reason=f"for a kernel of {parsed.backend}", projection=projection)
    words = _kernel(parsed.key, projection)
    if isinstance(words, str):
        return FileJobs(str(path), reason=words, projection=projection)
    target, reason = _target(parsed.key.device_name, targets)
    if target is None:
        return FileJobs(str(path), reason=reason, projection=projection)
    entries, refused = _read(path, words)
    return FileJobs(str(path), entries, (target,), None, projection, refused)


def _target(device_name: str, targets: tuple[str, ...]) -> tuple[str | None, str | None]:
    """The target that a file's device means where it is one of `targets`, else why there is none."""
    device = devices.find(device_name)
    if device is None:
        return None, f"no device called {device_name!r} is known, and so no target of it"
    if device.target not in targets:
        return None, f"{device_name} is of target {device.target}, which is not among {', '.join(targets)}"
    return device.target, None


def _kernel(key: ConfigKey | DenseKey, projection: str | None) -> Words | str:
    """What a job says of its kernel, or why we have none."""
    scheme = f"dtype {key.dtype} {list(key.block_shape) if key.block_shape else ''}".strip()
    if isinstance(key, DenseKey):
        if key.dtype != "fp8_w8a8" or key.block_shape not in _LINEAR_BLOCKS:
            return f"moegate has no kernel for a dense layer of {scheme}"
        return {"op": "block_fp8_linear", "N": key.N, "K": key.K, "block": list(key.block_shape)}
    kind = _EXPERTS.get((key.dtype, key.block_shape, key.per_channel_quant))
    if kind is None:
        return f"moegate has no kernel for {scheme}{' per channel' if key.per_channel_quant else ''}"
    dtype = "float32" if key.dtype == "float32" else "bfloat16"
    return {"op": "fused_experts", "projection": projection, "kind": kind, "dtype": dtype, "N": key.N,
            "hidden": _HIDDEN}  # fmt: skip


def _read(path: Path, words: Words) -> tuple[tuple[tuple[int, Words], ...], tuple[Refused, ...]]:
    """The jobs of a file's batch sizes, and what of it nothing can be launched with."""
    try:
        text = canonical.read_text(path)
        content = canonical.loads_json(text, file=path)
    except UsageError as error:
        return (), (Refused(None, error.message, error.line),)
    if isinstance(content, dict):
        content.pop("triton_version", None)  # vLLM's files may have it
    refused: dict[str | None, Refused] = {}
    for problem in launch_problems(content, fields=FIELDS if words["op"] == "fused_experts" else DENSE_FIELDS):
        key = problem.path[0] if problem.path else None
        size = int(key) if key is not None and is_batch_size(key) else None
        where = Refused(size, problem.message, line_of(text, problem.path), ".".join(problem.path) or None)
        refused.setdefault(key, where)
    if None in refused:
        return (), (refused[None],)
    good = {size: config for size, config in content.items() if size not in refused}
    return tuple(_entries(good, words)), tuple(refused.values())


def _entries(content: Mapping[str, Words], words: Words) -> Iterator[tuple[int, Words]]:
    for size, config in content.items():
        job = {**words, "config": config}
        yield int(size), {**job, "key": json.dumps(job, sort_keys=True)}
