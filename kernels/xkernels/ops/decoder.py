"""What lies between a decoder's big operators: residual sums with their RMS norm, and rotary positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xkernels.ops._details import decoder as _k
from xkernels.ops._details.common import next_power_of_2, overlapping

_MAX_DELTAS = 2


def add_rms_norm(
    x: torch.Tensor,
    deltas: Sequence[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    *,
    overlap: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual sum and its RMS norm, each tensor read and written once.

    x [T, H] and up to two deltas [T, H], unit stride along H; weight [H], contiguous. Returns (x + deltas, its norm
    times weight), both [T, H] of x's dtype; sums and norms in float32, the sum rounded once. Without deltas the first
    is x itself. overlap: let the kernel start while its predecessor drains, where the device can; not after streams
    have joined. Raises ValueError when shapes or strides do not fit.
    """
    _check_norm(x, deltas, weight)
    rows, width = x.shape
    a, b = (*deltas, x, x)[:2]
    total = torch.empty((rows, width), dtype=x.dtype, device=x.device) if deltas else x
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows == 0:
        return total, out
    block = next_power_of_2(width)
    _k.add_norm[(rows,)](
        x, a, b, weight, total, out, width, eps, x.stride(0), a.stride(0), b.stride(0), DELTAS=len(deltas), BLOCK=block,
        num_warps=min(16, max(1, block // 256)), **overlapping(x, overlap),
    )  # fmt: skip
    return total, out


def add_rms_norm_reference(
    x: torch.Tensor, deltas: Sequence[torch.Tensor], weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `add_rms_norm` in plain torch."""
    _check_norm(x, deltas, weight)
    total = x.float()
    for delta in deltas:
        total = total + delta.float()
    total = total.to(x.dtype)
    value = total.float()
    normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float()
    return total, normed.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: pairs (i, i + D/2) of every head turned by their token's angle.

    x [T, heads, D], unit stride along D; cos, sin [T, D], both halves alike, read as they are where contiguous and
    copied where not. Returns a new contiguous tensor of x's shape and dtype, computed in float32. Raises ValueError
    when shapes do not fit.
    """
    _check_rotate(x, cos, sin)
    tokens, heads, dim = x.shape
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    _k.rotate[(tokens,)](
        x, cos.contiguous(), sin.contiguous(), out, x.stride(0), x.stride(1), heads, HALF=dim // 2,
        BLOCK=next_power_of_2(dim // 2), HEADS=next_power_of_2(heads), num_warps=4,
    )  # fmt: skip
    return out


def rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The twin of `rotate` in plain torch."""
    _check_rotate(x, cos, sin)
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cos.float()[:, None] + turned * sin.float()[:, None]).to(x.dtype)


def rotate_and_store(
    qk: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    places: torch.Tensor,
) -> torch.Tensor:
    """`rotate` for queries and keys, and `store_kv_cache` for the keys and their values, in one pass.

    qk [T, heads + kv_heads, D], queries first; v [T, kv_heads, D]; unit stride along D; cos, sin [T, D]; k_cache and
    v_cache [S, kv_heads * D], contiguous rows; places int32 or int64 [T]: rows of the cache, 0 or less for one that is
    not kept. Returns the queries [T, heads, D]. Raises ValueError when shapes, dtypes or strides do not fit.
    """
    _check_rotate(qk, cos, sin)
    tokens, both, dim = qk.shape
    kv_heads = v.shape[1] if v.ndim == 3 else 0
    heads = both - kv_heads
    wide = (k_cache.shape[0], kv_heads * dim)
    if v.shape != (tokens, kv_heads, dim) or heads < 1 or k_cache.shape != wide or v_cache.shape != wide:
        raise ValueError(f"qk, v and caches do not fit: {list(qk.shape)}, {list(v.shape)}, {list(k_cache.shape)}")
    if places.shape != (tokens,) or any(t.stride(-1) != 1 for t in (v, k_cache, v_cache) if t.numel()):
        raise ValueError("one of places per token, and contiguous rows of v, k_cache and v_cache, are wanted")
    if places.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"places must be int32 or int64, not {places.dtype}")
    out = torch.empty((tokens, heads, dim), dtype=qk.dtype, device=qk.device)
    if tokens == 0:
        return out
    _k.rotate_store[(tokens,)](
        qk, v, cos.contiguous(), sin.contiguous(), out, k_cache, v_cache, places.contiguous(), k_cache.shape[0], heads,
        kv_heads, qk.stride(0), qk.stride(1), v.stride(0), v.stride(1), k_cache.stride(0), v_cache.stride(0),
        HALF=dim // 2, BLOCK=next_power_of_2(dim // 2), Q_HEADS=next_power_of_2(heads),
        KV_HEADS=next_power_of_2(kv_heads), num_warps=4, **overlapping(qk),
    )  # fmt: skip
    return out


def rotate_and_store_reference(
    qk: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    places: torch.Tensor,
) -> torch.Tensor:
    """The twin of `rotate_and_store` in plain torch."""
    turned = rotate_reference(qk, cos, sin)
    heads = qk.shape[1] - v.shape[1]
    kept = (places > 0) & (places < k_cache.shape[0])
    k_cache[places[kept].long()] = turned[kept, heads:].flatten(1).to(k_cache.dtype)
    v_cache[places[kept].long()] = v[kept].flatten(1)
    return turned[:, :heads].contiguous()


def _check_norm(x: torch.Tensor, deltas: Sequence[torch.Tensor], weight: torch.Tensor) -> None:
    if x.ndim != 2 or weight.shape != (x.shape[1],) or any(delta.shape != x.shape for delta in deltas):
        raise ValueError(f"x and deltas must be [T, H] and weight [H], not {list(x.shape)} and {list(weight.shape)}")
    if len(deltas) > _MAX_DELTAS:
        raise ValueError(f"at most {_MAX_DELTAS} deltas, not {len(deltas)}")
    if any(t.stride(1) != 1 for t in (x, *deltas) if t.numel()):
        raise ValueError("rows of x and deltas must be contiguous")
    if not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous, not of stride {weight.stride(0)}")


def _check_rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    if x.ndim != 3 or x.shape[2] % 2 or cos.shape != (x.shape[0], x.shape[2]) or sin.shape != cos.shape:
        raise ValueError(f"x must be [T, heads, D], cos and sin [T, D], not {list(x.shape)} and {list(cos.shape)}")
    if x.numel() and x.stride(2) != 1:
        raise ValueError("heads of x (qk) must be contiguous")
