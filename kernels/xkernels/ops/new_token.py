"""Attention of a few sequences' newest tokens, from their projection to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from xkernels.ops._details import new_token as _k
from xkernels.ops._details.common import cdiv, next_power_of_2, overlapping
from xkernels.ops.attention import decode_attention_reference
from xkernels.ops.decoder import rotate_and_store_reference
from xkernels.ops.few_rows import FEW_ROWS

_BLOCK = 128  # cached tokens that a program reads at once: few enough to fit beside the kernel that makes its rows
_MOST = 8  # programs that share a sequence's head
_JOINED = 2048  # values of a sequence's attention that a program joins at once
_COLS = 8  # rows of the output's weights that a program has
_PART_WARPS, _OUT_WARPS = 4, 8


@dataclass(frozen=True)
class NewTokens:
    """Where the newest token of each sequence stands.

    Token p of sequence slot s is row 1 + s * room + p of the cache. positions int64 [T]: -1 marks a row of padding,
    which is kept nowhere and whose result means nothing. slots int64 [T]. span: more than every position. Both tensors
    are contiguous, and must have been written before the predecessor of this step's first overlapping kernel: kernels
    read them early.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    room: int
    span: int


@dataclass(frozen=True)
class HeadRules:
    """Heads, and what is done with queries and keys before they meet.

    cos, sin [positions, D]: both halves alike. q_norm, k_norm [D]: gains of an RMS norm of every head, or None.
    """

    heads: int
    kv_heads: int
    cos: torch.Tensor
    sin: torch.Tensor
    eps: float = 0.0
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


