"""Kernels of FP8 quantisation."""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.common import INTERPRETED, helper, narrow
from xkernels.ops._details.pdl import launch_dependents, wait_dependencies

FP8_EPS = tl.constexpr(1e-10)  # smallest absolute maximum: keeps the scale of a zero row finite


@helper
def _quotient(x, scale, inverse):
    """x / scale rounded to nearest, as the twin divides: a tie must fall to the same side. All of one shape.

    The product with the reciprocal is corrected once by its exact remainder: three instructions an element where a
    full division takes a dozen. The interpreter has no fused product and divides.
    """
    if INTERPRETED:
        y = x / scale
    else:
        y = x * inverse
        y = tl.fma(tl.fma(-y, scale, x), inverse, y)
    return y


@helper
def _divide(x, scale):
    """Each row of x [ROWS, COLS] over its scale [ROWS]."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return _quotient(x, tl.broadcast_to(scale[:, None], x.shape), tl.broadcast_to(inverse[:, None], x.shape))


@helper
def _divide_all(x, scale):
    """x [COLS] over one scale."""
    inverse = tl.div_rn(tl.full([1], 1.0, tl.float32), tl.zeros([1], tl.float32) + scale)
    return _quotient(x, tl.zeros(x.shape, tl.float32) + scale, tl.broadcast_to(inverse, x.shape))


@helper
def quant_rows(x, dtype: tl.constexpr):
    """FP8 values and one float32 scale per row of a float32 tile: x = values * scale."""
    LIMIT: tl.constexpr = 224.0 if dtype == tl.float8e4b8 else 448.0  # of fnuz half, as `quant.FP8_MAX` says
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), FP8_EPS), LIMIT)
    q = tl.minimum(tl.maximum(_divide(x, scale), -LIMIT), LIMIT)
    return narrow(q, dtype), scale


@helper
def quant_pair(a, b, dtype: tl.constexpr):
    """FP8 values of two float32 tiles with one scale per row over both: `quant_rows` of [a, b] side by side."""
    LIMIT: tl.constexpr = 224.0 if dtype == tl.float8e4b8 else 448.0
    peak = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
    scale = tl.div_rn(tl.maximum(peak, FP8_EPS), LIMIT)
    qa = tl.minimum(tl.maximum(_divide(a, scale), -LIMIT), LIMIT)
    qb = tl.minimum(tl.maximum(_divide(b, scale), -LIMIT), LIMIT)
    return narrow(qa, dtype), narrow(qb, dtype), scale


@helper
def _power_of_two(scale):
    """Smallest power of two that is at least `scale`, and its e8m0 exponent."""
    bits = scale.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return (exponent << 23).to(tl.float32, bitcast=True), exponent


@triton.jit(do_not_specialize=["rows", "eps", "stride_sm", "stride_sg"])
def group_quant(x, q, scales, limit, rows, groups, eps, stride_xm, stride_qm, stride_sm, stride_sg,
                GROUP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, MODE: tl.constexpr,
                HAS_LIMIT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """ROWS groups of GROUP columns: x [rows, groups * GROUP] -> q and one scale per group.

    MODE: `float`, `ue8m0` (float32 powers of two) or `packed` (exponent bytes; stride_sg counts words of four groups).
    `limit` (int32 on the device) is a number of rows beyond which nothing is done.
    """
    wait_dependencies(PDL)
    launch_dependents(PDL)
    flat = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if HAS_LIMIT:
        rows = min(rows, tl.load(limit))
        if tl.program_id(0) * ROWS >= rows * groups:
            return
    row = (flat // groups).to(tl.int64)
    group = flat % groups
    live = row < rows
    ks = tl.arange(0, WIDTH)
    mask = live[:, None] & (ks < GROUP)[None, :]
    cols = group[:, None] * GROUP + ks[None, :]
    v = tl.load(x + row[:, None] * stride_xm + cols, mask=mask, other=0.0).to(tl.float32)
    LIMIT: tl.constexpr = 224.0 if q.dtype.element_ty == tl.float8e4b8 else 448.0
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(v), 1), eps), LIMIT)
    if MODE == "packed":
        scale, exponent = _power_of_two(scale)
        at = scales + ((group // 4) * stride_sg + row * stride_sm) * 4 + group % 4
        tl.store(at, exponent.to(tl.uint8), mask=live)
    else:
        if MODE == "ue8m0":
            scale, _ = _power_of_two(scale)
        tl.store(scales + row * stride_sm + group * stride_sg, scale, mask=live)
    v = tl.minimum(tl.maximum(_divide(v, scale), -LIMIT), LIMIT)
    tl.store(q + row[:, None] * stride_qm + cols, narrow(v, q.dtype.element_ty), mask=mask)


@triton.jit
def row_quant(x, q, scales, limit, cols, eps, stride_xm, stride_qm, BLOCK: tl.constexpr,
              HAS_LIMIT: tl.constexpr):  # fmt: skip
    """One row a program: x [rows, cols] -> q and scales [rows]; two passes over the row."""
    row = tl.program_id(0).to(tl.int64)
    if HAS_LIMIT:
        if row >= tl.load(limit):
            return
    at = tl.arange(0, BLOCK)
    peak = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        v = tl.load(x + row * stride_xm + start + at, mask=start + at < cols, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.abs(v))
    LIMIT: tl.constexpr = 224.0 if q.dtype.element_ty == tl.float8e4b8 else 448.0
    scale = tl.div_rn(tl.maximum(tl.max(peak, 0), eps), LIMIT)
    tl.store(scales + row, scale)
    for start in range(0, cols, BLOCK):
        v = tl.load(x + row * stride_xm + start + at, mask=start + at < cols, other=0.0).to(tl.float32)
        v = tl.minimum(tl.maximum(_divide_all(v, scale), -LIMIT), LIMIT)
        tl.store(q + row * stride_qm + start + at, narrow(v, q.dtype.element_ty), mask=start + at < cols)


@triton.jit
def static_quant(x, q, scale, numel, BLOCK: tl.constexpr):
    """x / scale[0] for a contiguous tensor."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    LIMIT: tl.constexpr = 224.0 if q.dtype.element_ty == tl.float8e4b8 else 448.0
    v = _divide_all(tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32), tl.load(scale))
    v = tl.minimum(tl.maximum(v, -LIMIT), LIMIT)
    tl.store(q + at, narrow(v, q.dtype.element_ty), mask=at < numel)
