"""Rules that look at one config file: its name, its values, what its device can hold."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegate import canonical, devices
from moegate.configs import ConfigKey, DenseKey, ParsedName, parse_name
from moegate.configs.engines import EngineLookup
from moegate.configs.positions import Positions, line_of
from moegate.configs.values import DENSE_FIELDS, FIELDS, is_batch_size, problems
from moegate.devices import Device
from moegate.errors import UsageError
from moegate.records.findings import Finding
from moegate.text import plain
from orchestrator.check.rules import finding
from orchestrator.check.trees import Entry

MAX_BYTES = 4 << 20
"""No config file comes near this; what does is refused unread."""
UNREADABLE_FIX = "put a readable file there"

# Bytes per element of (activations, weights) by dtype field, for the lower bound on shared memory.
_BYTES: Mapping[str | None, tuple[float, float]] = {
    None: (2, 2), "float32": (4, 4), "fp8_w8a8": (1, 1), "int8_w8a8": (1, 1), "int8_w8a16": (2, 1),
    "fp8_w8a16": (2, 1), "int4_w4a16": (2, 0.5), "mxfp4_w4a16": (2, 0.5),
}  # fmt: skip

_LARGEST_TILE = 1024
_DENSE_DTYPES = frozenset({"fp8_w8a8", "int8_w8a8"})


@dataclass(frozen=True)
class FileFacts:
    """What the rules over a whole tree need of one file, once it has been read.

    `block_m` maps batch sizes to BLOCK_SIZE_M; `digest` identifies the content; both are empty where it is damaged.
    """

    entry: Entry
    shown: str
    parsed: ParsedName | None
    block_m: Mapping[int, int]
    digest: str


def check_file(entry: Entry, shown: str, engine: EngineLookup) -> tuple[FileFacts, list[Finding]]:
    """Read one file and apply the rules that need nothing else.

    Args:
        entry: the file. shown: its path as findings print it. engine: whose lookup and kernel will see it.
    """
    try:
        return check_bytes(entry, shown, engine, canonical.read_file(entry.path, MAX_BYTES))
    except UsageError as error:
        broken = finding("bad-value", shown, 1, error.message, fix=UNREADABLE_FIX)
    return FileFacts(entry, shown, parse_name(entry.name), {}, ""), [*_name_findings(entry, shown, engine), broken]


def check_bytes(entry: Entry, shown: str, engine: EngineLookup, content: bytes) -> tuple[FileFacts, list[Finding]]:
    """As `check_file`, for content that is already here."""
    found = list(_name_findings(entry, shown, engine))
    parsed = parse_name(entry.name)
    text, data, broken = _parse(content, shown)
    if broken is not None:
        return FileFacts(entry, shown, parsed, {}, ""), [*found, broken]
    if parsed is not None and _of_another_kernel(parsed):
        return FileFacts(entry, shown, parsed, {}, digest_of(data)), found
    device = None if parsed is None else devices.find(parsed.key.device_name)
    found += _value_findings(text, data, shown, parsed, device, engine)
    block_m: dict[int, int] = {}
    if isinstance(data, dict) and parsed is not None:
        usable = [(key, value) for key, value in data.items() if is_batch_size(key) and isinstance(value, dict)]
        found += _group_findings(text, usable, shown, parsed, engine)
        found += _smem_findings(text, usable, shown, parsed, device, engine)
        block_m = {int(k): v["BLOCK_SIZE_M"] for k, v in usable if isinstance(v.get("BLOCK_SIZE_M"), int)}
    return FileFacts(entry, shown, parsed, block_m, digest_of(data) if block_m else ""), _one_per_line(found)


def digest_of(data: Any) -> str:
    """What two files share that hold the same configs, in whatever order and layout."""
    counted = {k: v for k, v in data.items() if k != "triton_version"} if isinstance(data, dict) else data
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()


def _parse(content: bytes, shown: str) -> tuple[str, Any, Finding | None]:
    text = ""
    try:
        text = content.decode("utf-8")
        return text, canonical.loads_json(text, file=shown), None
    except UnicodeDecodeError as error:
        return "", None, finding("bad-value", shown, 1, f"is not UTF-8: byte {error.start}", fix="save it as UTF-8")
    except UsageError as error:
        line, fix = error.line or 1, error.fix
        if "twice" in error.message:
            repeated = Positions(text).duplicates
            line = repeated[0][1] if repeated else line
            fix = "delete one of the two: the engine silently takes the last"
        elif "is not a JSON number" in error.message:
            fix = "write a number"
        return "", None, finding("bad-value", shown, line, error.message, fix=fix)


def _name_findings(entry: Entry, shown: str, engine: EngineLookup) -> Iterator[Finding]:
    parsed = parse_name(entry.name)
    if parsed is None:
        yield finding("unparsable-name", shown, 1, f"{entry.name!r:.200} is no config file's name")
        return
    key = parsed.key
    if not key.device_name:
        yield finding("empty-device", shown, 1, "device_name is empty: no device reports that")
        return
    if key.device_name in devices.FALLBACK_NAMES:
        shared = devices.FALLBACK_NAMES[key.device_name]
        yield finding("fallback-device-name", shown, 1, f"{key.device_name} is what drivers call {shared}")
    elif (why := _why_unreachable(parsed, engine)) is not None:
        yield finding("unreachable", shown, 1, why)


def _why_unreachable(parsed: ParsedName, engine: EngineLookup) -> str | None:
    key = parsed.key
    if not devices.is_field(key.device_name):
        near = ", ".join(devices.near(key.device_name, 2))
        return f"no known device reports {key.device_name} (near: {near}; the table is moegate/devices.py)"
    if isinstance(key, DenseKey):
        if key.dtype in _DENSE_DTYPES and key.block_shape is None:
            return f"the dense lookup asks for dtype={key.dtype} with a block_shape only"
        return None
    if parsed.backend is not None:
        return None if engine.name == "vllm" else f"{engine.name} never asks for backend={parsed.backend}"
    if parsed.spelling == "vllm" and engine.name == "sglang":
        return "SGLang writes block_shape=[n, k] with a space"
    if parsed.spelling == "sglang" and engine.name == "vllm":
        return "vLLM writes block_shape=[n,k] without a space and has no _down or per_channel_quant field"
    return engine.why_unreachable(key)


def _of_another_kernel(parsed: ParsedName) -> bool:
    """Files whose values are another kernel's business: `backend=flydsl`, channel-wise dense FP8."""
    return parsed.backend is not None or (isinstance(parsed.key, DenseKey) and parsed.key.dtype not in _DENSE_DTYPES)


