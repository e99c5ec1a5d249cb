"""The two grouped GEMMs of a mixture-of-experts layer.

Rows come in expert order and in blocks of one expert (`align.Alignment`). The up projection gathers token rows, and
applies the gated activation to its accumulator: its weights are stored with gate and up interleaved in groups of
eight rows, so that a gate and its up value meet in one thread for every matrix-unit layout. Its output stays in sorted
order, so that the down projection reads contiguous rows, and scatters its result to (token, slot).

The number of tokens enters as run-time integers that are not specialised: one compile serves every batch size.

SCHEME says how weights are quantised: `none`; `row` (FP8, one scale per weight row, one per activation row);
`block` (FP8, scales per GROUP_K columns); `mxfp4` (4-bit pairs with a scale per 32 columns). INLINE quantises the
activation tile inside the loop. SWAP makes the weights the left operand, so that the matrix unit's long side is not
wasted on a handful of tokens. PDL lets a kernel start while its predecessor drains.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.activation import combine_gate
from xkernels.ops._details.common import matmul_add, narrow, swizzle
from xkernels.ops._details.mxfp4 import unpack
from xkernels.ops._details.pdl import launch_dependents, prefetch_l2, wait_dependencies
from xkernels.ops._details.quant import quant_rows


@triton.jit
def _pair(acc, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Gate and up [ROWS, COLS / 2] out of [ROWS, COLS] interleaved in groups of eight columns."""
    groups = tl.reshape(acc, (ROWS, COLS // 16, 2, 8))
    gate, up = tl.split(tl.permute(groups, (0, 1, 3, 2)))
    return tl.reshape(gate, (ROWS, COLS // 2)), tl.reshape(up, (ROWS, COLS // 2))


@triton.jit
def _weights(w, w_scale, expert, n0, k, N, K, stride_we, stride_wn, stride_wse, stride_wsn, BLOCK_N: tl.constexpr,
             BLOCK_K: tl.constexpr, W_TMA: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
             SCHEME: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """Weight tile [BLOCK_N, BLOCK_K] of one expert."""
    PACK: tl.constexpr = 2 if SCHEME == "mxfp4" else 1
    rows = n0 + tl.arange(0, BLOCK_N)
    if W_TMA:
        tile = w.load([(expert * N).to(tl.int32) + n0, k // PACK])
    else:
        ks = tl.arange(0, BLOCK_K // PACK)
        at = w + expert * stride_we + rows.to(tl.int64)[:, None] * stride_wn + k // PACK + ks[None, :]
        if EVEN_N and EVEN_K:
            tile = tl.load(at)
        elif EVEN_K:
            tile = tl.load(at, mask=(rows < N)[:, None], other=0.0)
        else:
            tile = tl.load(at, mask=(rows < N)[:, None] & (ks < (K - k) // PACK)[None, :], other=0.0)
    if SCHEME == "mxfp4":
        groups = tl.arange(0, BLOCK_K // 32)
        at = w_scale + expert * stride_wse + rows[:, None] * stride_wsn + k // 32 + groups[None, :]
        mask = (rows < N)[:, None] & (groups < (K - k) // 32)[None, :]
        tile = unpack(tile, tl.load(at, mask=mask, other=0), dtype, BLOCK_N, BLOCK_K)
    return tile


@triton.jit
def _block_scales(scale, n0, k, K, stride_n, stride_k, BLOCK_N: tl.constexpr, GROUP_N: tl.constexpr,
                  GROUP_K: tl.constexpr, SCALES: tl.constexpr):  # fmt: skip
    """Weight scales of one k-block for the tile's rows.

    SCALES: `one` (the tile lies in one block of rows), `two` (gate rows have one scale and up rows the next) or `each`.
    """
    at = scale + (k // GROUP_K) * stride_k
    ok = k < K
    if SCALES == "one":
        s = tl.zeros([BLOCK_N], tl.float32) + tl.load(at + (n0 // GROUP_N) * stride_n, mask=ok, other=0.0)
    elif SCALES == "two":
        gate = tl.load(at + (n0 // GROUP_N) * stride_n, mask=ok, other=0.0)
        up = tl.load(at + (n0 // GROUP_N + 1) * stride_n, mask=ok, other=0.0)
        s = tl.where(tl.arange(0, BLOCK_N) // 8 % 2 == 0, gate, up)
    else:
        rows = n0 + tl.arange(0, BLOCK_N)
        s = tl.load(at + (rows // GROUP_N) * stride_n, mask=(rows >= 0) & ok, other=0.0)
    return s


@triton.jit
def _accumulate(a, a_scale, a_row, a_valid, row0, w, w_scale, expert, n0, N, K, stride_am, stride_ak, stride_asm,
                stride_ask, stride_we, stride_wn, stride_wse, stride_wsn, stride_wsk, dtype: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_N: tl.constexpr,
                GROUP_K: tl.constexpr, A_TMA: tl.constexpr, W_TMA: tl.constexpr, EVEN_N: tl.constexpr,
                EVEN_K: tl.constexpr, MASK_M: tl.constexpr, SCHEME: tl.constexpr, SCALES: tl.constexpr,
                INLINE: tl.constexpr, SWAP: tl.constexpr):  # fmt: skip
    """Float32 tile [BLOCK_M, BLOCK_N] of a[a_row] @ w[expert].T, block scales applied."""
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    w_scale_e = w_scale
    if SCHEME == "block":
        w_scale_e = w_scale + expert * stride_wse
        ws = _block_scales(w_scale_e, n0, 0, K, stride_wsn, stride_wsk, BLOCK_N, GROUP_N, GROUP_K, SCALES)
        if not INLINE:
            s = tl.load(a_scale + a_row * stride_asm, mask=a_valid, other=0.0)
    for k in range(0, K, BLOCK_K):
        if A_TMA:
            x = a.load([row0, k])
        else:
            at = a + a_row[:, None] * stride_am + (k + ks)[None, :] * stride_ak
            if EVEN_K and not MASK_M:
                x = tl.load(at)
            elif EVEN_K:
                x = tl.load(at, mask=a_valid[:, None], other=0.0)
            else:
                x = tl.load(at, mask=a_valid[:, None] & (ks < K - k)[None, :], other=0.0)
        y = _weights(w, w_scale, expert, n0, k, N, K, stride_we, stride_wn, stride_wse, stride_wsn, BLOCK_N, BLOCK_K,
                     W_TMA, EVEN_N, EVEN_K, SCHEME, dtype)  # fmt: skip
        if SCHEME == "block":
            if INLINE:
                x, s = quant_rows(x.to(tl.float32), y.dtype)
            both = (ws[:, None] * s[None, :]) if SWAP else (s[:, None] * ws[None, :])
            part = tl.dot(y, tl.trans(x)) if SWAP else tl.dot(x, tl.trans(y))
            ws = _block_scales(w_scale_e, n0, k + BLOCK_K, K, stride_wsn, stride_wsk, BLOCK_N, GROUP_N, GROUP_K, SCALES)
            if not INLINE:
                next_at = a_scale + a_row * stride_asm + ((k + BLOCK_K) // GROUP_K) * stride_ask
                s = tl.load(next_at, mask=a_valid & (k + BLOCK_K < K), other=0.0)
            acc += part * both
        elif SWAP:
            acc = matmul_add(y, tl.trans(x), acc)
        else:
            acc = matmul_add(x, tl.trans(y), acc)
    return tl.trans(acc) if SWAP else acc


@triton.jit(do_not_specialize=["num_valid", "stride_os"])
def up_gemm(x, x_scale, w, w_scale, bias, out, out_scale, weight, sorted_ids, experts, post, num_valid, N2, K,
            stride_xm, stride_xk, stride_xsm, stride_we, stride_wn, stride_wse, stride_wsn, stride_wsk, stride_out,
            stride_os, TOPK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
            GROUP: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, W_TMA: tl.constexpr,
            EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SCHEME: tl.constexpr, SCALES: tl.constexpr,
            INLINE: tl.constexpr, QUANT_OUT: tl.constexpr, SWAP: tl.constexpr, HAS_BIAS: tl.constexpr,
            MUL_WEIGHT: tl.constexpr, PDL: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr,
            LIMIT: tl.constexpr):  # fmt: skip
    """out[row] = activation(x[token of row] @ w[expert].T + bias[expert]); N2 counts interleaved weight rows."""
    wait_dependencies(PDL)
    launch_dependents(PDL)
    num_n = tl.cdiv(N2, BLOCK_N)
    pid = tl.program_id(0)
    num_m = tl.load(post) // BLOCK_M
    if pid >= num_m * num_n:
        return
    pid_m, pid_n = swizzle(pid, num_m, num_n, GROUP)
    expert = tl.load(experts + pid_m).to(tl.int64)
    if expert < 0:
        return
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.load(sorted_ids + rows)
    valid = slot < num_valid
    token = (slot // TOPK).to(tl.int64)
    n0 = pid_n * BLOCK_N
    cols = n0 + tl.arange(0, BLOCK_N)
    acc = _accumulate(x, x_scale, token, valid, 0, w, w_scale, expert, n0, N2, K, stride_xm, stride_xk, stride_xsm, 1,
                      stride_we, stride_wn, stride_wse, stride_wsn, stride_wsk, x.dtype.element_ty, BLOCK_M, BLOCK_N,
                      BLOCK_K, GROUP_N, GROUP_K, False, W_TMA, EVEN_N, EVEN_K, True, SCHEME, SCALES, INLINE,
                      SWAP)  # fmt: skip
    if SCHEME == "row":
        acc *= tl.load(x_scale + token * stride_xsm, mask=valid, other=0.0)[:, None]
        acc *= tl.load(w_scale + expert * stride_wse + cols, mask=cols < N2, other=0.0)[None, :]
    if MUL_WEIGHT:
        acc *= tl.load(weight + slot, mask=valid, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + expert * N2 + cols, mask=cols < N2, other=0.0).to(tl.float32)[None, :]
    gate, up = _pair(acc, BLOCK_M, BLOCK_N)
    result = combine_gate(gate, up, ACT, ALPHA, LIMIT)
    half = pid_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    at = out + rows.to(tl.int64)[:, None] * stride_out + half[None, :]
    if QUANT_OUT:
        q, s = quant_rows(result, out.dtype.element_ty)
        tl.store(at, q, mask=(half < N2 // 2)[None, :])
        tl.store(out_scale + pid_n * stride_os + rows, s)
    else:
        tl.store(at, narrow(result, out.dtype.element_ty), mask=(half < N2 // 2)[None, :])


@triton.jit(do_not_specialize=["num_valid", "stride_hsk"])
def down_gemm(h, h_scale, w, w_scale, bias, out, weight, sorted_ids, experts, post, num_valid, N, K, stride_h,
              stride_hsm, stride_hsk, stride_we, stride_wn, stride_wse, stride_wsn, stride_wsk, stride_out,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
              GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, A_TMA: tl.constexpr, W_TMA: tl.constexpr,
              EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SCHEME: tl.constexpr, SCALES: tl.constexpr,
              INLINE: tl.constexpr, SWAP: tl.constexpr, HAS_BIAS: tl.constexpr, MUL_WEIGHT: tl.constexpr,
              PDL: tl.constexpr, PREFETCH: tl.constexpr):  # fmt: skip
    """out[token, slot] = (h[row] @ w[expert].T + bias[expert]) * router weight; blocks of no expert write zeros."""
    num_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    num_m = tl.load(post) // BLOCK_M
    if pid >= num_m * num_n:
        wait_dependencies(PDL)
        return
    pid_m, pid_n = swizzle(pid, num_m, num_n, GROUP)
    expert = tl.load(experts + pid_m).to(tl.int64)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.load(sorted_ids + rows)
    valid = slot < num_valid
    n0 = pid_n * BLOCK_N
    cols = n0 + tl.arange(0, BLOCK_N)
    if expert < 0:
        wait_dependencies(PDL)
        zero_at = out + slot.to(tl.int64)[:, None] * stride_out + cols[None, :]
        zeros = tl.zeros((BLOCK_M, BLOCK_N), out.dtype.element_ty)
        tl.store(zero_at, zeros, mask=valid[:, None] & (cols < N)[None, :])
        return
    if PREFETCH and not W_TMA:
        lines = tl.arange(0, PREFETCH) * (1024 // w.dtype.element_ty.primitive_bitwidth)
        prefetch_l2(w + expert * stride_we + tl.minimum(cols, N - 1).to(tl.int64)[:, None] * stride_wn
                    + tl.minimum(lines, K - 1)[None, :])  # fmt: skip
    wait_dependencies(PDL)
    launch_dependents(PDL)
    acc = _accumulate(h, h_scale, rows.to(tl.int64), rows >= 0, pid_m * BLOCK_M, w, w_scale, expert, n0, N, K,
                      stride_h, 1, stride_hsm, stride_hsk, stride_we, stride_wn, stride_wse, stride_wsn, stride_wsk,
                      out.dtype.element_ty, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_N, GROUP_K, A_TMA, W_TMA, EVEN_N, EVEN_K,
                      False, SCHEME, SCALES, INLINE, SWAP)  # fmt: skip
    if SCHEME == "row":
        acc *= tl.load(h_scale + rows * stride_hsm)[:, None]
        acc *= tl.load(w_scale + expert * stride_wse + cols, mask=cols < N, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + expert * N + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if MUL_WEIGHT:
        acc *= tl.load(weight + slot, mask=valid, other=0.0)[:, None]
    out_at = out + slot.to(tl.int64)[:, None] * stride_out + cols[None, :]
    tl.store(out_at, narrow(acc, out.dtype.element_ty), mask=valid[:, None] & (cols < N)[None, :])
