"""Launching `large_gemm`: which layers and configs it takes, and its two projections."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from xkernels.device import is_interpreted, of
from xkernels.ops._details.common import cdiv
from xkernels.ops.align import Alignment
from xkernels.ops.prepared import PreparedExperts
from xkernels.ops.scheme import BLOCK_K

BLOCK_M, BLOCK_N = 128, 256
_SCHEMES = ("none", "fp8_block")


def fits(e: PreparedExperts, config: Mapping[str, Any], x: torch.Tensor) -> bool:
    """Whether a config asks for these kernels (LARGE) and the layer is one that they are written for."""
    if not config.get("LARGE", False) or is_interpreted() or "pdl" not in of(x).features():
        return False
    fp8 = e.scheme.kind == "fp8_block"
    if fp8 and (e.scheme.block != (128, 128) or e.w1.dtype != torch.float8_e4m3fn):
        return False
    step = 128 if fp8 else 64
    return (
        e.scheme.kind in _SCHEMES
        and x.dtype == torch.bfloat16
        and config["BLOCK_SIZE_M"] == BLOCK_M
        and e.hidden % step == 0
        and e.padded % step == 0
        and e.b1 is None
        and e.b2 is None
        and e.activation.kind == "silu"
        and not e.activation.limit
    )


def up(x: torch.Tensor, scale: torch.Tensor | None, e: PreparedExperts, topk: int, alignment: Alignment, rows: int,
       config: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Activated rows [rows, N] in sorted order, bf16; for FP8 quantised, with scales [rows, N / 128].

    x: [tokens, H] bf16, or FP8 with `scale` [tokens, H / 128].
    """
    fp8 = scale is not None
    out = torch.empty(rows, e.padded, dtype=e.w1.dtype if fp8 else x.dtype, device=x.device)
    scales = torch.empty(rows, e.padded // BLOCK_K, dtype=torch.float32, device=x.device) if fp8 else None
    columns = BLOCK_N // 2 // (2 if fp8 else 1)
    tokens = x.shape[0]
    _launch(
        config, rows, e.w1, x, None, scale, e.w1_scale, _tiles(out, 64, columns), None, scales, None, alignment,
        tokens * topk, (scale.stride(0), 1) if scale is not None else (0, 0), (0, e.padded // BLOCK_K), topk, True,
        True,
    )  # fmt: skip
    return out, scales


def down(rows: torch.Tensor, scale: torch.Tensor | None, scale_strides: tuple[int, int], e: PreparedExperts,
         weights: torch.Tensor, alignment: Alignment, config: Mapping[str, Any], weighted: bool,
         dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
    """Sorted rows through the down projection, scattered to [tokens, topk, H], times the router weights."""
    tokens, topk = weights.shape
    out = torch.empty(tokens, topk, e.hidden, dtype=dtype, device=rows.device)
    _launch(
        config, rows.shape[0], e.w2, rows, _tiles(rows, 64, 128 if scale is not None else 64), scale, e.w2_scale, None,
        out, None, weights if weighted else None, alignment, tokens * topk, scale_strides, (e.hidden, 0), topk, False,
        False,
    )  # fmt: skip
    return out


def _launch(config: Mapping[str, Any], rows: int, w: torch.Tensor, a: torch.Tensor, a_desc: Any, a_scale: Any,
            w_scale: Any, out_desc: Any, out: Any, out_scale: Any, weight: Any, alignment: Alignment, slots: int,
            s_strides: tuple[int, int], out_strides: tuple[int, int], topk: int, is_up: bool,
            gather: bool) -> None:  # fmt: skip
    from xkernels.ops._details.large_gemm import large_gemm

    fp8 = w_scale is not None
    step = 128 if fp8 else 64
    strides = w_scale.stride() if fp8 else (0, 0, 0)
    units = of(a).limits().units
    tiles = cdiv(rows, BLOCK_M) * cdiv(w.shape[1], BLOCK_N)
    pdl = bool(config.get("PDL", False))
    dynamic = bool(config.get("DYNAMIC", True))
    large_gemm[(min(tiles, units),)](
        a_desc, a if gather else None, a_scale, _tiles(w.view(-1, w.shape[2]), 128 if fp8 else BLOCK_N, step), w_scale,
        out_desc, out, out_scale, weight, alignment.sorted_ids, alignment.expert_ids, alignment.num_post_padded,
        _counter(a.device) if dynamic else None, slots, w.shape[1], w.shape[2], a.stride(0), *s_strides, *strides,
        *out_strides, TOPK=topk, GROUP=int(config.get("GROUP_SIZE_M", 16)), BLOCK_K=step,
        STAGES=int(config.get("STAGES", 4)), UP=is_up, FP8=fp8, GATHER=gather, DYNAMIC=dynamic,
        FENCE=gather and bool(config.get("FENCE", True)), LEAD=int(config.get("LEAD", 0)),
        PDL=pdl, MUL_WEIGHT=weight is not None, num_warps=4, maxnreg=168, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _tiles(matrix: torch.Tensor, rows: int, cols: int) -> Any:
    """A descriptor of a matrix for tiles of [rows, cols], swizzled as the matrix unit wants them."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtype = {torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv}[matrix.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([rows, cols], dtype)
    return TensorDescriptor.from_tensor(matrix, [rows, cols], layout)


@cache
def _counter(device: torch.device) -> torch.Tensor:
    """The tile counter of a device's launches, one after the other; the last block to look sets it back to zero."""
    return torch.zeros(1, dtype=torch.int32, device=device)
