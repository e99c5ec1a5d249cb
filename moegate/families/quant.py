"""Quantisation blocks of config.json, read into what a config file's name and a kernel's scheme need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moegate.errors import UsageError


@dataclass(frozen=True)
class Quant:
    """How the experts' weights are stored.

    Args:
        method: `quant_method` of the file, or `none`.
        dtype: the dtype field of config files (`fp8_w8a8`, ...), None for bf16, fp16 and float32 weights.
        block_shape: (n, k) of block scales; (0, g) means groups of g along k, which names leave out.
        per_channel: scales per output channel and per token.
    """

    method: str = "none"
    dtype: str | None = None
    block_shape: tuple[int, int] | None = None
    per_channel: bool = False


NONE = Quant()


def read_quant(config: Mapping[str, Any], file: str | None) -> Quant:
    """The quantisation of the experts, from `quantization_config` (or `compression_config`).

    Raises:
        UsageError: the block is there but its method or its numbers are not understood.
    """
    block = config.get("quantization_config")
    field = "quantization_config"
    if block is None:
        block, field = config.get("compression_config"), "compression_config"
    if block is None:
        return NONE
    if not isinstance(block, dict):
        raise UsageError("must be an object", file=file, field=field)
    method = (
        block.get("quant_method")
        or block.get("quant_algo")
        or ("compressed-tensors" if "config_groups" in block else None)
    )
    if not isinstance(method, str):
        raise UsageError("has no quant_method", file=file, field=field, fix=f"one of {', '.join(sorted(_READERS))}")
    reader = _READERS.get(method.lower().replace("_", "-"))
    if reader is None:
        raise UsageError(
            f"{method!r} is not understood",
            file=file,
            field=f"{field}.quant_method",
            fix=f"one of {', '.join(sorted(_READERS))}",
        )
    return reader(method, block, file)


def _positive(value: Any, field: str, file: str | None, *, zero: bool = False) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not (0 if zero else 1) <= value <= 1 << 20:
        raise UsageError(f"is {value!r:.60}; must be a positive integer", file=file, field=field)
    return value


def _block_shape(value: Any, field: str, file: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise UsageError(f"is {value!r:.60}; must be two integers", file=file, field=field, fix="[128, 128]")
    return _positive(value[0], field, file), _positive(value[1], field, file)


def _fp8(method: str, block: Mapping[str, Any], file: str | None) -> Quant:
    shape = _block_shape(block.get("weight_block_size"), "quantization_config.weight_block_size", file)
    return Quant(method, "fp8_w8a8", shape)


def _mxfp8(method: str, block: Mapping[str, Any], file: str | None) -> Quant:
    shape = _block_shape(block.get("weight_block_size"), "quantization_config.weight_block_size", file)
    return Quant(method, "fp8_w8a8", shape or (1, 32))


def _channel_fp8(method: str, block: Mapping[str, Any], file: str | None) -> Quant:
    return Quant(method, "fp8_w8a8", per_channel=True)


def _channel_int8(method: str, block: Mapping[str, Any], file: str | None) -> Quant:
    return Quant(method, "int8_w8a8", per_channel=True)


def _mxfp4(method: str, block: Mapping[str, Any], file: str | None) -> Quant:
    return Quant(method, "mxfp4_w4a16", (1, 32))


def _grouped_int(method: str, block: Mapping[str, Any], file: str | None) -> Quant:
    bits = block.get("bits", block.get("w_bit", 4))
    if bits not in (4, 8):
        raise UsageError(f"is {bits!r:.20}; 4 and 8 are understood", file=file, field="quantization_config.bits")
    group = block.get("group_size", block.get("q_group_size", 128))
    size = 0 if group == -1 else _positive(group, "quantization_config.group_size", file)
    return Quant(method, "int4_w4a16" if bits == 4 else "int8_w8a16", (0, size) if size else None)


def _modelopt(method: str, block: Mapping[str, Any], file: str | None) -> Quant:
    algorithm = str(block.get("quant_algo", method)).upper()
    if "FP4" in algorithm:
        return Quant(method, "nvfp4_w4a16", (1, 16))
    return Quant(method, "fp8_w8a8", per_channel="PER_CHANNEL" in algorithm)


def _compressed(method: str, block: Mapping[str, Any], file: str | None) -> Quant:
    groups = block.get("config_groups")
    where = "quantization_config.config_groups"
    if not isinstance(groups, dict) or not groups:
        raise UsageError("must be an object with at least one group", file=file, field=where)
    first = next(iter(groups.values()))
    weights = first.get("weights") if isinstance(first, dict) else None
    if not isinstance(weights, dict):
        raise UsageError("has no weights", file=file, field=where)
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    activations = first.get("input_activations") is not None
    if kind == "float" and bits == 8:
        shape = _block_shape(weights.get("block_structure"), f"{where}.weights.block_structure", file)
        return Quant(method, "fp8_w8a8", shape if strategy == "block" else None, strategy == "channel")
    if kind == "float" and bits == 4:
        return Quant(method, "nvfp4_w4a16", (1, 16))
    if kind == "int" and bits == 8 and activations:
        return Quant(method, "int8_w8a8", per_channel=strategy == "channel")
    if kind == "int" and bits in (4, 8):
        group = weights.get("group_size")
        size = 0 if group in (None, -1) else _positive(group, f"{where}.weights.group_size", file)
        return Quant(method, "int4_w4a16" if bits == 4 else "int8_w8a16", (0, size) if size else None)
    raise UsageError(
        f"{bits!r:.20}-bit {kind!r:.20} weights are not understood",
        file=file,
        field=f"{where}.weights",
        fix="float 8 or 4, int 8 or 4",
    )


def _quark(method: str, block: Mapping[str, Any], file: str | None) -> Quant:
    layer = block.get("global_quant_config")
    weight = layer.get("weight") if isinstance(layer, dict) else None
    if isinstance(weight, list) and weight:
        weight = weight[0]
    if not isinstance(weight, dict):
        raise UsageError("has no weight", file=file, field="quantization_config.global_quant_config")
    dtype = str(weight.get("dtype", ""))
    if dtype.startswith("fp8"):
        return Quant(method, "fp8_w8a8", per_channel=weight.get("qscheme") == "per_channel")
    if dtype == "fp4":
        return Quant(method, "mxfp4_w4a16", (1, 32))
    if dtype == "int8":
        return Quant(method, "int8_w8a8", per_channel=weight.get("qscheme") == "per_channel")
    raise UsageError(
        f"{dtype!r:.40} is not understood", file=file, field="quantization_config.global_quant_config.weight.dtype"
    )


_READERS = {
    "fp8": _fp8,
    "mxfp8": _mxfp8,
    "w8a8-fp8": _channel_fp8,
    "w8a8-int8": _channel_int8,
    "mxfp4": _mxfp4,
    "awq": _grouped_int,
    "awq-marlin": _grouped_int,
    "gptq": _grouped_int,
    "gptq-marlin": _grouped_int,
    "moe-wna16": _grouped_int,
    "auto-round": _grouped_int,
    "modelopt": _modelopt,
    "modelopt-fp8": _modelopt,
    "modelopt-fp4": _modelopt,
    "fp8-pb-wo": _fp8,
    "nvfp4": _modelopt,
    "compressed-tensors": _compressed,
    "quark": _quark,
}
