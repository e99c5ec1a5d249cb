"""The projections for BLOCK_SIZE_M 1, as `experts` calls them: a block is one entry of the routing, a row a vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xkernels.ops._details import vector_gemm as _k
from xkernels.ops._details.common import cdiv
from xkernels.ops.align import Alignment
from xkernels.ops.prepared import GROUP, PreparedExperts
from xkernels.ops.scheme import BLOCK_K

_LANES = 32  # of a warp; where there are more, values move between threads once
_LOAD = 16  # bytes of a thread's load, and at most so many columns that vectors of two bytes fit one too
_STAGES = 3  # of a config that does not say
_WHOLE = {"fp8_block": BLOCK_K, "mxfp4": 32}  # columns of a chunk, at least: it consists of whole groups of scales


def fits(config: Mapping[str, Any]) -> bool:
    """Whether a config asks for these kernels."""
    return int(config["BLOCK_SIZE_M"]) == 1


def up(
    x: torch.Tensor, xs: torch.Tensor | None, e: PreparedExperts, weights: torch.Tensor, alignment: Alignment,
    config: Mapping[str, Any], weight_on_input: bool, dtype: torch.dtype, options: Mapping[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Activated rows [entries, padded N] of `dtype` in sorted order.

    x [M, H], with one scale per row in `xs` where it is FP8. options: of the launch, PDL among them.
    """
    _check(config)
    n2, block_n = e.w1.shape[1], int(config["BLOCK_SIZE_N"])
    out = torch.empty(weights.numel(), n2 // 2, dtype=dtype, device=x.device)
    one = _one(e, block_n // 2) and e.intermediate % BLOCK_K == 0
    # A pass over the input has waited for the alignment, which nothing else here has.
    ready = bool(options["PDL"]) and xs is not None
    _k.up_rows[(weights.numel() * cdiv(n2, block_n),)](
        x, xs, e.w1, e.w1_scale, e.b1, out, weights, alignment.sorted_ids, alignment.expert_ids,
        alignment.num_post_padded, weights.shape[1], n2, x.stride(0), x.stride(1), 0 if xs is None else xs.stride(0),
        e.w1.stride(0), e.w1.stride(1), *_strides(e.w1_scale), out.stride(0), STAGES=_stages(config),
        READY=ready, HAS_BIAS=e.b1 is not None, MUL_WEIGHT=weight_on_input, GROUP_N=GROUP,
        SCALES="one" if one else "each", **_shapes(e, config, e.hidden, block_n // 2), BLOCK_N=block_n,
        **e.activation.constexprs(), **options,
    )  # fmt: skip
    return out


def down(
    h: torch.Tensor, hs: torch.Tensor | None, e: PreparedExperts, weights: torch.Tensor, alignment: Alignment,
    config: Mapping[str, Any], multiply: bool, dtype: torch.dtype, options: Mapping[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Sorted rows through the down projection, times the router weight where `multiply`: [tokens, topk, H]."""
    _check(config)
    tokens, topk = weights.shape
    n, block_n = e.w2.shape[1], int(config["BLOCK_SIZE_N"])
    out = torch.empty(tokens, topk, n, dtype=dtype, device=weights.device)
    _k.down_rows[(weights.numel() * cdiv(n, block_n),)](
        h, hs, e.w2, e.w2_scale, e.b2, out, weights, alignment.sorted_ids, alignment.expert_ids,
        alignment.num_post_padded, n, h.stride(0), 0 if hs is None else hs.stride(0), e.w2.stride(0), e.w2.stride(1),
        *_strides(e.w2_scale), out.stride(1), AHEAD=_stages(config), HAS_BIAS=e.b2 is not None, MUL_WEIGHT=multiply,
        GROUP_N=BLOCK_K, SCALES="one" if _one(e, block_n) else "each", **_shapes(e, config, e.down_k, block_n),
        BLOCK_N=block_n, **options,
    )  # fmt: skip
    return out


def _shapes(e: PreparedExperts, config: Mapping[str, Any], width: int, rows: int) -> dict[str, Any]:
    """What both kernels are compiled for: the length of a weight row, its chunks, and how threads lie on them.

    A chunk has BLOCK_SIZE_K columns, of weights of one byte twice as many: a file's BLOCK_SIZE_K stays within a group of
    scales, as other kernels that read the file need it to.
    """
    size = e.w1.element_size()
    block_k = int(config["BLOCK_SIZE_K"]) * (2 if size == 1 else 1)
    block_k = max(block_k, _WHOLE.get(e.scheme.kind, 0))
    vec = min(_LOAD // 2, _LOAD // size)
    span = max(1, min(rows, _LANES * int(config.get("num_warps", 4)) * vec // block_k))
    return {
        "WIDTH": width, "BLOCK_K": block_k, "VEC": vec, "SPAN": span, "GROUP_K": BLOCK_K,
        "SCHEME": {"fp8_tensor": "row", "fp8_channel": "row", "fp8_block": "block"}.get(e.scheme.kind, e.scheme.kind),
    }  # fmt: skip


def _stages(config: Mapping[str, Any]) -> int:
    return int(config.get("num_stages", _STAGES))


def _one(e: PreparedExperts, rows: int) -> bool:
    """Whether a program's rows lie in one block of scales."""
    return e.scheme.block is not None and e.scheme.block[0] % rows == 0


def _strides(scale: torch.Tensor | None) -> tuple[int, int, int]:
    if scale is None:
        return 0, 0, 0
    return scale.stride(0), scale.stride(1), scale.stride(2) if scale.ndim == 3 else 0


def _check(config: Mapping[str, Any]) -> None:
    if int(config["BLOCK_SIZE_N"]) < 2 * GROUP:
        raise ValueError(f"BLOCK_SIZE_N must be at least {2 * GROUP}, not {config['BLOCK_SIZE_N']}")
