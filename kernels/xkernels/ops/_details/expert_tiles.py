"""What the grouped GEMMs load and split: weight tiles, their block scales, pairs of gate and up."""

from __future__ import annotations

import triton.language as tl

from xkernels.ops._details.common import helper
from xkernels.ops._details.mxfp4 import unpack


@helper
def pair(acc, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Gate and up [ROWS, COLS / 2] out of [ROWS, COLS] interleaved in groups of eight columns."""
    groups = tl.reshape(acc, (ROWS, COLS // 16, 2, 8))
    gate, up = tl.split(tl.permute(groups, (0, 1, 3, 2)))
    return tl.reshape(gate, (ROWS, COLS // 2)), tl.reshape(up, (ROWS, COLS // 2))


@helper
def weight_tile(w, w_scale, expert, n0, k, N, K, stride_we, stride_wn, stride_wse, stride_wsn, BLOCK_N: tl.constexpr,
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
def block_scales(scale, n0, k, K, stride_n, stride_k, BLOCK_N: tl.constexpr, GROUP_N: tl.constexpr,
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