def _value_findings(
    text: str, data: Any, shown: str, parsed: ParsedName | None, device: Device | None, engine: EngineLookup
) -> list[Finding]:
    dense = parsed is not None and isinstance(parsed.key, DenseKey)
    vendor = None if device is None else device.vendor
    fields = DENSE_FIELDS if dense else FIELDS
    wrong = list(problems(data, engine=engine.name, vendor=vendor, fields=fields))
    if not wrong:
        return []
    lines = Positions(text).lines
    return [finding(p.rule, shown, _line(lines, p.path), p.message, fix=p.fix) for p in wrong]


def _group_findings(
    text: str, usable: list[tuple[str, Any]], shown: str, parsed: ParsedName, engine: EngineLookup
) -> Iterator[Finding]:
    key = parsed.key
    if not key.block_shape or not key.block_shape[1]:
        return
    device = devices.find(key.device_name)
    if isinstance(key, DenseKey) and (device is None or device.vendor != "nvidia"):
        return  # the dense kernel of the other vendors unrolls over groups
    group = key.block_shape[1]
    for size, entry in usable:
        tile = entry.get("BLOCK_SIZE_K")
        if isinstance(tile, bool) or not isinstance(tile, int) or tile <= 0 or group % tile == 0:
            continue
        if engine.name == "moegate" and entry.get("BLOCK_SIZE_M") == 1:
            continue  # that kernel's chunks consist of whole groups
        clamped = engine.over_group == "clamped" and tile > group and isinstance(key, ConfigKey)
        says = f"BLOCK_SIZE_K {tile} at batch size {size} " + ("exceeds" if tile > group else "does not divide")
        instead = f": {engine.name} launches {min(key.block_shape)} instead" if clamped else ""
        yield finding(
            "block-k-exceeds-group",
            shown,
            line_of(text, (size, "BLOCK_SIZE_K")),
            f"{says} the group of {group}{instead}",
            severity="warning" if clamped else None,
        )


def _smem_findings(
    text: str,
    usable: list[tuple[str, Any]],
    shown: str,
    parsed: ParsedName,
    device: Device | None,
    engine: EngineLookup,
) -> Iterator[Finding]:
    if device is None or device.smem_bytes is None:
        return
    wide_a, wide_b = _BYTES.get(parsed.key.dtype, (1, 0.5))
    for size, entry in usable:
        m, n, k = entry.get("BLOCK_SIZE_M"), entry.get("BLOCK_SIZE_N"), entry.get("BLOCK_SIZE_K")
        stages = entry.get("num_stages")
        if not (type(m) is int and type(n) is int and type(k) is int and type(stages) is int):
            continue  # missing or no number: other rules say so
        if max(m, n, k) > _LARGEST_TILE:
            continue
        if engine.name == "moegate" and m == 1 and parsed.projection == "down":
            continue  # our down kernel for single rows keeps its weights in registers
        if engine.over_group == "clamped" and parsed.key.block_shape and all(parsed.key.block_shape):
            k = min(k, *parsed.key.block_shape)
        need = int((stages - 1) * (m * wide_a + n * wide_b) * k)
        if need > device.smem_bytes:
            words = f"batch size {size} needs at least {need} bytes of shared memory; "
            yield finding(
                "smem-exceeds", shown, line_of(text, (size,)), f"{words}{device.name} has {device.smem_bytes}"
            )


def _line(lines: Mapping[tuple[str, ...], int], path: tuple[str, ...]) -> int:
    return next((lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in lines), 1)


def _one_per_line(found: list[Finding]) -> list[Finding]:
    """One finding per rule and line; what else that line says is counted in the message."""
    kept: dict[tuple[str, int], Finding] = {}
    more: dict[tuple[str, int], int] = {}
    for item in found:
        place = (item.rule, item.line)
        if place in kept:
            more[place] = more.get(place, 0) + 1
        else:
            kept[place] = item
    return [
        Finding(f.rule, f.severity, f.file, f.line, f"{f.message} (and {more[p]} more on this line)", f.fix)
        if p in more
        else f
        for p, f in kept.items()
    ]


def shown_path(path: Path, start: Path) -> str:
    """`path` as findings print it: relative to `start` where it lies inside it, and harmless on a terminal."""
    absolute = os.path.abspath(path)  # noqa: PTH100 - links must stay visible
    inside = os.path.relpath(absolute, start)
    text = (absolute if inside.startswith("..") else inside).replace(os.sep, "/")
    return plain(os.fsencode(text).decode("utf-8", "backslashreplace"))
