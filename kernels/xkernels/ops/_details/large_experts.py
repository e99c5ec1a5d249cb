"""Launching `large_gemm`: which layers and configs it takes, and its two projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xkernels.device import is_interpreted, of
from xkernels.ops._details.common import cdiv
from xkernels.ops._details.counters import counter
from xkernels.ops.align import Alignment
from xkernels.ops.prepared import PreparedExperts, can_describe
from xkernels.ops.scheme import BLOCK_K

BLOCK_M, BLOCK_N = 128, 256
# columns of a k-step by scheme: a line of 128 bytes; the sizes of the layer must be multiples of it
_STEPS = {"none": 64, "fp8_block": 128}


def fits(e: PreparedExperts, config: Mapping[str, Any], dtype: torch.dtype, at: torch.Tensor) -> bool:
    """Whether a config asks for these kernels (LARGE) and the layer is one that they are written for.

    dtype: of the layer's input and output. at: a tensor on the device.
    """
    if not config.get("LARGE", False) or is_interpreted() or "wgmma" not in of(at).features():
        return False
    step = _STEPS.get(e.scheme.kind, 0)
    block = e.scheme.block == (128, 128) and e.w1.dtype == torch.float8_e4m3fn
    return (
        step > 0
        and (block or e.scheme.kind == "none")
        and dtype == torch.bfloat16
        and config["BLOCK_SIZE_M"] == BLOCK_M
        and e.hidden % step == 0
        and e.padded % step == 0
        and e.b1 is None
        and e.b2 is None
        and e.activation.kind == "silu"
        and not e.activation.limit
        and can_describe(e.w1)
        and can_describe(e.w2)
    )


def up(x: torch.Tensor, scale: torch.Tensor | None, e: PreparedExperts, topk: int, alignment: Alignment, rows: int,
       config: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Activated rows [rows, N] in sorted order, bf16; for FP8 quantised, with scales [rows, N / 128].

    x: [tokens, H] bf16, or FP8 with `scale` [tokens, H / 128]; of any strides. GATHER false in a config: rows are
    copied into sorted order first, and loaded as the down projection loads its.
    """
    fp8, gather, tokens = scale is not None, bool(config.get("GATHER", True)), x.shape[0]
    if not gather:
        x = _sorted(x, alignment, rows, topk)
    x = x if can_describe(x) else x.contiguous()
    out = torch.empty(rows, e.padded, dtype=e.w1.dtype if fp8 else x.dtype, device=x.device)
    scales = torch.empty(rows, e.padded // BLOCK_K, dtype=torch.float32, device=x.device) if scale is not None else None
    _launch(
        config, rows, e.w1, e.w1_scale, alignment, tokens * topk, topk, a=x if gather else None,
        a_desc=None if gather else _tiles(x, 64, _STEPS[e.scheme.kind]), stride_am=x.stride(0), a_scale=scale,
        stride_sm=scale.stride(0) if scale is not None else 0, stride_sk=1,
        out_desc=_tiles(out, 64, BLOCK_N // 4 if fp8 else BLOCK_N // 2), out_scale=scales,
        stride_os=e.padded // BLOCK_K, UP=True, GATHER=gather, MUL_WEIGHT=False,
    )  # fmt: skip
    return out, scales


def _sorted(x: torch.Tensor, alignment: Alignment, rows: int, topk: int) -> torch.Tensor:
    """Rows of tokens in sorted order; padding repeats the last token, whatever it computes is not used."""
    return x[(alignment.sorted_ids[:rows] // topk).clamp_(max=x.shape[0] - 1).long()]


def down(rows: torch.Tensor, scale: torch.Tensor | None, scale_strides: tuple[int, int], e: PreparedExperts,
         weights: torch.Tensor, alignment: Alignment, config: Mapping[str, Any], weighted: bool,
         dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
    """Sorted rows through the down projection, scattered to [tokens, topk, H], times the router weights."""
    tokens, topk = weights.shape
    out = torch.empty(tokens, topk, e.hidden, dtype=dtype, device=rows.device)
    _launch(
        config, rows.shape[0], e.w2, e.w2_scale, alignment, tokens * topk, topk,
        a_desc=_tiles(rows, 64, _STEPS[e.scheme.kind]), a_scale=scale, stride_sm=scale_strides[0],
        stride_sk=scale_strides[1], out=out, stride_out=e.hidden, weight=weights if weighted else None, UP=False,
        GATHER=False, MUL_WEIGHT=weighted,
    )  # fmt: skip
    return out


# What a projection leaves out of the kernel's arguments.
_ABSENT: dict[str, Any] = {
    "a_desc": None, "a": None, "a_scale": None, "out_desc": None, "out": None, "out_scale": None, "weight": None,
    "stride_am": 0, "stride_sm": 0, "stride_sk": 0, "stride_out": 0, "stride_os": 0,
}  # fmt: skip


def _launch(config: Mapping[str, Any], rows: int, w: torch.Tensor, w_scale: torch.Tensor | None, alignment: Alignment,
            slots: int, topk: int, **arguments: Any) -> None:  # fmt: skip
    """One projection: persistent, a program a multiprocessor. `slots`: routed entries; `arguments`: its own ones."""
    from xkernels.ops._details.large_gemm import large_gemm

    fp8 = w_scale is not None
    step = _STEPS["fp8_block" if fp8 else "none"]
    strides = w_scale.stride() if w_scale is not None else (0, 0, 0)
    programs = min(cdiv(rows, BLOCK_M) * cdiv(w.shape[1], BLOCK_N), of(w).limits().units)
    pdl, dynamic = bool(config.get("PDL", False)), bool(config.get("DYNAMIC", True))
    stages, lead = int(config.get("STAGES", 4)), int(config.get("LEAD", 0))
    if not 0 <= lead < stages - 1:
        raise ValueError(f"LEAD must be 0 to STAGES - 2, which is {stages - 2}, not {lead}")
    large_gemm[(programs,)](
        **{**_ABSENT, **arguments}, w_desc=_tiles(w.view(-1, w.shape[2]), 128 if fp8 else BLOCK_N, step),
        w_scale=w_scale, sorted_ids=alignment.sorted_ids, experts=alignment.expert_ids,
        post=alignment.num_post_padded, counter=counter(w) if dynamic else None, num_valid=slots, N=w.shape[1],
        K=w.shape[2], stride_wse=strides[0], stride_wsn=strides[1], stride_wsk=strides[2], TOPK=topk,
        GROUP=int(config.get("GROUP_SIZE_M", 16)), BLOCK_K=step, STAGES=stages, FP8=fp8,
        DYNAMIC=dynamic, FENCE=arguments["GATHER"] and bool(config.get("FENCE", True)),
        LEAD=lead, PDL=pdl, num_warps=4, maxnreg=168, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _tiles(matrix: torch.Tensor, rows: int, cols: int) -> Any:
    """A descriptor of a matrix for tiles of [rows, cols], swizzled as the matrix unit wants them."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtype = {torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv}[matrix.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([rows, cols], dtype)
    return TensorDescriptor.from_tensor(matrix, [rows, cols], layout)
