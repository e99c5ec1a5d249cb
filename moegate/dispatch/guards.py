"""Entry guards: predicates of rows, kept where the conversion of weights can ask them too, so that the two agree."""

from __future__ import annotations

from moegate.dispatch.model import Capabilities, Problem
from moegate.families.quant import Quant

_FLAG = "--quantization mxfp8"


def mxfp8_payload(problem: Problem, caps: Capabilities) -> str | None:
    """What comes over an all-to-all to MXFP8 experts: MXFP8 bytes with their scales, bf16 without any, and no third."""
    if problem.quant != "mxfp8" or problem.a2a == "none":
        return None
    eight = problem.payload.startswith("float8_e4m3")
    if (eight and problem.payload_scales) or (problem.payload == "bfloat16" and not problem.payload_scales):
        return None
    said = f"{_FLAG}: the payload is {problem.payload} {'with' if problem.payload_scales else 'without'} scales"
    return f"{said}; it must be float8_e4m3fn with scales, or bfloat16 without"


def serves_per_channel_fp8(quant: Quant | Problem) -> bool:
    """Whether experts are FP8 with per-channel weight scales and per-token activations; it only reads."""
    scheme = quant.quant if isinstance(quant, Problem) else quant.dtype
    return scheme == "fp8_w8a8" and quant.per_channel and quant.block_shape is None


def no_tensor_scales(problem: Problem, caps: Capabilities) -> str | None:
    """FP8 weights have a scale per channel or per block.

    With one per tensor it is the checkpoint's quantisation method that decides between AITER and Triton, and a problem
    does not know that.
    """
    if problem.quant != "fp8_w8a8" or problem.block_shape is not None or serves_per_channel_fp8(problem):
        return None
    return "does not serve fp8_w8a8 weights without per-channel scales or a block"
