"""Kernel of the FP8 linear layers."""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.common import narrow, swizzle


@triton.jit(do_not_specialize=["M", "stride_ask"])
def fp8_gemm(a, a_scale, b, b_scale, bias, out, M, N, K, stride_am, stride_asm, stride_ask, stride_bn, stride_bsn,
             stride_bsk, stride_out, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
             GROUP: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, EVEN_K: tl.constexpr,
             BLOCK_SCALES: tl.constexpr, B_TMA: tl.constexpr, HAS_BIAS: tl.constexpr,
             SWAP: tl.constexpr):  # fmt: skip
    """out [M, N] = (a * a_scale) @ (b * b_scale).T + bias; a [M, K], b [N, K] FP8.

    BLOCK_SCALES: scales per GROUP_K columns (b's also per GROUP_N rows), applied at each step; otherwise one scale per
    row of a and of b (stride 0: one for all), applied once.
    """
    num_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = swizzle(tl.program_id(0), tl.cdiv(M, BLOCK_M), num_n, GROUP)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    live = rows < M
    row = tl.where(live, rows, 0).to(tl.int64)
    col = tl.where(cols < N, cols, 0).to(tl.int64)
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    sa_at = a_scale + row * stride_asm
    sb_at = b_scale + (col // GROUP_N) * stride_bsn
    if GROUP_N % BLOCK_N == 0:
        sb_at = b_scale + (pid_n * BLOCK_N // GROUP_N) * stride_bsn + tl.zeros([BLOCK_N], tl.int32)
    sa = tl.load(sa_at)
    sb = tl.load(sb_at)
    for k in range(0, K, BLOCK_K):
        at = a + row[:, None] * stride_am + (k + ks)[None, :]
        x = tl.load(at) if EVEN_K else tl.load(at, mask=(ks < K - k)[None, :], other=0.0)
        if B_TMA:
            y = b.load([pid_n * BLOCK_N, k])
        else:
            bt = b + col[:, None] * stride_bn + (k + ks)[None, :]
            y = tl.load(bt) if EVEN_K else tl.load(bt, mask=(ks < K - k)[None, :], other=0.0)
        if BLOCK_SCALES:
            part = tl.dot(y, tl.trans(x)) if SWAP else tl.dot(x, tl.trans(y))
            both = (sb[:, None] * sa[None, :]) if SWAP else (sa[:, None] * sb[None, :])
            block = (k + BLOCK_K) // GROUP_K
            more = k + BLOCK_K < K
            sa = tl.load(sa_at + block * stride_ask, mask=live & more, other=0.0)
            sb = tl.load(sb_at + block * stride_bsk, mask=(cols >= 0) & more, other=0.0)
            acc += part * both
        elif SWAP:
            acc = tl.dot(y, tl.trans(x), acc)
        else:
            acc = tl.dot(x, tl.trans(y), acc)
    acc = tl.trans(acc) if SWAP else acc
    if not BLOCK_SCALES:
        acc *= sa[:, None] * sb[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    out_at = out + rows.to(tl.int64)[:, None] * stride_out + cols[None, :]
    tl.store(out_at, narrow(acc, out.dtype.element_ty), mask=live[:, None] & (cols < N)[None, :])
