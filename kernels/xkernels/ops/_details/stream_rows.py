"""The part of `stream_gemm` that copies the rows."""

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
def copy_rows(a, sorted_ids, experts, post, a_bufs, full, empty, num_valid, entries, N, K, stride_am,
              TOPK: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
              PARTS: gl.constexpr, UP: gl.constexpr, PDL: gl.constexpr, READY: gl.constexpr):  # fmt: skip
    """Walk the tiles: of each, the columns of the rows that are used, by token (UP) or in sorted order.

    Each thread reports its own copies at a stage's barrier, which the copies do by themselves: nobody waits for them.
    """
    BITS: gl.constexpr = a_bufs.dtype.primitive_bitwidth
    LINE: gl.constexpr = 1024 // BITS
    SUBS: gl.constexpr = BLOCK_K // LINE
    spread: gl.constexpr = _spread(BITS, LINE)
    along: gl.constexpr = gl.SliceLayout(1, spread)
    if PDL and not READY:
        wait_before(WARPS)
    num_n = N // (BLOCK_N * PARTS)
    tile = gl.program_id(0)
    m, _, expert = look_up(tile, num_n, experts, entries)
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
        m, _, expert = look_up(tile, num_n, experts, entries)
        slot = entries_of(m, sorted_ids, num_valid, entries, along)
        for _ in range(parts):
            for k in range(0, K, BLOCK_K):
                mbarrier.wait(empty.index(index), phase)
                for sub in gl.static_range(SUBS):
                    async_copy.async_copy_global_to_shared(a_bufs.index(index * SUBS + sub), at + (k + sub * LINE),
                                                           mask=used & (k + sub * LINE < K))  # fmt: skip
                async_copy.mbarrier_arrive(full.index(index), increment_count=False)
                index, phase = advance(index, phase, STAGES)