def new_token_attention(
    qkv: torch.Tensor,
    rules: HeadRules,
    tokens: NewTokens,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    *,
    overlap: bool = True,
) -> torch.Tensor:
    """Norm and turn the heads of at most FEW_ROWS new tokens, store their keys and values, attend, project, add.

    qkv [T, (heads + 2 kv_heads) * D], rows contiguous: queries, keys, values; k_cache, v_cache [S, kv_heads * D],
    written in place; weight [H, heads * D]; bias [H] or None; residual [T, H]. Returns residual + attention @ weight.T
    + bias [T, H] of residual's dtype, in float32 in between, in an order that depends on the sequence alone. overlap:
    as for `few_rows.norm_linear`. Raises ValueError when shapes do not fit.
    """
    d = _check(qkv, rules, tokens, k_cache, v_cache, weight, bias, residual)
    rows, heads = qkv.shape[0], rules.heads
    splits, wide = max(1, min(_MOST, cdiv(tokens.span, _BLOCK))), next_power_of_2(d)
    part = torch.empty((rows, splits, heads, wide), dtype=torch.float32, device=qkv.device)
    peaks, totals = (torch.empty((rows, splits, heads), dtype=torch.float32, device=qkv.device) for _ in range(2))
    _k.new_token_part[(rows, heads, splits)](
        qkv, rules.cos, rules.sin, rules.q_norm, rules.k_norm, k_cache, v_cache, tokens.positions, tokens.slots, part,
        peaks, totals, d**-0.5, rules.eps, tokens.room, qkv.stride(0), k_cache.stride(0), v_cache.stride(0), splits,
        HEADS=heads, KV_HEADS=rules.kv_heads, HALF=d // 2, HALF_BLOCK=next_power_of_2(d // 2), D_BLOCK=wide,
        BLOCK=_BLOCK, MOST=_MOST, NORM=rules.q_norm is not None, num_warps=_PART_WARPS, **overlapping(qkv, overlap),
    )  # fmt: skip
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    group = min(next_power_of_2(heads), max(1, _JOINED // wide))
    _k.new_token_out[(cdiv(weight.shape[0], _COLS),)](
        part, peaks, totals, tokens.positions, weight, bias, residual, out, weight.shape[0], splits, weight.stride(0),
        residual.stride(0), HEADS=heads, GROUP=group, D=d, D_BLOCK=wide, ROWS=rows, COLS=_COLS, BLOCK=_BLOCK,
        MOST=_MOST, HAS_BIAS=bias is not None, num_warps=_OUT_WARPS, **overlapping(qkv, overlap),
    )  # fmt: skip
    return out


def new_token_attention_reference(
    qkv: torch.Tensor,
    rules: HeadRules,
    tokens: NewTokens,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
) -> torch.Tensor:
    """The twin of `new_token_attention`: the twins of its parts, one after the other."""
    d = _check(qkv, rules, tokens, k_cache, v_cache, weight, bias, residual)
    rows, heads, kv_heads = qkv.shape[0], rules.heads, rules.kv_heads
    all_heads = qkv.view(rows, heads + 2 * kv_heads, d)
    qk, v = all_heads[:, : heads + kv_heads], all_heads[:, heads + kv_heads :]
    if rules.q_norm is not None and rules.k_norm is not None:
        gains = torch.cat([rules.q_norm.expand(heads, d), rules.k_norm.expand(kv_heads, d)]).float()
        value = qk.float()
        qk = (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + rules.eps) * gains).to(qk.dtype)
    at = tokens.positions.clamp_min(0)
    first = 1 + tokens.slots * tokens.room
    places = torch.where(tokens.positions < 0, 0, first + at)
    q = rotate_and_store_reference(qk, v, rules.cos[at], rules.sin[at], k_cache, v_cache, places)
    table = (first[:, None] + torch.arange(tokens.span, device=qkv.device)).int()
    shape = (k_cache.shape[0], kv_heads, d)
    attended = decode_attention_reference(q.float(), k_cache.view(shape), v_cache.view(shape), table, (at + 1).int())
    offset = None if bias is None else bias.float()
    added = torch.nn.functional.linear(attended.flatten(1), weight.float(), offset)
    return (residual.float() + added).to(residual.dtype)


def _check(
    qkv: torch.Tensor, rules: HeadRules, tokens: NewTokens, k_cache: torch.Tensor, v_cache: torch.Tensor,
    weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor,
) -> int:  # fmt: skip
    """The width of a head."""
    heads, kv_heads = rules.heads, rules.kv_heads
    rows = qkv.shape[0] if qkv.ndim == 2 else 0
    if min(heads, kv_heads) < 1:
        raise ValueError(f"heads and kv_heads must be positive, not {heads} and {kv_heads}")
    if not 0 < rows <= FEW_ROWS or qkv.shape[1] % (heads + 2 * kv_heads) or heads % kv_heads:
        raise ValueError(f"qkv [1 to {FEW_ROWS}, heads] does not fit {heads} and {kv_heads} heads: {list(qkv.shape)}")
    d = qkv.shape[1] // (heads + 2 * kv_heads)
    if d % 2 or any(t.shape[1:] != (d,) or not t.is_contiguous() for t in (rules.cos, rules.sin)):
        raise ValueError(f"cos and sin must be [positions, {d}], contiguous, and the width of a head even")
    wide = (k_cache.shape[0], kv_heads * d)
    if k_cache.shape != wide or v_cache.shape != wide or k_cache.dtype != qkv.dtype or v_cache.dtype != qkv.dtype:
        raise ValueError(f"caches must be [S, {kv_heads * d}] of qkv's dtype, not {list(k_cache.shape)}")
    if tokens.positions.shape != (rows,) or tokens.slots.shape != (rows,):
        raise ValueError(f"one position and one slot per row are wanted, not {list(tokens.positions.shape)}")
    if weight.ndim != 2 or weight.shape[1] != heads * d or residual.shape != (rows, weight.shape[0]):
        raise ValueError(f"weight [H, {heads * d}] and residual [T, H], not {list(weight.shape)}")
    if (rules.q_norm is None) != (rules.k_norm is None) or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError("both norms or none, and one bias per row of weight, are wanted")
    if any(gain is not None and (gain.shape != (d,) or gain.stride(0) != 1) for gain in (rules.q_norm, rules.k_norm)):
        raise ValueError(f"the gains q_norm and k_norm must be [{d}], contiguous")
    beside = {"positions": tokens.positions, "slots": tokens.slots, "bias": bias}
    for name, tensor in beside.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, not of stride {tensor.stride(0)}")
    if any(t.stride(-1) != 1 for t in (qkv, k_cache, v_cache, weight, residual)):
        raise ValueError("rows of qkv, k_cache, v_cache, weight and residual must be contiguous")
    return d
