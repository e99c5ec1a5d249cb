"""Kernels of attention of a few sequences' newest tokens: from their projection to the residual stream.

A token's keys and values lie in the cache from its own step on; in that step they are taken from registers, so that
no program waits for another's store. Older tokens are read before the program waits (see `few_rows`): no kernel of
this step writes them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.common import helper, narrow
from xkernels.ops._details.pdl import launch_dependents, wait_dependencies


@helper
def _turned(at, gain, cos, sin, eps, HALF: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, dtype: tl.constexpr):
    """The halves of one head, normed if it has a norm, turned, and rounded as the cache does."""
    ds = tl.arange(0, BLOCK)
    first = tl.load(at + ds, mask=ds < HALF, other=0.0).to(tl.float32)
    second = tl.load(at + HALF + ds, mask=ds < HALF, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + eps)
        low = tl.load(gain + ds, mask=ds < HALF, other=0.0).to(tl.float32)
        high = tl.load(gain + HALF + ds, mask=ds < HALF, other=0.0).to(tl.float32)
        first = narrow(first * scale * low, dtype).to(tl.float32)
        second = narrow(second * scale * high, dtype).to(tl.float32)
    return narrow(first * cos - second * sin, dtype), narrow(second * cos + first * sin, dtype)


@helper
def _old(k_at, v_at, at, past, stride_k, stride_v, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
         D_BLOCK: tl.constexpr):  # fmt: skip
    """Keys (their halves) and values of cached tokens `at` of one head."""
    hs = tl.arange(0, HALF_BLOCK)
    ds = tl.arange(0, D_BLOCK)
    live = (at < past)[:, None]
    row = at.to(tl.int64)[:, None]
    k_at = k_at + row * stride_k + hs[None, :]
    low = tl.load(k_at, mask=live & (hs < HALF)[None, :], other=0.0)
    high = tl.load(k_at + HALF, mask=live & (hs < HALF)[None, :], other=0.0)
    return low, high, tl.load(v_at + row * stride_v + ds[None, :], mask=live & (ds < 2 * HALF)[None, :], other=0.0)


@helper
def _absorb(peak, total, acc, low, high, values, live, q_low, q_high):
    """A running softmax after one more block."""
    products = low.to(tl.float32) * q_low[None, :] + high.to(tl.float32) * q_high[None, :]
    score = tl.where(live, tl.sum(products, 1), float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, 0))
    weight = tl.exp(score - new_peak)
    decay = tl.exp(peak - new_peak)
    acc = acc * decay + tl.sum(values.to(tl.float32) * weight[:, None], 0)
    return new_peak, total * decay + tl.sum(weight, 0), acc


@triton.jit(do_not_specialize=["scale", "eps", "room", "splits"])
def new_token_part(qkv, cos, sin, q_gain, k_gain, k_cache, v_cache, positions, slots, part, peaks, totals, scale, eps,
                   room, stride_t, stride_k, stride_v, splits, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                   HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
                   MOST: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One head of one sequence: every MOST-th block of BLOCK older tokens, the first program also the newest token.

    Which blocks are taken together depends on the sequence alone; a program without any stores nothing.
    """
    launch_dependents(PDL)
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    D: tl.constexpr = 2 * HALF
    dtype: tl.constexpr = k_cache.dtype.element_ty
    position = tl.load(positions + seq)
    past = tl.maximum(position, 0).to(tl.int32)
    begin = split * BLOCK
    if (split > 0) & (begin >= past):
        return
    kv_head = head // GROUP
    base = 1 + tl.load(slots + seq).to(tl.int64) * room
    k_at = k_cache + base * stride_k + kv_head * D
    v_at = v_cache + base * stride_v + kv_head * D
    at = begin + tl.arange(0, BLOCK)
    low, high, values = _old(k_at, v_at, at, past, stride_k, stride_v, HALF, HALF_BLOCK, D_BLOCK)
    hs = tl.arange(0, HALF_BLOCK)
    ds = tl.arange(0, D_BLOCK)
    turn = past.to(tl.int64) * D + hs
    c = tl.load(cos + turn, mask=hs < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + turn, mask=hs < HALF, other=0.0).to(tl.float32)
    wait_dependencies(PDL)
    token = qkv + seq * stride_t
    q_low, q_high = _turned(token + head * D, q_gain, c, s, eps, HALF, HALF_BLOCK, NORM, dtype)
    k_low, k_high = _turned(token + (HEADS + kv_head) * D, k_gain, c, s, eps, HALF, HALF_BLOCK, NORM, dtype)
    value = tl.load(token + (HEADS + KV_HEADS + kv_head) * D + ds, mask=ds < D, other=0.0)
    fresh = split == 0
    if fresh & (head % GROUP == 0) & (position >= 0):
        to = k_at + past.to(tl.int64) * stride_k + hs
        tl.store(to, k_low, mask=hs < HALF)
        tl.store(to + HALF, k_high, mask=hs < HALF)
        tl.store(v_at + past.to(tl.int64) * stride_v + ds, value, mask=ds < D)
    q_low = q_low.to(tl.float32) * scale
    q_high = q_high.to(tl.float32) * scale
    score = tl.sum(q_low * k_low.to(tl.float32) + q_high * k_high.to(tl.float32), 0)
    peak = tl.where(fresh, score, float("-inf"))
    total = tl.where(fresh, 1.0, 0.0)
    acc = tl.where(fresh, value.to(tl.float32), 0.0)
    peak, total, acc = _absorb(peak, total, acc, low, high, values, at < past, q_low, q_high)
    for start in range(begin + MOST * BLOCK, past, MOST * BLOCK):
        at = start + tl.arange(0, BLOCK)
        low, high, values = _old(k_at, v_at, at, past, stride_k, stride_v, HALF, HALF_BLOCK, D_BLOCK)
        peak, total, acc = _absorb(peak, total, acc, low, high, values, at < past, q_low, q_high)
    at_part = (seq * splits + split) * HEADS + head
    tl.store(peaks + at_part, peak)
    tl.store(totals + at_part, total)
    tl.store(part + at_part * D_BLOCK + ds, acc)


