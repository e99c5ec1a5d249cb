"""Launching `large_gemm`: which layers and configs it takes, and its two projections."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from xkernels.device import is_interpreted, of
from xkernels.ops._details.common import cdiv
from xkernels.ops._details.counters import counter
from xkernels.ops.align import Alignment
from xkernels.ops.prepared import PreparedExperts, can_describe
from xkernels.ops.scheme import BLOCK_K

BLOCK_M, BLOCK_N, WARPS = 128, 256, 8
# 48 KB each, beside the 32 KB that results pass through. With more the config is refused and not taken as for fewer: it
# has to run on the Triton kernels too, wherever this one is not to be had.
MOST_STAGES = 4
# By scheme: columns of a line of 128 bytes, and the least of a k-step; k-steps that the second warp group starts later,
# as measured.
_LINE = {"none": 64, "fp8_block": 128}
_LEAST = {"none": 32, "fp8_block": 128}
_LEAD = {"none": 1, "fp8_block": 2}
_RULES = ("INLINE", "PROGRAMS", "QUANT_OUT", "SWAP_AB")  # of the Triton kernels' launcher


def fits(e: PreparedExperts, config: Mapping[str, Any], dtype: torch.dtype, at: torch.Tensor) -> bool:
    """Whether a projection runs on `large_gemm`; see `refusal`."""
    return refusal(e, config, dtype, at) is None


def refusal(e: PreparedExperts, config: Mapping[str, Any], dtype: torch.dtype, at: torch.Tensor) -> str | None:
    """Why a projection stays on the Triton kernels; None where `large_gemm` takes it.

    dtype: of the layer's input and output. at: a tensor on the device.
    """
    return _other_config(e, config) or other_layer(e, dtype) or other_device(at)


def _other_config(e: PreparedExperts, config: Mapping[str, Any]) -> str | None:
    """What of a config is not this kernel's: it has one tile, and every load is a descriptor's or a gather."""
    wanted = {"BLOCK_SIZE_M": BLOCK_M, "BLOCK_SIZE_N": BLOCK_N, "num_warps": WARPS, "USE_TMA": True}
    for name, value in wanted.items():
        if config.get(name) != value:
            return f"{name} is not {value}"
    line, step = _LINE.get(e.scheme.kind, 0), config.get("BLOCK_SIZE_K")
    if step not in (line, _LEAST.get(e.scheme.kind, 0)):
        return f"BLOCK_SIZE_K is not {line}"
    most = MOST_STAGES * line // step
    if not 2 <= int(config.get("num_stages", MOST_STAGES)) <= most:
        return f"num_stages is not 2 to {most}"
    return next((f"{name} is a rule of the other kernels" for name in _RULES if name in config), None)


def other_layer(e: PreparedExperts, dtype: torch.dtype) -> str | None:
    """What of a layer is not for kernels that read whole lines of bf16 or of FP8 with blocks of scales."""
    step = _LINE.get(e.scheme.kind)
    if step is None:
        return f"neither bfloat16 nor block scales: {e.scheme.kind}"
    if dtype != torch.bfloat16 or e.w1.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        return "neither bfloat16 nor float8_e4m3fn with bfloat16"
    if e.scheme.kind == "fp8_block" and e.scheme.block != (BLOCK_K, BLOCK_K):
        return f"blocks of scales are not {BLOCK_K} by {BLOCK_K}"
    if e.hidden % step or e.intermediate % step:
        return f"sizes are no multiples of {step}"
    if e.b1 is not None or e.b2 is not None:
        return "biases"
    if e.activation.kind != "silu" or e.activation.limit:
        return "another activation than SiLU without limit"
    return None if can_describe(e.w1) and can_describe(e.w2) else "no descriptors of these weights"


def other_device(at: torch.Tensor) -> str | None:
    """Why no kernel of Hopper's products runs on the device of `at`."""
    return _NO_GLUON if "wgmma" in of(at).features() else "the device has no wgmma"


def no_gluon(kernel: str = "large_gemm") -> str | None:
    """Why there is no such kernel under the installed Triton: it is written for the Gluon of 3.6 and 3.8."""
    if is_interpreted():
        return "Triton's interpreter runs no Gluon"
    try:
        importlib.import_module(f"xkernels.ops._details.{kernel}")
    except (ImportError, AttributeError, TypeError) as error:
        return f"this Triton's Gluon is another one: {error}"
    return None


_NO_GLUON = no_gluon()  # now: tuners settle the cache keys of kernels that are loaded when they begin


