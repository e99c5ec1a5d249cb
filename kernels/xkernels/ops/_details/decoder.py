"""Kernels between a decoder's big operators: residual and RMS norm, rotary positions."""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.common import narrow


@triton.jit(do_not_specialize=["eps"])
def add_norm(x, a, b, weight, total, out, width, eps, stride_x, stride_a, stride_b,
              DELTAS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One row: total = x + a + b in float32, rounded once; out = norm(rounded total) * weight."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
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
    gain = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
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
