"""The part of `stream_gemm` that copies the rows, and in FP8 the scales."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from xkernels.ops._details.large_ring import advance
from xkernels.ops._details.stream_load import ROWS, entries_of, look_up, wait_before

WARPS = gl.constexpr(2)  # that copy rows


@gluon.constexpr_function
def _spread(bits, cols):
    """Rows of so many columns over the warps, 16 bytes a thread."""
    across = cols * bits // 128
    return gl.BlockedLayout([1, 128 // bits], [32 // across, across], [WARPS, 1], [1, 0])


@gluon.jit
def _scales_of(a_scale, w_scale, owner, expert, row, stride_sm, stride_wse, stride_wsn, BLOCK_N: gl.constexpr,
               UP: gl.constexpr, spread: gl.constexpr):  # fmt: skip
    """Where the scales of a tile's first line are: of its 16 rows, and of the weight rows from `row` on, [BLOCK_N].

    Those of the up projection are of eight weight rows, gate and up in turns, and the same over 128 columns, which are
    a whole tile: of both parts two are asked for, again and again.
    """
    turn = gl.arange(0, BLOCK_N, layout=spread)
    turn, first = (turn // 8 % 2, row // 8) if UP else (turn * 0, row // 128)
    at_w = w_scale + expert.to(gl.int64) * stride_wse + first * stride_wsn
    return a_scale + gl.convert_layout(owner, spread) * stride_sm, at_w + turn * stride_wsn


@gluon.jit
def copy_rows(a, a_scale, w_scale, sorted_ids, experts, post, a_bufs, as_bufs, ws_bufs, full, empty, num_valid, entries,
              N, K, stride_am, stride_sm, stride_sk, stride_wse, stride_wsn, stride_wsk, TOPK: gl.constexpr,
              BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
              UP: gl.constexpr, FP8: gl.constexpr, PDL: gl.constexpr, READY: gl.constexpr):  # fmt: skip
    """Walk the tiles: of each, the columns of the rows that are used, by token (UP) or in sorted order.

    Each thread reports its own copies at a stage's barrier, which the copies do by themselves: nobody waits for them.
    Scales come with them, zeros beyond K: the fence of `multiply` waits for whatever it has itself asked for.
    """
    BITS: gl.constexpr = a_bufs.dtype.primitive_bitwidth
    LINE: gl.constexpr = 1024 // BITS
    SUBS: gl.constexpr = BLOCK_K // LINE
    spread: gl.constexpr = _spread(BITS, LINE)
    along: gl.constexpr = gl.SliceLayout(1, spread)
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    if PDL and not READY:
        wait_before(WARPS)
    num_n = N // (BLOCK_N * PARTS)
    tile = gl.program_id(0)
    m, n, expert = look_up(tile, num_n, experts, entries)
    slot = entries_of(m, sorted_ids, num_valid, entries, along)
    total = gl.load(post) // ROWS * num_n
    if PDL and READY:
        wait_before(WARPS)
    index, phase = 0, 1
    while tile < total:
        tile += gl.num_programs(0)
        row = slot // TOPK if UP else m * ROWS + gl.arange(0, ROWS, layout=along)
        at = a + row.to(gl.int64)[:, None] * stride_am + gl.arange(0, LINE, layout=gl.SliceLayout(0, spread))[None, :]
        used = (slot < num_valid)[:, None]
        parts = gl.where(expert < 0, 0, PARTS)
        if FP8:
            owner = gl.where(slot < num_valid, row, 0) if UP else row
            at_s, at_w = _scales_of(a_scale, w_scale, owner, expert, n * (BLOCK_N * PARTS), stride_sm, stride_wse,
                                    stride_wsn, BLOCK_N, UP, flat)  # fmt: skip
        m, n, expert = look_up(tile, num_n, experts, entries)
        slot = entries_of(m, sorted_ids, num_valid, entries, along)
        for _ in range(parts):
            for k in range(0, K, BLOCK_K):
                mbarrier.wait(empty.index(index), phase)
                for sub in gl.static_range(SUBS):
                    here, some = index * SUBS + sub, k + sub * LINE < K
                    async_copy.async_copy_global_to_shared(a_bufs.index(here), at + (k + sub * LINE), mask=used & some)
                    if FP8:
                        line = k // LINE + sub
                        async_copy.async_copy_global_to_shared(as_bufs.index(here), at_s + line * stride_sk, mask=some)
                        async_copy.async_copy_global_to_shared(ws_bufs.index(here), at_w + line * stride_wsk, mask=some)
                async_copy.mbarrier_arrive(full.index(index), increment_count=False)
                index, phase = advance(index, phase, STAGES)