@helper
def _heights(peaks, row, split, heads, past, splits, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Peaks of one part of each of `heads`, -inf where there is no such part; where they are, and which there are."""
    used = ((split == 0) | (split * BLOCK < past)) & (heads < HEADS)
    at = (row * splits + split) * HEADS + heads
    return tl.load(peaks + at, mask=used, other=float("-inf")), at, used


@helper
def _joined(part, peaks, totals, past, row, first, splits, HEADS: tl.constexpr, GROUP: tl.constexpr,
            D_BLOCK: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr):  # fmt: skip
    """Attention of GROUP heads of one sequence, [GROUP, D_BLOCK], out of its parts.

    Part after part: every thread has the same values of all of them, so that none is moved before it is summed.
    """
    heads = first + tl.arange(0, GROUP)
    ds = tl.arange(0, D_BLOCK)
    top, _, _ = _heights(peaks, row, 0, heads, past, splits, HEADS, BLOCK)
    for split in tl.static_range(1, MOST):
        height, _, _ = _heights(peaks, row, split, heads, past, splits, HEADS, BLOCK)
        top = tl.maximum(top, height)
    top = tl.where(top > float("-inf"), top, 0.0)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, D_BLOCK], tl.float32)
    for split in tl.static_range(MOST):
        height, at, used = _heights(peaks, row, split, heads, past, splits, HEADS, BLOCK)
        factor = tl.exp(height - top)
        total += factor * tl.load(totals + at, mask=used, other=0.0)
        values = tl.load(part + at.to(tl.int64)[:, None] * D_BLOCK + ds[None, :], mask=used[:, None], other=0.0)
        acc += values * factor[:, None]
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


@helper
def _projected(weight, n, cols, stride, first, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
               D_BLOCK: tl.constexpr):  # fmt: skip
    """The weights that rows `n` give to GROUP heads, [rows, GROUP * D_BLOCK]."""
    k = tl.arange(0, GROUP * D_BLOCK)
    head = first + k // D_BLOCK
    d = k % D_BLOCK
    mask = (n < cols)[:, None] & ((head < HEADS) & (d < D))[None, :]
    return tl.load(weight + n.to(tl.int64)[:, None] * stride + (head * D + d)[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["splits"])
def new_token_out(part, peaks, totals, positions, weight, bias, residual, out, cols, splits, stride_w, stride_r,
                  HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
                  ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
                  HAS_BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """out = residual + attention @ weight.T + bias; every program joins the parts itself, GROUP heads at a time."""
    launch_dependents(PDL)
    n = tl.program_id(0) * COLS + tl.arange(0, COLS)
    w_first = _projected(weight, n, cols, stride_w, 0, HEADS, GROUP, D, D_BLOCK)
    offset = tl.zeros([COLS], tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + n, mask=n < cols, other=0.0).to(tl.float32)
    past = tl.maximum(tl.load(positions), 0).to(tl.int32)  # which parts there are: known before they are
    wait_dependencies(PDL)
    for row in tl.static_range(ROWS):
        if row > 0:
            past = tl.maximum(tl.load(positions + row), 0).to(tl.int32)
        result = tl.load(residual + row * stride_r + n, mask=n < cols, other=0.0).to(tl.float32) + offset
        for first in tl.static_range(0, HEADS, GROUP):
            x = _joined(part, peaks, totals, past, row, first, splits, HEADS, GROUP, D_BLOCK, BLOCK, MOST)
            w = w_first
            if first > 0:
                w = _projected(weight, n, cols, stride_w, first, HEADS, GROUP, D, D_BLOCK)
            result += tl.sum(w.to(tl.float32) * tl.reshape(x, [GROUP * D_BLOCK])[None, :], 1)
        tl.store(out + row * cols + n, narrow(result, out.dtype.element_ty), mask=n < cols)
