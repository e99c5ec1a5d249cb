"""FP8 quantisation of activations: per group of columns, per token, per tensor."""

from __future__ import annotations

import math

import torch

from xkernels.ops._details import quant as _k
from xkernels.ops._details.common import cdiv, next_power_of_2, overlapping

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
EPS = 1e-10
_TINY = 2.0**-126  # smallest normal float32: below it a scale loses its digits and has no finite inverse
_FEW_GROUPS = 2048  # up to as many, a program takes 512 values and not 4096: there are multiprocessors for all of them
# Largest value used: e4m3fn's own 448; fnuz keeps to 224, half of it, so that one scale serves both formats' consumers.
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}


def per_token_group_quant_fp8(
    x: torch.Tensor,
    group: int,
    *,
    eps: float = EPS,
    column_major: bool = False,
    tma_aligned: bool = False,
    ue8m0: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    limit: torch.Tensor | None = None,
    overlap: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each run of `group` columns of each token with its own scale: x = q * scale.

    x: [..., K], contiguous rows, K a multiple of `group`. Returns q [..., K] of `dtype` and scales:

    - row-major (default): float32 [..., K / group];
    - column_major: the same shape with strides (1, rows); x must be 2-D;
    - tma_aligned (with column_major): strides (1, rows rounded up to 4);
    - ue8m0: scales are powers of two, rounded up. With column_major and tma_aligned they are packed: int32
      [rows, ceil(K / group / 4)], four exponent bytes to a word, strides (1, rows rounded up to 4).

    scale = max(largest magnitude, eps) / largest value of the type; eps is large enough for a scale that is a normal
    number (1e-35 is). `limit`, int32 [1] on the device: rows from it on are left alone. overlap: let the kernel start
    while its predecessor drains, where the device can. Raises ValueError on a shape, dtype, eps or combination that
    does not fit.
    """
    _check(x, group, column_major, tma_aligned, dtype, eps)
    if limit is not None and (limit.numel() < 1 or limit.dtype != torch.int32):
        raise ValueError(f"limit must be int32 [1], not {limit.dtype} {list(limit.shape)}")
    rows, k = x.numel() // x.shape[-1] if x.numel() else 0, x.shape[-1]
    groups = k // group
    packed = ue8m0 and column_major and tma_aligned
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    s = _scales(x, groups, rows, column_major, tma_aligned, packed)
    if rows == 0:
        return q, s
    x2 = x.reshape(rows, k)
    mode = "packed" if packed else "ue8m0" if ue8m0 else "float"
    if group == k and mode == "float" and s.ndim == 2 and k > 1024:
        _k.row_quant[(rows,)](
            x2, q, s, limit, k, eps, x2.stride(0), k, BLOCK=2048, HAS_LIMIT=limit is not None, num_warps=4
        )
        return q, s
    width = next_power_of_2(group)
    few = rows * groups <= _FEW_GROUPS
    block = max(1, (512 if few else 4096) // width)
    s2 = s if s.ndim == 2 else s.view(rows, groups)
    _k.group_quant[(cdiv(rows * groups, block),)](
        x2, q, s2.t().view(torch.uint8) if packed else s2, limit, rows, groups, eps, x2.stride(0), k, s2.stride(0),
        s2.stride(1), GROUP=group, WIDTH=width, ROWS=block, MODE=mode, HAS_LIMIT=limit is not None,
        num_warps=1 if few else 4, **overlapping(x, overlap),
    )  # fmt: skip
    return q, s


def per_token_group_quant_fp8_reference(
    x: torch.Tensor,
    group: int,
    *,
    eps: float = EPS,
    column_major: bool = False,
    tma_aligned: bool = False,
    ue8m0: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `per_token_group_quant_fp8` in plain torch."""
    _check(x, group, column_major, tma_aligned, dtype, eps)
    top = FP8_MAX[dtype]
    rows, k = x.numel() // x.shape[-1] if x.numel() else 0, x.shape[-1]
    v = x.reshape(rows, k // group, group).float()
    scale = v.abs().amax(-1).clamp(min=eps) / _limit(x, dtype) if rows else v.new_zeros(0, k // group)
    if ue8m0:
        mantissa, exponent = torch.frexp(scale)  # exact, which a logarithm is not
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    q = (v / scale[..., None]).clamp(-top, top).to(dtype).view(x.shape)
    packed = ue8m0 and column_major and tma_aligned
    s = _scales(x, k // group, rows, column_major, tma_aligned, packed)
    if packed:
        exponents = torch.zeros(rows, s.shape[1] * 4, dtype=torch.int64, device=x.device)
        exponents[:, : k // group] = (torch.frexp(scale).exponent + 126).long()
        words = exponents.unflatten(1, (-1, 4))
        shifts = torch.tensor([1, 1 << 8, 1 << 16, 1 << 24], device=x.device)
        s.copy_((words * shifts).sum(-1))
        return q, s
    s.copy_(scale.view(s.shape))
    return q, s


def scaled_fp8_quant(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    per_token: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with a given scale, a scale per token, or one computed scale for the whole tensor.

    x: [tokens, K] contiguous. scale: one number of any float dtype, read as float32, or None to compute it. Returns q
    and float32 scales: [1], or [tokens, 1] with per_token. Raises ValueError when both a scale and per_token are given,
    and on a shape or dtype that does not fit.
    """
    scale = _check_scaled(x, scale, per_token, dtype)
    if per_token:
        return per_token_group_quant_fp8(x, x.shape[1], dtype=dtype)
    if scale is None:
        peak = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        scale = (peak.clamp(min=EPS) / _limit(x, dtype)).reshape(1)
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        _k.static_quant[(cdiv(x.numel(), 4096),)](x, q, scale, x.numel(), BLOCK=4096, num_warps=4)
    return q, scale


def scaled_fp8_quant_reference(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    per_token: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `scaled_fp8_quant` in plain torch."""
    scale = _check_scaled(x, scale, per_token, dtype)
    top = FP8_MAX[dtype]
    v = x.float()
    if per_token:
        scale = v.abs().amax(-1, keepdim=True).clamp(min=EPS) / _limit(x, dtype)
    elif scale is None:
        scale = ((v.abs().amax() if x.numel() else v.new_zeros(())).clamp(min=EPS) / _limit(x, dtype)).reshape(1)
    return (v / scale).clamp(-top, top).to(dtype), scale


def _limit(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The type's largest value as a tensor: by a plain number torch divides on a GPU as by its rounded inverse."""
    return torch.full((), FP8_MAX[dtype], dtype=torch.float32, device=x.device)


def _scales(
    x: torch.Tensor, groups: int, rows: int, column_major: bool, tma_aligned: bool, packed: bool
) -> torch.Tensor:
    if not column_major:
        return torch.empty(*x.shape[:-1], groups, dtype=torch.float32, device=x.device)
    stride = cdiv(rows, 4) * 4 if tma_aligned else rows
    if packed:
        return torch.zeros(cdiv(groups, 4), stride, dtype=torch.int32, device=x.device).t()[:rows]
    return torch.empty(groups, stride, dtype=torch.float32, device=x.device).t()[:rows]


def _check(x: torch.Tensor, group: int, column_major: bool, tma_aligned: bool, dtype: torch.dtype, eps: float) -> None:
    if x.ndim < 2 or group < 1 or x.shape[-1] % group:
        raise ValueError(f"x must be [..., K] with K a multiple of group {group}, not {list(x.shape)}")
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    if column_major and x.ndim != 2:
        raise ValueError(f"column_major scales need a 2-D x, not {list(x.shape)}")
    if tma_aligned and not column_major:
        raise ValueError("tma_aligned scales are column-major: pass column_major=True")
    if dtype not in FP8_DTYPES:
        raise ValueError(f"dtype must be float8_e4m3fn or float8_e4m3fnuz, not {dtype}")
    if not FP8_MAX[dtype] * _TINY <= eps < math.inf:
        raise ValueError(f"eps must be at least {FP8_MAX[dtype] * _TINY:.1e}, so that scales are normal, not {eps}")


def _check_scaled(
    x: torch.Tensor, scale: torch.Tensor | None, per_token: bool, dtype: torch.dtype
) -> torch.Tensor | None:
    """The given scale as float32 [1]."""
    if x.ndim != 2 or not x.is_contiguous():
        raise ValueError(f"x must be contiguous [tokens, K], not {list(x.shape)}")
    if per_token and scale is not None:
        raise ValueError("per_token computes its scales: give either scale or per_token")
    if scale is not None and scale.numel() != 1:
        raise ValueError(f"scale must have one element, not {list(scale.shape)}")
    if scale is not None and not scale.is_floating_point():
        raise ValueError(f"scale must be float32, not {scale.dtype}")
    if dtype not in FP8_DTYPES:
        raise ValueError(f"dtype must be float8_e4m3fn or float8_e4m3fnuz, not {dtype}")
    return None if scale is None else scale.float().reshape(1)
