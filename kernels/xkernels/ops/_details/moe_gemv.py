"""The projections for a handful of routed entries: matrix-vector products without tiles of padding.

A config asks for them with BLOCK_SIZE_M 1. Each program holds whole rows of one expert's weights in registers, so every
load is under way at once; no alignment is needed. The down projection adds up the experts of its token itself, in slot
order, and has read its weights before it waits for the up projection.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.activation import combine_gate
from xkernels.ops._details.common import narrow
from xkernels.ops._details.pdl import launch_dependents, wait_dependencies
from xkernels.ops._details.quant import quant_rows


@triton.jit
def _row_sums(tile, v, scale, rows, k, K, stride_sn, stride_sk, ROWS: tl.constexpr, COLS: tl.constexpr,
              GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, BLOCK_SCALES: tl.constexpr):  # fmt: skip
    """Sum over columns of tile [ROWS, COLS] * v [COLS] in float32; FP8 tiles with scales per block of columns."""
    if BLOCK_SCALES:
        BLOCKS: tl.constexpr = COLS // GROUP_K
        q, s = quant_rows(tl.reshape(v, (BLOCKS, GROUP_K)), tile.dtype)
        product = tl.reshape(tile.to(tl.float32), (ROWS, BLOCKS, GROUP_K)) * q.to(tl.float32)[None, :, :]
        blocks = k // GROUP_K + tl.arange(0, BLOCKS)
        at = scale + (rows // GROUP_N)[:, None] * stride_sn + blocks[None, :] * stride_sk
        ws = tl.load(at, mask=(blocks * GROUP_K < K)[None, :] & (rows >= 0)[:, None], other=0.0)
        return tl.sum(tl.sum(product, 2) * ws * s[None, :], 1)
    return tl.sum(tile.to(tl.float32) * v[None, :], 1)


@triton.jit
def up_gemv(x, w, w_scale, bias, out, weight, ids, N2, K, stride_xm, stride_xk, stride_we, stride_wn, stride_wse,
            stride_wsn, stride_wsk, stride_out, TOPK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
            GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, BLOCK_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
            MUL_WEIGHT: tl.constexpr, PDL: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr,
            LIMIT: tl.constexpr):  # fmt: skip
    """out[slot] = activation(x[token] @ w[expert].T + bias[expert]) for BLOCK_N interleaved rows of one slot."""
    wait_dependencies(PDL)
    launch_dependents(PDL)
    slot = tl.program_id(1)
    expert = tl.load(ids + slot).to(tl.int64)
    if expert < 0:
        return
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        at = w + expert * stride_we + rows.to(tl.int64)[:, None] * stride_wn + ks[None, :]
        tile = tl.load(at, mask=(rows < N2)[:, None] & (ks < K)[None, :], other=0.0)
        v = tl.load(x + (slot // TOPK) * stride_xm + ks * stride_xk, mask=ks < K, other=0.0).to(tl.float32)
        scales = w_scale
        if BLOCK_SCALES:
            scales = w_scale + expert * stride_wse
        acc += _row_sums(tile, v, scales, tl.minimum(rows, N2 - 1), k, K, stride_wsn, stride_wsk,
                         BLOCK_N, BLOCK_K, GROUP_N, GROUP_K, BLOCK_SCALES)  # fmt: skip
    if MUL_WEIGHT:
        acc *= tl.load(weight + slot)
    if HAS_BIAS:
        acc += tl.load(bias + expert * N2 + rows, mask=rows < N2, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N // 16, 2, 8)), (0, 2, 1)))
    result = tl.reshape(combine_gate(gate, up, ACT, ALPHA, LIMIT), (BLOCK_N // 2,))
    half = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    at = out + slot.to(tl.int64) * stride_out + half
    tl.store(at, narrow(result, out.dtype.element_ty), mask=half < N2 // 2)


@triton.jit(do_not_specialize=["factor"])
def down_gemv(h, w, w_scale, bias, out, weight, ids, factor, N, K, stride_h, stride_we, stride_wn, stride_wse,
              stride_wsn, stride_wsk, stride_out, TOPK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
              GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, BLOCK_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
              MUL_WEIGHT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """out[token] = factor * sum over slots of weight * (h[slot] @ w[expert].T + bias[expert]); BLOCK_K covers K."""
    token = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    mask = (rows < N)[:, None] & (ks < K)[None, :]
    tiles = ()
    for i in tl.static_range(TOPK):
        expert = tl.load(ids + token * TOPK + i).to(tl.int64)
        at = w + expert * stride_we + rows.to(tl.int64)[:, None] * stride_wn + ks[None, :]
        tiles += (tl.load(at, mask=mask & (expert >= 0), other=0.0),)  # type: ignore[assignment]
    wait_dependencies(PDL)
    launch_dependents(PDL)
    total = tl.zeros([BLOCK_N], tl.float32)
    for i in tl.static_range(TOPK):
        slot = token * TOPK + i
        expert = tl.load(ids + slot).to(tl.int64)
        v = tl.load(h + slot.to(tl.int64) * stride_h + ks, mask=(ks < K) & (expert >= 0), other=0.0).to(tl.float32)
        scales = w_scale
        if BLOCK_SCALES:
            scales = w_scale + tl.maximum(expert, 0) * stride_wse
        y = _row_sums(tiles[i], v, scales, tl.minimum(rows, N - 1), 0, K, stride_wsn, stride_wsk, BLOCK_N, BLOCK_K,
                      GROUP_N, GROUP_K, BLOCK_SCALES)  # fmt: skip
        if HAS_BIAS:
            bias_mask = (rows < N) & (expert >= 0)
            y += tl.load(bias + expert * N + rows, mask=bias_mask, other=0.0).to(tl.float32)
        total += y * tl.load(weight + slot) if MUL_WEIGHT else y
    at = out + token.to(tl.int64) * stride_out + rows
    tl.store(at, narrow(total * factor, out.dtype.element_ty), mask=rows < N)