def up(x: torch.Tensor, scale: torch.Tensor | None, e: PreparedExperts, topk: int, alignment: Alignment, rows: int,
       config: Mapping[str, Any], overlap: bool) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Activated rows [rows, N] in sorted order, bf16; for FP8 quantised, with scales [rows, N / 128].

    x: [tokens, H] bf16, or FP8 with `scale` [tokens, H / 128]; of any strides. overlap: start while the predecessor
    drains.
    """
    fp8 = scale is not None
    x = gatherable(x)
    out = torch.empty(rows, e.padded, dtype=e.w1.dtype if fp8 else x.dtype, device=x.device)
    scales = torch.empty(rows, e.padded // BLOCK_K, dtype=torch.float32, device=x.device) if scale is not None else None
    _launch(
        config, overlap, rows, e.w1, e.w1_scale, alignment, x.shape[0] * topk, topk, a=x, stride_am=x.stride(0),
        a_scale=scale, stride_sm=scale.stride(0) if scale is not None else 0, stride_sk=1,
        out_desc=tiles_of(out, 64, BLOCK_N // 4 if fp8 else BLOCK_N // 2), out_scale=scales,
        stride_os=e.padded // BLOCK_K, UP=True, MUL_WEIGHT=False,
    )  # fmt: skip
    return out, scales


def gatherable(x: torch.Tensor) -> torch.Tensor:
    """x, copied unless its rows can be gathered 16 bytes at once.

    Triton compiles for whether an address and a stride are multiples of 16, and only of such rows does it copy so many
    past the registers.
    """
    if x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)  # of one row `contiguous` would keep all


def down(rows: torch.Tensor, scale: torch.Tensor | None, scale_strides: tuple[int, int], e: PreparedExperts,
         weights: torch.Tensor, alignment: Alignment, config: Mapping[str, Any], weighted: bool,
         dtype: torch.dtype, overlap: bool) -> torch.Tensor:  # fmt: skip
    """Sorted rows through the down projection, scattered to [tokens, topk, H], times the router weights."""
    tokens, topk = weights.shape
    out = torch.empty(tokens, topk, e.hidden, dtype=dtype, device=rows.device)
    _launch(
        config, overlap, rows.shape[0], e.w2, e.w2_scale, alignment, tokens * topk, topk,
        a_desc=tiles_of(rows, 64, int(config["BLOCK_SIZE_K"])), a_scale=scale, stride_sm=scale_strides[0],
        stride_sk=scale_strides[1], out=out, stride_out=e.hidden, weight=weights if weighted else None, UP=False,
        MUL_WEIGHT=weighted,
    )  # fmt: skip
    return out


# What a projection leaves out of the kernel's arguments.
_ABSENT: dict[str, Any] = {
    "a_desc": None, "a": None, "a_scale": None, "out_desc": None, "out": None, "out_scale": None, "weight": None,
    "stride_am": 0, "stride_sm": 0, "stride_sk": 0, "stride_out": 0, "stride_os": 0,
}  # fmt: skip


def _launch(config: Mapping[str, Any], overlap: bool, rows: int, w: torch.Tensor, w_scale: torch.Tensor | None,
            alignment: Alignment, slots: int, topk: int, **arguments: Any) -> None:  # fmt: skip
    """One projection: persistent, a program a multiprocessor. `slots`: routed entries; `arguments`: its own ones."""
    from xkernels.ops._details.large_gemm import large_gemm

    kind = "fp8_block" if w_scale is not None else "none"
    strides = w_scale.stride() if w_scale is not None else (0, 0, 0)
    programs = min(cdiv(rows, BLOCK_M) * cdiv(w.shape[1], BLOCK_N), of(w).limits().units)
    step, stages = int(config["BLOCK_SIZE_K"]), int(config.get("num_stages", MOST_STAGES))
    large_gemm[(programs,)](
        **{**_ABSENT, **arguments}, w_desc=tiles_of(w.view(-1, w.shape[2]), 128 if kind != "none" else BLOCK_N,
        step), w_scale=w_scale, sorted_ids=alignment.sorted_ids, experts=alignment.expert_ids,
        post=alignment.num_post_padded, counter=counter(w), num_valid=slots, N=w.shape[1], K=w.shape[2],
        stride_wse=strides[0], stride_wsn=strides[1], stride_wsk=strides[2], TOPK=topk,
        GROUP=int(config.get("GROUP_SIZE_M", 1)), BLOCK_K=step, STAGES=stages, FP8=kind != "none",
        LEAD=min(_LEAD[kind], stages - 2), PDL=overlap, num_warps=4, maxnreg=168,
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip


def tiles_of(matrix: torch.Tensor, rows: int, cols: int) -> Any:
    """A descriptor of a matrix for tiles of [rows, cols], swizzled as the matrix unit wants them."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtype = {torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv}[matrix.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([rows, cols], dtype)
    return TensorDescriptor.from_tensor(matrix, [rows, cols], layout)
