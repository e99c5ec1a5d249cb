"""Kernels between a decoder's big operators: residual and RMS norm, rotary positions."""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.common import narrow
from xkernels.ops._details.pdl import launch_dependents, wait_dependencies


@triton.jit(do_not_specialize=["eps"])
def add_norm(x, a, b, weight, total, out, width, eps, stride_x, stride_a, stride_b,
              DELTAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One row: total = x + a + b in float32, rounded once; out = norm(rounded total) * weight."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    gain = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    wait_dependencies(PDL)
    launch_dependents(PDL)
    value = tl.load(x + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    if DELTAS > 0:
        value += tl.load(a + row * stride_a + cols, mask=mask, other=0.0).to(tl.float32)
    if DELTAS > 1:
        value += tl.load(b + row * stride_b + cols, mask=mask, other=0.0).to(tl.float32)
    if DELTAS > 0:
        rounded = narrow(value, total.dtype.element_ty)
        tl.store(total + row * width + cols, rounded, mask=mask)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(out + row * width + cols, narrow(value * scale * gain, out.dtype.element_ty), mask=mask)


@triton.jit
def rotate(x, cos, sin, out, stride_t, stride_h, heads, HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr):
    """All heads of one token; pairs are (i, i + HALF)."""
    token = tl.program_id(0).to(tl.int64)
    hs = tl.arange(0, HEADS)
    ds = tl.arange(0, BLOCK)
    mask = (hs < heads)[:, None] & (ds < HALF)[None, :]
    at = x + token * stride_t + hs[:, None] * stride_h + ds[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + token * 2 * HALF + ds, mask=ds < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * 2 * HALF + ds, mask=ds < HALF, other=0.0).to(tl.float32)[None, :]
    to = out + (token * heads + hs[:, None]) * 2 * HALF + ds[None, :]
    tl.store(to, narrow(first * c - second * s, out.dtype.element_ty), mask=mask)
    tl.store(to + HALF, narrow(second * c + first * s, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slots"])
def rotate_store(qk, v, cos, sin, q_out, k_cache, v_cache, places, slots, heads, kv_heads, stride_t, stride_h,
                 stride_vt, stride_vh, stride_kc, stride_vc, HALF: tl.constexpr, BLOCK: tl.constexpr,
                 Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """All heads of one token: queries turned into q_out, keys turned into the cache, values as they are beside them."""
    wait_dependencies(PDL)
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places + token).to(tl.int64)
    keep = (place > 0) & (place < slots)
    ds = tl.arange(0, BLOCK)
    c = tl.load(cos + token * 2 * HALF + ds, mask=ds < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * 2 * HALF + ds, mask=ds < HALF, other=0.0).to(tl.float32)[None, :]
    hs = tl.arange(0, Q_HEADS)
    mask = (hs < heads)[:, None] & (ds < HALF)[None, :]
    at = qk + token * stride_t + hs[:, None] * stride_h + ds[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    to = q_out + (token * heads + hs[:, None]) * 2 * HALF + ds[None, :]
    tl.store(to, narrow(first * c - second * s, q_out.dtype.element_ty), mask=mask)
    tl.store(to + HALF, narrow(second * c + first * s, q_out.dtype.element_ty), mask=mask)
    ks = tl.arange(0, KV_HEADS)
    mask = (ks < kv_heads)[:, None] & (ds < HALF)[None, :]
    at = qk + token * stride_t + (heads + ks)[:, None] * stride_h + ds[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    into = ks[:, None] * 2 * HALF + ds[None, :]
    at = v + token * stride_vt + ks[:, None] * stride_vh + ds[None, :]
    low = tl.load(at, mask=mask, other=0.0)
    high = tl.load(at + HALF, mask=mask, other=0.0)
    mask &= keep
    tl.store(k_cache + place * stride_kc + into, narrow(first * c - second * s, k_cache.dtype.element_ty), mask=mask)
    tl.store(k_cache + place * stride_kc + into + HALF, narrow(second * c + first * s, k_cache.dtype.element_ty),
             mask=mask)  # fmt: skip
    tl.store(v_cache + place * stride_vc + into, low, mask=mask)
    tl.store(v_cache + place * stride_vc + into + HALF, high, mask=mask)
