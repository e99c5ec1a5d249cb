"""Decode attention: one new token per sequence against a slotted KV cache."""

from __future__ import annotations

import torch

from xkernels.ops._details import attention as _k
from xkernels.ops._details.common import cdiv, next_power_of_2, overlapping

_BLOCK = 64  # cached tokens that a program reads at once
_SPLITS = 8  # programs that share a sequence: at one sequence its heads alone leave most of a device idle


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Softmax attention of each sequence's newest token over its cached tokens.

    q [B, heads, D]; k_cache [S, kv_heads, D], v_cache [S, kv_heads, Dv]; slots int32 [B, longest]: where each
    sequence's tokens are in the cache; lengths int32 [B], contiguous: how many of them count (0 gives zeros; more
    than `longest` are not read). heads is a multiple of kv_heads. scale: 1 / sqrt(D) by default. Returns [B, heads, Dv]
    of q's dtype, computed in float32 in an order that depends on the sequence alone. Raises ValueError when shapes,
    dtypes or strides do not fit.
    """
    _check(q, k_cache, v_cache, slots, lengths)
    batch, heads, d = q.shape
    dv = v_cache.shape[2]
    out = torch.empty(batch, heads, dv, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    splits, wide = max(1, min(_SPLITS, cdiv(slots.shape[1], _BLOCK))), next_power_of_2(dv)
    part = torch.empty(batch, heads, splits, wide, dtype=torch.float32, device=q.device)
    peaks, totals = (torch.empty(batch, heads, splits, dtype=torch.float32, device=q.device) for _ in range(2))
    _k.decode_part[(batch, heads, splits)](
        q, k_cache, v_cache, slots, lengths, part, peaks, totals, d**-0.5 if scale is None else scale, slots.shape[1],
        slots.stride(0), q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0),
        v_cache.stride(1), splits, GROUP=heads // k_cache.shape[1], D=d, DV=dv, D_BLOCK=next_power_of_2(d),
        DV_BLOCK=wide, BLOCK=_BLOCK, MOST=_SPLITS, num_warps=4, **overlapping(q),
    )  # fmt: skip
    _k.decode_sum[(batch, heads)](
        part, peaks, totals, out, splits, out.stride(0), out.stride(1), DV=dv, DV_BLOCK=wide, MOST=_SPLITS, num_warps=1,
        **overlapping(q),
    )  # fmt: skip
    return out


def decode_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """The twin of `decode_attention`: float32, one sequence after the other."""
    _check(q, k_cache, v_cache, slots, lengths)
    batch, heads, d = q.shape
    group = heads // k_cache.shape[1]
    out = torch.zeros(batch, heads, v_cache.shape[2], dtype=torch.float32, device=q.device)
    for i in range(batch):
        at = slots[i, : max(0, int(lengths[i]))].long()
        if not at.numel():
            continue
        keys = k_cache[at].float().repeat_interleave(group, 1)
        values = v_cache[at].float().repeat_interleave(group, 1)
        scores = torch.einsum("hd,thd->ht", q[i].float(), keys) * (d**-0.5 if scale is None else scale)
        out[i] = torch.einsum("ht,thd->hd", torch.softmax(scores, -1), values)
    return out.to(q.dtype)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor) -> None:
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3 or k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
        raise ValueError(f"q, k_cache, v_cache do not fit: {list(q.shape)}, {list(k.shape)}, {list(v.shape)}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} heads are not a multiple of {k.shape[1]} key-value heads")
    if slots.ndim != 2 or slots.shape[0] != q.shape[0] or lengths.shape != (q.shape[0],):
        raise ValueError(f"slots and lengths must have one row per sequence, not {slots.shape}, {lengths.shape}")
    if any(t.dtype not in (torch.int32, torch.int64) for t in (slots, lengths)) or not lengths.is_contiguous():
        raise ValueError(f"slots and lengths must be int32 or int64 and lengths contiguous, not {slots.dtype}, "
                         f"{lengths.dtype} of stride {lengths.stride(0)}")  # fmt: skip
    if any(t.stride(-1) != 1 for t in (q, k, v) if t.numel()) or (slots.numel() and slots.stride(1) != 1):
        raise ValueError("the last dimension of q, k_cache, v_cache and slots must be contiguous")
