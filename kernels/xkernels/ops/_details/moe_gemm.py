"""The two grouped GEMMs of a mixture-of-experts layer.

Rows come in expert order and in blocks of one expert (`align.Alignment`). The up projection gathers token rows, and
applies the gated activation to its accumulator: its weights are stored with gate and up interleaved in groups of
eight rows, so that a gate and its up value meet in one thread for every matrix-unit layout. Its output stays in sorted
order, so that the down projection reads contiguous rows, and scatters its result to (token, slot).

The number of tokens enters as run-time integers that are not specialised: one compile serves every batch size.

SCHEME says how weights are quantised: `none`; `row` (FP8, one scale per weight row, one per activation row);
`block` (FP8, scales per GROUP_K columns); `mxfp4` (4-bit pairs with a scale per 32 columns). INLINE quantises the
activation tile inside the loop. SWAP makes the weights the left operand, so that the matrix unit's long side is not
wasted on a handful of tokens. PDL lets a kernel start while its predecessor drains. With FLATTEN a program walks the
tiles that its number and the grid's size give it, and the two loops become one, so that a tile's first loads are under
way while the tile before it finishes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.activation import combine_gate
from xkernels.ops._details.common import helper, matmul_add, narrow, swizzle
from xkernels.ops._details.mxfp4 import unpack
from xkernels.ops._details.pdl import launch_dependents, wait_dependencies
from xkernels.ops._details.quant import quant_pair, quant_rows


@helper
def _pair(acc, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Gate and up [ROWS, COLS / 2] out of [ROWS, COLS] interleaved in groups of eight columns."""
    groups = tl.reshape(acc, (ROWS, COLS // 16, 2, 8))
    gate, up = tl.split(tl.permute(groups, (0, 1, 3, 2)))
    return tl.reshape(gate, (ROWS, COLS // 2)), tl.reshape(up, (ROWS, COLS // 2))


@helper
def _own_tile(tile, post, experts, sorted_ids, num_n, num_valid, entries,
              BLOCK_M: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Block of rows, block of columns, expert and flat indices of a program with one tile; expert -2: nothing to do.

    Without grouping the look-ups do not wait for each other. The grid has no more blocks than `experts`; the last of
    them may reach beyond the `entries` of `sorted_ids`.
    """
    num_m = tl.load(post) // BLOCK_M
    if GROUP == 1:
        pid_m = tile // num_n
        pid_n = tile % num_n
    else:
        pid_m, pid_n = swizzle(tl.minimum(tile, tl.maximum(num_m * num_n - 1, 0)), tl.maximum(num_m, 1), num_n, GROUP)
    expert = tl.load(experts + pid_m)
    first = tl.load(sorted_ids + pid_m * BLOCK_M)
    places = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.load(sorted_ids + places, mask=places < entries, other=num_valid)
    used = (tile < num_m * num_n) & (first < num_valid)
    return pid_m, pid_n, tl.where(used, expert, -2), slot


@helper
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


@helper
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


@helper
def _step(acc, x, y, s, ws, SCHEME: tl.constexpr, INLINE: tl.constexpr, SWAP: tl.constexpr):
    """acc + x @ y.T for one k-step; block scales s (rows of x) and ws (rows of y) applied."""
    if SCHEME == "block":
        if INLINE:
            x, s = quant_rows(x.to(tl.float32), y.dtype)
        part = tl.dot(y, tl.trans(x)) if SWAP else tl.dot(x, tl.trans(y))
        acc += part * ((ws[:, None] * s[None, :]) if SWAP else (s[:, None] * ws[None, :]))
    elif SWAP:
        acc = matmul_add(y, tl.trans(x), acc)
    else:
        acc = matmul_add(x, tl.trans(y), acc)
    return acc


@helper
def _up_result(n0, expert, x, x_scale, w, w_scale, bias, weight, slot, num_valid, N2, K, stride_xm, stride_xk,
               stride_xsm, stride_we, stride_wn, stride_wse, stride_wsn, stride_wsk, TOPK: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_N: tl.constexpr,
               GROUP_K: tl.constexpr, W_TMA: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
               SCHEME: tl.constexpr, SCALES: tl.constexpr, INLINE: tl.constexpr, SWAP: tl.constexpr,
               HAS_BIAS: tl.constexpr, MUL_WEIGHT: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr,
               LIMIT: tl.constexpr):  # fmt: skip
    """Activated float32 tile [BLOCK_M, BLOCK_N / 2] from the weight rows n0 on."""
    ks = tl.arange(0, BLOCK_K)
    steps = (K + BLOCK_K - 1) // BLOCK_K
    dtype: tl.constexpr = x.dtype.element_ty
    valid = slot < num_valid
    token = (slot // TOPK).to(tl.int64)
    acc = tl.full((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), 0.0, tl.float32)
    s = valid
    ws = valid
    if SCHEME == "block":
        ws = _block_scales(w_scale + expert * stride_wse, n0, 0, K, stride_wsn, stride_wsk, BLOCK_N, GROUP_N,
                           GROUP_K, SCALES)  # fmt: skip
        if not INLINE:
            s = tl.load(x_scale + token * stride_xsm, mask=valid, other=0.0)
    for step in range(steps):
        k = step * BLOCK_K
        at = x + token[:, None] * stride_xm + (k + ks)[None, :] * stride_xk
        if EVEN_K:
            a = tl.load(at, mask=valid[:, None], other=0.0)
        else:
            a = tl.load(at, mask=valid[:, None] & (ks < K - k)[None, :], other=0.0)
        b = _weights(w, w_scale, expert, n0, k, N2, K, stride_we, stride_wn, stride_wse, stride_wsn, BLOCK_N,
                     BLOCK_K, W_TMA, EVEN_N, EVEN_K, SCHEME, dtype)  # fmt: skip
        acc = _step(acc, a, b, s, ws, SCHEME, INLINE, SWAP)
        if SCHEME == "block":
            k += BLOCK_K
            ws = _block_scales(w_scale + expert * stride_wse, n0, k, K, stride_wsn, stride_wsk, BLOCK_N, GROUP_N,
                               GROUP_K, SCALES)  # fmt: skip
            if not INLINE:
                s = tl.load(x_scale + token * stride_xsm + k // GROUP_K, mask=valid & (k < K), other=0.0)
    acc = tl.trans(acc) if SWAP else acc
    cols = n0 + tl.arange(0, BLOCK_N)
    if SCHEME == "row":
        acc *= tl.load(x_scale + token * stride_xsm, mask=valid, other=0.0)[:, None]
        acc *= tl.load(w_scale + expert * stride_wse + cols, mask=cols < N2, other=0.0)[None, :]
    if MUL_WEIGHT:
        acc *= tl.load(weight + slot, mask=valid, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + expert * N2 + cols, mask=cols < N2, other=0.0).to(tl.float32)[None, :]
    gate, up = _pair(acc, BLOCK_M, BLOCK_N)
    return combine_gate(gate, up, ACT, ALPHA, LIMIT)


@helper
def _up_tile(pid_m, pid_n, expert, x, x_scale, w, w_scale, bias, out, out_scale, weight, slot, num_valid, N2, K,
             stride_xm, stride_xk, stride_xsm, stride_we, stride_wn, stride_wse, stride_wsn, stride_wsk, stride_out,
             stride_os, TOPK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
             GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, W_TMA: tl.constexpr, EVEN_N: tl.constexpr,
             EVEN_K: tl.constexpr, SCHEME: tl.constexpr, SCALES: tl.constexpr, INLINE: tl.constexpr,
             QUANT_OUT: tl.constexpr, SWAP: tl.constexpr, HAS_BIAS: tl.constexpr, MUL_WEIGHT: tl.constexpr,
             ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):  # fmt: skip
    """One tile of the up projection, or with QUANT_OUT 2 the two that make a group of columns: compute and store."""
    HALF: tl.constexpr = BLOCK_N // 2
    expert = expert.to(tl.int64)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, HALF)
    n0 = pid_n * (2 * BLOCK_N if QUANT_OUT == 2 else BLOCK_N)
    result = _up_result(n0, expert, x, x_scale, w, w_scale, bias, weight, slot, num_valid, N2, K,
                        stride_xm, stride_xk, stride_xsm, stride_we, stride_wn, stride_wse, stride_wsn, stride_wsk,
                        TOPK, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_N, GROUP_K, W_TMA, EVEN_N, EVEN_K, SCHEME, SCALES,
                        INLINE, SWAP, HAS_BIAS, MUL_WEIGHT, ACT, ALPHA, LIMIT)  # fmt: skip
    at = out + rows.to(tl.int64)[:, None] * stride_out + (n0 // 2 + cols)[None, :]
    mask = (n0 // 2 + cols < N2 // 2)[None, :]
    if QUANT_OUT == 2:
        second = _up_result(n0 + BLOCK_N, expert, x, x_scale, w, w_scale, bias, weight, slot, num_valid,
                            N2, K, stride_xm, stride_xk, stride_xsm, stride_we, stride_wn, stride_wse, stride_wsn,
                            stride_wsk, TOPK, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_N, GROUP_K, W_TMA, EVEN_N, EVEN_K,
                            SCHEME, SCALES, INLINE, SWAP, HAS_BIAS, MUL_WEIGHT, ACT, ALPHA, LIMIT)  # fmt: skip
        q, q2, s = quant_pair(result, second, out.dtype.element_ty)
        tl.store(at, q)
        tl.store(at + HALF, q2)
        tl.store(out_scale + rows * stride_os + pid_n, s)
    elif QUANT_OUT == 1:
        q, s = quant_rows(result, out.dtype.element_ty)
        tl.store(at, q, mask=mask)
        tl.store(out_scale + rows * stride_os + pid_n, s)
    else:
        tl.store(at, narrow(result, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_valid", "entries"])
def up_gemm(x, x_scale, w, w_scale, bias, out, out_scale, weight, sorted_ids, experts, post, num_valid, entries, N2, K,
            stride_xm, stride_xk, stride_xsm, stride_we, stride_wn, stride_wse, stride_wsn, stride_wsk, stride_out,
            stride_os, TOPK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
            GROUP: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, W_TMA: tl.constexpr,
            EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SCHEME: tl.constexpr, SCALES: tl.constexpr,
            INLINE: tl.constexpr, QUANT_OUT: tl.constexpr, SWAP: tl.constexpr, HAS_BIAS: tl.constexpr,
            MUL_WEIGHT: tl.constexpr, PDL: tl.constexpr, READY: tl.constexpr, FLATTEN: tl.constexpr, ACT: tl.constexpr,
            ALPHA: tl.constexpr, LIMIT: tl.constexpr):  # fmt: skip
    """out[row] = activation(x[token of row] @ w[expert].T + bias[expert]); N2 counts interleaved weight rows.

    READY: the alignment is complete before this kernel starts.
    """
    WIDE: tl.constexpr = 2 * BLOCK_N if QUANT_OUT == 2 else BLOCK_N
    num_n = (N2 + WIDE - 1) // WIDE
    if READY:
        pid_m, pid_n, expert, slot = _own_tile(tl.program_id(0), post, experts, sorted_ids, num_n, num_valid, entries,
                                               BLOCK_M, GROUP)  # fmt: skip
    wait_dependencies(PDL)
    launch_dependents(PDL)
    if FLATTEN:
        first_m = tl.load(post + 1)
        num_m = tl.load(post) // BLOCK_M - first_m
        for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
            pid_m, pid_n = swizzle(tile, num_m, num_n, GROUP)
            expert = tl.load(experts + first_m + pid_m)
            slot = tl.load(sorted_ids + (first_m + pid_m) * BLOCK_M + tl.arange(0, BLOCK_M))
            _up_tile(first_m + pid_m, pid_n, expert, x, x_scale, w, w_scale, bias, out, out_scale, weight, slot,
                     num_valid, N2, K, stride_xm, stride_xk, stride_xsm, stride_we, stride_wn, stride_wse, stride_wsn,
                     stride_wsk, stride_out, stride_os, TOPK, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_N, GROUP_K, W_TMA,
                     EVEN_N, EVEN_K, SCHEME, SCALES, INLINE, QUANT_OUT, SWAP, HAS_BIAS, MUL_WEIGHT, ACT, ALPHA,
                     LIMIT)  # fmt: skip
    else:
        if not READY:
            pid_m, pid_n, expert, slot = _own_tile(tl.program_id(0), post, experts, sorted_ids, num_n, num_valid,
                                                   entries, BLOCK_M, GROUP)  # fmt: skip
        if expert < 0:
            return
        _up_tile(pid_m, pid_n, expert, x, x_scale, w, w_scale, bias, out, out_scale, weight, slot, num_valid, N2,
                 K, stride_xm, stride_xk, stride_xsm, stride_we, stride_wn, stride_wse, stride_wsn, stride_wsk,
                 stride_out, stride_os, TOPK, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_N, GROUP_K, W_TMA, EVEN_N, EVEN_K,
                 SCHEME, SCALES, INLINE, QUANT_OUT, SWAP, HAS_BIAS, MUL_WEIGHT, ACT, ALPHA, LIMIT)  # fmt: skip


@helper
def _zero_tile(out, sorted_ids, pid_m, pid_n, N, num_valid, stride_out, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Zeros for a tile of entries of no local expert."""
    slot = tl.load(sorted_ids + pid_m * BLOCK_M + tl.arange(0, BLOCK_M))
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    at = out + slot.to(tl.int64)[:, None] * stride_out + cols[None, :]
    zeros = tl.zeros((BLOCK_M, BLOCK_N), out.dtype.element_ty)
    tl.store(at, zeros, mask=(slot < num_valid)[:, None] & (cols < N)[None, :])


@helper
def _down_tile(pid_m, pid_n, expert, slot, h, h_scale, w, w_scale, bias, out, weight, sorted_ids, num_valid, N, K,
               stride_h, stride_hsm, stride_hsk, stride_we, stride_wn, stride_wse, stride_wsn, stride_wsk, stride_out,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_N: tl.constexpr,
               GROUP_K: tl.constexpr, A_TMA: tl.constexpr, W_TMA: tl.constexpr, EVEN_N: tl.constexpr,
               EVEN_K: tl.constexpr, SCHEME: tl.constexpr, SCALES: tl.constexpr, INLINE: tl.constexpr,
               SWAP: tl.constexpr, HAS_BIAS: tl.constexpr, MUL_WEIGHT: tl.constexpr):  # fmt: skip
    """One tile of the down projection: accumulate, then finish.

    slot: the rows' flat indices; None, where tiles follow each other in one loop: they are read at the end then.
    """
    ks = tl.arange(0, BLOCK_K)
    steps = (K + BLOCK_K - 1) // BLOCK_K
    dtype: tl.constexpr = out.dtype.element_ty
    expert = expert.to(tl.int64)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row = rows.to(tl.int64)
    n0 = pid_n * BLOCK_N
    factor = row
    if slot is not None and MUL_WEIGHT:
        factor = tl.load(weight + slot, mask=slot < num_valid, other=0.0)
    acc = tl.full((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), 0.0, tl.float32)
    s = row
    ws = row
    if SCHEME == "block":
        ws = _block_scales(w_scale + expert * stride_wse, n0, 0, K, stride_wsn, stride_wsk, BLOCK_N, GROUP_N,
                           GROUP_K, SCALES)  # fmt: skip
        if not INLINE:
            s = tl.load(h_scale + row * stride_hsm)
    for step in range(steps):
        k = step * BLOCK_K
        if A_TMA:
            a = h.load([pid_m * BLOCK_M, k])
        elif EVEN_K:
            a = tl.load(h + row[:, None] * stride_h + (k + ks)[None, :])
        else:
            a = tl.load(h + row[:, None] * stride_h + (k + ks)[None, :], mask=(ks < K - k)[None, :], other=0.0)
        b = _weights(w, w_scale, expert, n0, k, N, K, stride_we, stride_wn, stride_wse, stride_wsn, BLOCK_N,
                     BLOCK_K, W_TMA, EVEN_N, EVEN_K, SCHEME, dtype)  # fmt: skip
        acc = _step(acc, a, b, s, ws, SCHEME, INLINE, SWAP)
        if SCHEME == "block":
            k += BLOCK_K
            ws = _block_scales(w_scale + expert * stride_wse, n0, k, K, stride_wsn, stride_wsk, BLOCK_N, GROUP_N,
                               GROUP_K, SCALES)  # fmt: skip
            if not INLINE:
                s = tl.load(h_scale + row * stride_hsm + (k // GROUP_K) * stride_hsk, mask=(row >= 0) & (k < K),
                            other=0.0)  # fmt: skip
    if slot is None:
        slot = tl.load(sorted_ids + rows)
        if MUL_WEIGHT:
            factor = tl.load(weight + slot, mask=slot < num_valid, other=0.0)
    _finish_down(tl.trans(acc) if SWAP else acc, h_scale, w_scale, bias, out, factor, slot, expert, pid_m, pid_n,
                 num_valid, N, stride_hsm, stride_wse, stride_out, BLOCK_M, BLOCK_N, SCHEME, HAS_BIAS,
                 MUL_WEIGHT)  # fmt: skip


@triton.jit(do_not_specialize=["num_valid", "entries"])
def down_gemm(h, h_scale, w, w_scale, bias, out, weight, sorted_ids, experts, post, num_valid, entries, N, K, stride_h,
              stride_hsm, stride_hsk, stride_we, stride_wn, stride_wse, stride_wsn, stride_wsk, stride_out,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
              GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, A_TMA: tl.constexpr, W_TMA: tl.constexpr,
              EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SCHEME: tl.constexpr, SCALES: tl.constexpr,
              INLINE: tl.constexpr, SWAP: tl.constexpr, HAS_BIAS: tl.constexpr, MUL_WEIGHT: tl.constexpr,
              PDL: tl.constexpr, FLATTEN: tl.constexpr):  # fmt: skip
    """out[token, slot] = (h[row] @ w[expert].T + bias[expert]) * router weight; blocks of no expert write zeros.

    The alignment is older than the predecessor, which has waited: it may be read before waiting.
    """
    num_n = (N + BLOCK_N - 1) // BLOCK_N
    if FLATTEN:
        first_m = tl.load(post + 1)
        num_m = tl.load(post) // BLOCK_M - first_m
        wait_dependencies(PDL)
        launch_dependents(PDL)
        for tile in range(tl.program_id(0), first_m * num_n, tl.num_programs(0)):
            _zero_tile(out, sorted_ids, tile // num_n, tile % num_n, N, num_valid, stride_out, BLOCK_M, BLOCK_N)
        for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
            pid_m, pid_n = swizzle(tile, num_m, num_n, GROUP)
            expert = tl.load(experts + first_m + pid_m)
            _down_tile(first_m + pid_m, pid_n, expert, None, h, h_scale, w, w_scale, bias, out, weight, sorted_ids,
                       num_valid, N, K, stride_h, stride_hsm, stride_hsk, stride_we, stride_wn, stride_wse,
                       stride_wsn, stride_wsk, stride_out, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_N, GROUP_K, A_TMA, W_TMA,
                       EVEN_N, EVEN_K, SCHEME, SCALES, INLINE, SWAP, HAS_BIAS, MUL_WEIGHT)  # fmt: skip
    else:
        pid_m, pid_n, expert, slot = _own_tile(tl.program_id(0), post, experts, sorted_ids, num_n, num_valid, entries,
                                               BLOCK_M, GROUP)  # fmt: skip
        wait_dependencies(PDL)
        launch_dependents(PDL)
        if expert == -1:
            _zero_tile(out, sorted_ids, pid_m, pid_n, N, num_valid, stride_out, BLOCK_M, BLOCK_N)
        if expert < 0:
            return
        _down_tile(pid_m, pid_n, expert, slot, h, h_scale, w, w_scale, bias, out, weight, sorted_ids, num_valid, N, K,
                   stride_h, stride_hsm, stride_hsk, stride_we, stride_wn, stride_wse, stride_wsn, stride_wsk,
                   stride_out, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_N, GROUP_K, A_TMA, W_TMA, EVEN_N, EVEN_K, SCHEME,
                   SCALES, INLINE, SWAP, HAS_BIAS, MUL_WEIGHT)  # fmt: skip


@helper
def _finish_down(acc, h_scale, w_scale, bias, out, factor, slot, expert, pid_m, pid_n, num_valid, N, stride_hsm,
                 stride_wse, stride_out, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCHEME: tl.constexpr,
                 HAS_BIAS: tl.constexpr, MUL_WEIGHT: tl.constexpr):  # fmt: skip
    """Scales, bias, router weight and scattered store of one tile of the down projection."""
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = slot < num_valid
    if SCHEME == "row":
        acc *= tl.load(h_scale + rows * stride_hsm)[:, None]
        acc *= tl.load(w_scale + expert * stride_wse + cols, mask=cols < N, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + expert * N + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if MUL_WEIGHT:
        acc *= factor[:, None]
    at = out + slot.to(tl.int64)[:, None] * stride_out + cols[None, :]
    tl.store(at, narrow(acc, out.dtype.element_ty), mask=valid[:, None] & (cols < N)[None, :])
