"""Entry guards: predicates that several places share, so that weight conversion and kernel choice cannot disagree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moegate.dispatch.model import DispatchRefused, Problem, Step
from moegate.families.quant import Quant

Payload = Literal["mxfp8", "bfloat16"]


def mxfp8_payload(*, use_mxfp8: bool, payload: str, has_scales: bool, flag: str = "--quantization mxfp8") -> Payload:
    """What an expert-parallel payload is, under MXFP8 dispatch or not.

    Three branches and no fourth: MXFP8 bytes with their scales, bf16 without any, or an error.

    Args:
        use_mxfp8: whether the flag asks for MXFP8 payloads.
        payload: dtype of what arrived (`float8_e4m3fn`, `bfloat16`, ...).
        has_scales: whether scales came with it.
        flag: what the user would have to change.

    Raises:
        DispatchRefused: naming the flag and the payload's dtype.
    """
    said = f"{payload} {'with' if has_scales else 'without'} scales"
    if use_mxfp8 and payload.startswith("float8_e4m3") and has_scales:
        return "mxfp8"
    if payload == "bfloat16" and not has_scales:
        return "bfloat16"
    if use_mxfp8 and payload.startswith("float8_e4m3"):
        raise DispatchRefused(f"{flag}: the payload is {said}", fix="send the scales with the payload")
    wanted = "float8_e4m3fn with scales, or bfloat16 without" if use_mxfp8 else "bfloat16 without scales"
    raise DispatchRefused(f"{flag}: the payload is {said}; it must be {wanted}", fix=f"set {flag} to match the payload")


@dataclass(frozen=True)
class Replacement:
    """A backend that was asked for, what serves instead, and the precondition that was missing."""

    requested: str
    resolved: str
    why: str

    @property
    def step(self) -> Step:
        """The same as a step of a chain, for reports."""
        return Step(self.requested, False, f"replaced by {self.resolved}: {self.why}")


def serves_per_channel_fp8(quant: Quant | Problem) -> bool:
    """Whether experts are FP8 with per-channel weight scales and per-token activations.

    The one predicate for converting weights and for choosing the module that runs them; it only reads.
    """
    if isinstance(quant, Problem):
        return quant.quant == "fp8_w8a8" and quant.per_channel and quant.block_shape is None
    return quant.dtype == "fp8_w8a8" and quant.per_channel and quant.block_shape is None


def aiter_or_triton(quant: Quant | Problem, request: str, *, aiter: bool) -> tuple[str, Replacement | None]:
    """The runner of per-channel FP8 experts on ROCm, and the replacement to report where the request is not met.

    Args:
        quant: how the weights are stored. request: `auto`, `aiter` or `triton`. aiter: whether AITER can run here.
    """
    if request == "triton":
        return "triton", None
    if aiter and serves_per_channel_fp8(quant):
        return "aiter", None
    if request == "auto":
        return "triton", None
    why = "AITER cannot run here" if not aiter else "the weights have no per-channel scales"
    return "triton", Replacement("aiter", "triton", why)
