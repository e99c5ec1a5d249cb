"""How weights are quantised: read from a checkpoint's quantisation config, never guessed from a dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["none", "fp8_tensor", "fp8_channel", "fp8_block", "mxfp4"]
KINDS: tuple[Kind, ...] = ("none", "fp8_tensor", "fp8_channel", "fp8_block", "mxfp4")
MXFP4_GROUP = 32
BLOCK_K = 128


@dataclass(frozen=True)
class Scheme:
    """A quantisation scheme: `kind`, and for `fp8_block` the block of weights (rows, columns) that share a scale.

    Raises ValueError for a kind that is not known, and for a block that `block_shape` does not take.
    """

    kind: Kind = "none"
    block: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"quantisation kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if (self.block is None) == (self.kind == "fp8_block"):
            raise ValueError(f"a block shape belongs to fp8_block and only to it: {self}")
        if self.block is not None:
            object.__setattr__(self, "block", block_shape(self.block))

    @property
    def fp8(self) -> bool:
        """Whether weights and activations are FP8."""
        return self.kind.startswith("fp8_")


NONE = Scheme()


def block_shape(value: Sequence[int]) -> tuple[int, int]:
    """A weight block shape, list or tuple alike, that the block-FP8 kernels take: [1, 128] or [128, 128].

    Raises ValueError naming what was given for anything else, such as [1, 32], [64, 64], a wrong length or no sequence.
    """
    shape = list(value) if isinstance(value, Sequence) else value
    if shape not in ([1, BLOCK_K], [BLOCK_K, BLOCK_K]):
        raise ValueError(f"weight block shape must be [1, {BLOCK_K}] or [{BLOCK_K}, {BLOCK_K}], not {shape!r}")
    return int(value[0]), int(value[1])


def scheme_from_config(config: Mapping[str, Any] | None) -> Scheme:
    """The scheme of a Hugging Face `quantization_config` (None: unquantised).

    Known: quant_method `fp8` with or without `weight_block_size`; `compressed-tensors` FP8 with strategy tensor,
    channel or block; `mxfp4`. Raises ValueError naming the field and what is supported otherwise.
    """
    if not config:
        return NONE
    method = config.get("quant_method")
    if method == "mxfp4":
        return Scheme("mxfp4")
    if method == "fp8":
        size = config.get("weight_block_size")
        return Scheme("fp8_tensor") if size is None else Scheme("fp8_block", block_shape(size))
    if method == "compressed-tensors":
        return _compressed(config)
    raise ValueError(f"quantization_config.quant_method {method!r}: supported are fp8, compressed-tensors and mxfp4")


def _compressed(config: Mapping[str, Any]) -> Scheme:
    groups = config.get("config_groups") or {}
    found = {_group_scheme(name, group) for name, group in groups.items()}
    if len(found) != 1:
        raise ValueError(f"quantization_config.config_groups must describe one scheme, not {len(found)}")
    return found.pop()


def _group_scheme(name: str, group: Mapping[str, Any]) -> Scheme:
    weights = group.get("weights") or {}
    if weights.get("type") != "float" or weights.get("num_bits") != 8:
        raise ValueError(f"config_groups.{name}.weights: supported is type float with num_bits 8, not {weights}")
    strategy = weights.get("strategy")
    if strategy == "tensor":
        return Scheme("fp8_tensor")
    if strategy == "channel":
        return Scheme("fp8_channel")
    if strategy == "block":
        return Scheme("fp8_block", block_shape(weights.get("block_structure") or ()))
    raise ValueError(f"config_groups.{name}.weights.strategy {strategy!r}: supported are tensor, channel and block")
