"""The two grouped GEMMs of a mixture-of-experts layer.

Rows come in expert order and in blocks of one expert (`align.Alignment`). The up projection gathers token rows, and
applies the gated activation to its accumulator: its weights are stored with gate and up interleaved in groups of
eight rows, so that a gate and its up value meet in one thread for every matrix-unit layout. Its output stays in sorted
order, so that the down projection reads contiguous rows, and scatters its result to (token, slot).

The number of tokens enters as run-time integers that are not specialised: one compile serves every batch size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.activation import combine_gate
from xkernels.ops._details.common import matmul_add, narrow, swizzle


@triton.jit
def _pair(acc, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Gate and up [ROWS, COLS / 2] out of [ROWS, COLS] interleaved in groups of eight columns."""
    groups = tl.reshape(acc, (ROWS, COLS // 16, 2, 8))
    gate, up = tl.split(tl.permute(groups, (0, 1, 3, 2)))
    return tl.reshape(gate, (ROWS, COLS // 2)), tl.reshape(up, (ROWS, COLS // 2))


@triton.jit(do_not_specialize=["num_valid"])
def up_gemm(x_ptr, w_ptr, bias_ptr, out_ptr, weight_ptr, sorted_ptr, experts_ptr, post_ptr, num_valid, N2, K,
            stride_xm, stride_xk, stride_we, stride_wn, stride_out,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
            TOPK: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, HAS_BIAS: tl.constexpr,
            MUL_WEIGHT: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):  # fmt: skip
    """out[row] = activation(x[token of row] @ w[expert].T + bias[expert]); N2 counts interleaved weight rows."""
    num_n = tl.cdiv(N2, BLOCK_N)
    pid = tl.program_id(0)
    num_m = tl.load(post_ptr) // BLOCK_M
    if pid >= num_m * num_n:
        return
    pid_m, pid_n = swizzle(pid, num_m, num_n, GROUP)
    expert = tl.load(experts_ptr + pid_m).to(tl.int64)
    if expert < 0:
        return
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.load(sorted_ptr + rows)
    valid = slot < num_valid
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    x_at = x_ptr + (slot // TOPK).to(tl.int64)[:, None] * stride_xm + ks[None, :] * stride_xk
    w_at = w_ptr + expert * stride_we + cols[None, :].to(tl.int64) * stride_wn + ks[:, None]
    in_n = cols < N2
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        x_mask = valid[:, None]
        w_mask = in_n[None, :]
        if not EVEN_K:
            x_mask = x_mask & (ks < K - k)[None, :]
            w_mask = w_mask & (ks < K - k)[:, None]
        x = tl.load(x_at, mask=x_mask, other=0.0)
        w = tl.load(w_at) if EVEN_K and EVEN_N else tl.load(w_at, mask=w_mask, other=0.0)
        acc = matmul_add(x, w, acc)
        x_at += BLOCK_K * stride_xk
        w_at += BLOCK_K
    if MUL_WEIGHT:
        acc *= tl.load(weight_ptr + slot, mask=valid, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * N2 + cols, mask=in_n, other=0.0).to(tl.float32)[None, :]
    gate, up = _pair(acc, BLOCK_M, BLOCK_N)
    half = pid_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    at = out_ptr + rows.to(tl.int64)[:, None] * stride_out + half[None, :]
    result = narrow(combine_gate(gate, up, ACT, ALPHA, LIMIT), out_ptr.dtype.element_ty)
    if EVEN_N:
        tl.store(at, result)
    else:
        tl.store(at, result, mask=(half < N2 // 2)[None, :])


@triton.jit(do_not_specialize=["num_valid"])
def down_gemm(h_ptr, w_ptr, bias_ptr, out_ptr, weight_ptr, sorted_ptr, experts_ptr, post_ptr, num_valid, N, K,
              stride_h, stride_we, stride_wn, stride_out,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
              EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, HAS_BIAS: tl.constexpr,
              MUL_WEIGHT: tl.constexpr):  # fmt: skip
    """out[token, slot] = (h[row] @ w[expert].T + bias[expert]) * router weight; blocks of no expert write zeros."""
    num_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    num_m = tl.load(post_ptr) // BLOCK_M
    if pid >= num_m * num_n:
        return
    pid_m, pid_n = swizzle(pid, num_m, num_n, GROUP)
    expert = tl.load(experts_ptr + pid_m).to(tl.int64)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.load(sorted_ptr + rows)
    valid = slot < num_valid
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = cols < N
    out_at = out_ptr + slot.to(tl.int64)[:, None] * stride_out + cols[None, :]
    out_mask = valid[:, None] & in_n[None, :]
    if expert < 0:
        tl.store(out_at, tl.zeros((BLOCK_M, BLOCK_N), out_ptr.dtype.element_ty), mask=out_mask)
        return
    ks = tl.arange(0, BLOCK_K)
    h_at = h_ptr + rows.to(tl.int64)[:, None] * stride_h + ks[None, :]
    w_at = w_ptr + expert * stride_we + cols[None, :].to(tl.int64) * stride_wn + ks[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            h = tl.load(h_at)
        else:
            h = tl.load(h_at, mask=(ks < K - k)[None, :], other=0.0)
        if EVEN_K and EVEN_N:
            w = tl.load(w_at)
        else:
            w = tl.load(w_at, mask=in_n[None, :] & (ks < K - k)[:, None], other=0.0)
        acc = matmul_add(h, w, acc)
        h_at += BLOCK_K
        w_at += BLOCK_K
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * N + cols, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if MUL_WEIGHT:
        acc *= tl.load(weight_ptr + slot, mask=valid, other=0.0)[:, None]
    tl.store(out_at, narrow(acc, out_ptr.dtype.element_ty), mask=out_mask)
