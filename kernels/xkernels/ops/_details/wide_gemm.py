"""Block FP8's up projection for many rows: both weight tiles of a group of columns at once."""

from __future__ import annotations

import triton.language as tl

from xkernels.ops._details.activation import combine_gate
from xkernels.ops._details.common import INTERPRETED, helper
from xkernels.ops._details.expert_tiles import block_scales, pair, weight_tile


@helper
def settled(x):
    """x, computed before what follows: else its sum waits for the next product, in registers that nobody has."""
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1)


@helper
def up_both(pid_m, n0, expert, x, x_scale, w, w_scale, sorted_ids, num_valid, N2, K, stride_xm, stride_xk, stride_xsm,
            stride_we, stride_wn, stride_wse, stride_wsn, stride_wsk, TOPK: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
            W_TMA: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr,
            LIMIT: tl.constexpr):  # fmt: skip
    """Two neighbouring tiles of an up projection, activated, float32 [BLOCK_M, BLOCK_N / 2] each.

    Every tile of rows is fetched once for both.
    """
    ks = tl.arange(0, BLOCK_K)
    dtype: tl.constexpr = x.dtype.element_ty
    slot = tl.load(sorted_ids + pid_m * BLOCK_M + tl.arange(0, BLOCK_M))
    valid = slot < num_valid
    token = (slot // TOPK).to(tl.int64)
    first = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    second = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    scales = w_scale + expert * stride_wse
    ws = block_scales(scales, n0, 0, K, stride_wsn, stride_wsk, BLOCK_N, GROUP_N, GROUP_K, "two")
    s = tl.load(x_scale + token * stride_xsm, mask=valid, other=0.0)
    for step in range((K + BLOCK_K - 1) // BLOCK_K):
        k = step * BLOCK_K
        a = tl.load(x + token[:, None] * stride_xm + (k + ks)[None, :] * stride_xk,
                    mask=valid[:, None] & (ks < K - k)[None, :], other=0.0)  # fmt: skip
        b = weight_tile(w, w_scale, expert, n0, k, N2, K, stride_we, stride_wn, stride_wse, stride_wsn, BLOCK_N,
                        BLOCK_K, W_TMA, EVEN_N, EVEN_K, "block", dtype)  # fmt: skip
        c = weight_tile(w, w_scale, expert, n0 + BLOCK_N, k, N2, K, stride_we, stride_wn, stride_wse, stride_wsn,
                        BLOCK_N, BLOCK_K, W_TMA, EVEN_N, EVEN_K, "block", dtype)  # fmt: skip
        factor = s[:, None] * ws[None, :]
        first = settled(first + tl.dot(a, tl.trans(b)) * factor)
        second += tl.dot(a, tl.trans(c)) * factor
        k += BLOCK_K
        ws = block_scales(scales, n0, k, K, stride_wsn, stride_wsk, BLOCK_N, GROUP_N, GROUP_K, "two")
        s = tl.load(x_scale + token * stride_xsm + k // GROUP_K, mask=valid & (k < K), other=0.0)
    gate, up = pair(first, BLOCK_M, BLOCK_N)
    gate2, up2 = pair(second, BLOCK_M, BLOCK_N)
    return combine_gate(gate, up, ACT, ALPHA, LIMIT), combine_gate(gate2, up2, ACT, ALPHA, LIMIT)
