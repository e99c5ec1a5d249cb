"""Storing keys and values of new tokens in the KV cache."""

from __future__ import annotations

import torch

from xkernels.ops._details import attention as _k
from xkernels.ops._details.common import cdiv, next_power_of_2


def store_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    skip_index: int = 0,
    num_split: int = 0,
) -> None:
    """k_cache[indices[i]] = k[i] and v_cache[indices[i]] = v[i], in place.

    k [B, ...], v [B, ...]: one row per token, rows contiguous (any row stride), the row sizes may differ; k_cache
    [slots, ...], v_cache [slots, ...] of the same dtypes; indices int32 or int64 [B]. Rows of index `skip_index` (a
    reserved slot; -1 disables the rule) and rows outside the cache are not written. num_split: programs per row, the
    only tunable number; 0 chooses. Raises ValueError when shapes, dtypes or num_split do not fit.
    """
    if num_split < 0:
        raise ValueError(f"num_split must be a number of programs, or 0 to let it be chosen, not {num_split}")
    k2, v2, kc, vc = _rows(k, v, k_cache, v_cache, indices)
    if k2.shape[0] == 0:
        return
    width = max(k2.shape[1], v2.shape[1])
    split = num_split or cdiv(width, 4096)
    block = next_power_of_2(cdiv(width, split))
    rows = max(1, 4096 // block)
    _k.store_kv[(cdiv(k2.shape[0], rows), split)](
        k2, v2, kc, vc, indices.contiguous(), k2.shape[0], kc.shape[0], skip_index, k2.stride(0), v2.stride(0),
        kc.stride(0), vc.stride(0), K_WIDTH=k2.shape[1], V_WIDTH=v2.shape[1], BLOCK=block, ROWS=rows, num_warps=4,
    )  # fmt: skip


def store_kv_cache_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    skip_index: int = 0,
) -> None:
    """The twin of `store_kv_cache` in plain torch."""
    k2, v2, kc, vc = _rows(k, v, k_cache, v_cache, indices)
    keep = (indices >= 0) & (indices < kc.shape[0]) & ((indices != skip_index) | (skip_index < 0))
    kc[indices[keep].long()] = k2[keep]
    vc[indices[keep].long()] = v2[keep]


def _rows(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    out = []
    for name, t in (("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        if t.ndim < 1:
            raise ValueError(f"{name} must be [rows, ...], not one number")
        try:
            rows = t.view(t.shape[0], -1) if t.numel() else t.reshape(t.shape[0], t[0:1].numel() or 1)
        except RuntimeError as error:
            raise ValueError(f"{name} must have contiguous rows, not strides {t.stride()}") from error
        if rows.stride(-1) != 1:
            raise ValueError(f"{name} must have contiguous rows, not strides {t.stride()}")
        out.append(rows)
    k2, v2, kc, vc = out
    if k2.shape[0] != v2.shape[0] or indices.shape != (k2.shape[0],) or kc.shape[0] != vc.shape[0]:
        raise ValueError(f"k, v and indices must have one row per token, not {k.shape}, {v.shape}, {indices.shape}")
    if k2.shape[0] and (k2.shape[1] != kc.shape[1] or v2.shape[1] != vc.shape[1]):
        raise ValueError(f"row sizes of k and v must be the caches': {k2.shape}, {v2.shape}, {kc.shape}, {vc.shape}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"indices must be int32 or int64, not {indices.dtype}")
    if k.dtype != k_cache.dtype or v.dtype != v_cache.dtype:
        raise ValueError("k and v must have the dtypes of their caches")
    return k2, v2, kc, vc
