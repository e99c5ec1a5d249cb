"""Names of config files: the key, and its spellings in SGLang and vLLM.

`E={E},N={N},device_name={dev}[,dtype={d}][,block_shape=[n, k]][,per_channel_quant=True][_down].json` is SGLang's; vLLM
writes `block_shape=[n,k]` and has neither of the last two fields. Dense block-FP8 files are named `N={N},K={K},...`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

Projection = Literal["up", "down"]
Spelling = Literal["sglang", "vllm"]

# What SGLang's and vLLM's callers can put into the dtype field.
DTYPES: dict[Spelling, frozenset[str]] = {
    "sglang": frozenset({"fp8_w8a8", "int8_w8a8", "int4_w4a16", "int8_w8a16", "float32"}),
    "vllm": frozenset(
        {
            "fp8_w8a8",
            "fp8_w8a16",
            "int8_w8a8",
            "int8_w8a16",
            "int4_w4a16",
            "float32",
            "mxfp4_w4a16",
            "mxfp4_w4a4",
            "mxfp4_w4a8",
            "nvfp4_w4a16",
        }
    ),
}

_INT = r"([1-9][0-9]{0,8})"
_TAIL = (
    r",device_name=(?P<device>[^,/\x00-\x1f]*?)"
    r"(?:,dtype=(?P<dtype>[A-Za-z0-9_]+?))?"
    r"(?:,block_shape=\[(?P<bn>[0-9]{1,6}),(?P<space> ?)(?P<bk>[0-9]{1,6})\])?"
    r"(?P<pcq>,per_channel_quant=True)?"
    r"(?P<backend>,backend=[a-z0-9_]+)?"
    r"(?P<down>_down)?\.json"
)
_MOE = re.compile(rf"E={_INT},N={_INT}{_TAIL}")
_DENSE = re.compile(rf"N={_INT},K={_INT}{_TAIL}")


@dataclass(frozen=True)
class ConfigKey:
    """What a fused-MoE config file is looked up by.

    `E` experts of one rank, `N` intermediate size of one rank, `device_name` as in file names, `dtype` the dtype field
    (None for bf16 and fp16), `block_shape` (n, k) of block-quantised weights.
    """

    E: int
    N: int
    device_name: str
    dtype: str | None = None
    block_shape: tuple[int, int] | None = None
    per_channel_quant: bool = False

    def on(self, device_name: str) -> ConfigKey:
        """The same key for another device."""
        return replace(self, device_name=device_name)

    @property
    def words(self) -> str:
        """The key in a short form for messages."""
        extra = [self.dtype] if self.dtype else []
        extra += [f"block {list(self.block_shape)}"] if self.block_shape else []
        extra += ["per channel"] if self.per_channel_quant else []
        return f"E={self.E} N={self.N} {self.device_name}" + (f" ({', '.join(extra)})" if extra else "")


@dataclass(frozen=True)
class DenseKey:
    """What a dense block-FP8 config file (`N=..,K=..`) is looked up by."""

    N: int
    K: int
    device_name: str
    dtype: str | None = None
    block_shape: tuple[int, int] | None = None


@dataclass(frozen=True)
class ParsedName:
    """A config file's name taken apart.

    `spelling` is None where both engines write this name; `backend` is set for files of another kernel (vLLM writes
    `,backend=flydsl`).
    """

    key: ConfigKey | DenseKey
    projection: Projection
    spelling: Spelling | None
    backend: str | None = None


def parse_name(name: str) -> ParsedName | None:
    """Take a file name apart; None where it is no config file's name in any spelling."""
    if len(name) > 255:
        return None
    moe = _MOE.fullmatch(name)
    match = moe or _DENSE.fullmatch(name)
    if match is None:
        return None
    block = (int(match["bn"]), int(match["bk"])) if match["bn"] is not None else None
    down = match["down"] is not None
    spelling: Spelling | None = None
    if block is not None:
        spelling = "sglang" if match["space"] else "vllm"
    if down or match["pcq"]:
        spelling = "sglang"
    first, second = int(match[1]), int(match[2])
    if moe is not None:
        key: ConfigKey | DenseKey = ConfigKey(
            first, second, match["device"], match["dtype"], block, match["pcq"] is not None
        )
    else:
        if down or match["pcq"]:
            return None
        key = DenseKey(first, second, match["device"], match["dtype"], block)
    backend = match["backend"].removeprefix(",backend=") if match["backend"] else None
    return ParsedName(key, "down" if down else "up", spelling, backend)


def format_name(key: ConfigKey, projection: Projection = "up", spelling: Spelling = "sglang") -> str:
    """The file name of `key`. vLLM's spelling has no per-channel and no down field: they are left out."""
    parts = [f"E={key.E},N={key.N},device_name={key.device_name}"]
    if key.dtype:
        parts.append(f"dtype={key.dtype}")
    if key.block_shape and all(key.block_shape):
        gap = " " if spelling == "sglang" else ""
        parts.append(f"block_shape=[{key.block_shape[0]},{gap}{key.block_shape[1]}]")
    if spelling == "vllm":
        return ",".join(parts) + ".json"
    if key.per_channel_quant:
        parts.append("per_channel_quant=True")
    return ",".join(parts) + ("_down" if projection == "down" else "") + ".json"


def format_dense_name(key: DenseKey) -> str:
    """The file name of a dense block-FP8 config."""
    parts = [f"N={key.N},K={key.K},device_name={key.device_name}"]
    if key.dtype:
        parts.append(f"dtype={key.dtype}")
    if key.block_shape:
        parts.append(f"block_shape=[{key.block_shape[0]}, {key.block_shape[1]}]")
    return ",".join(parts) + ".json"
