"""The loader of `large_gemm`: walks the tiles and keeps the ring of k-steps full."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from xkernels.ops._details.large_ring import COLS, NOBODY, ROWS, advance, back, give


@gluon.jit
def _describe(tile, num_m, num_n, experts, sorted_ids, num_valid, GROUP: gl.constexpr):
    """Block of rows, block of columns, expert of a tile, and whether its second 64 rows are used."""
    tile = gl.maximum(tile, 0)  # of no tiles the first: read, not used
    in_group = GROUP * num_n
    first = (tile // in_group) * GROUP
    rows = gl.maximum(gl.minimum(num_m - first, GROUP), 1)
    m = first + (tile % in_group) % rows
    n = (tile % in_group) // rows
    expert = gl.load(experts + m)
    return m, n, expert, gl.load(sorted_ids + m * 2 * ROWS + ROWS) < num_valid


@gluon.constexpr_function
def _spread(bits, cols, hands):
    """Rows of so many columns over the loader's threads, 16 bytes each."""
    across = cols * bits // 128
    return gl.BlockedLayout([1, 128 // bits], [32 // across, across], [hands, 1], [1, 0])


@gluon.jit
def _slots(sorted_ids, m, GATHER: gl.constexpr, spread: gl.constexpr):
    """The entries of a tile's two groups of 64 rows, as the loader gathers them."""
    if GATHER:
        rows = m * (2 * ROWS) + gl.arange(0, ROWS, layout=gl.SliceLayout(1, spread))
        slots = gl.load(sorted_ids + rows), gl.load(sorted_ids + rows + ROWS)
    else:
        slots = 0, 0
    return slots


@gluon.jit
def _gathered(bar, pending: gl.constexpr, some):
    """Report the rows of a k-step, after which `pending` others were asked for, as the matrix unit may see them."""
    async_copy.wait_group(pending)
    fence_async_shared()
    async_copy.wait_group(pending)  # it is a barrier: one thread arrives for all, and each must have passed its fence
    mbarrier.arrive(bar, count=1, pred=some)


@gluon.jit
def _issue(first, last, a_desc, a, w_desc, a_bufs, w_bufs, full, empty, index, phase, at_w, at_a, both, slot0, slot1,
           num_valid, stride_am, TOPK: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
           GATHER: gl.constexpr, spread: gl.constexpr):  # fmt: skip
    """Ask for a tile's columns first to last, a stage a k-step: PARTS weight tiles, one or two of rows."""
    LAG: gl.constexpr = STAGES // 2 - 1  # k-steps asked for before the rows of one are reported, where the loader does
    BITS: gl.constexpr = a_bufs.dtype.primitive_bitwidth
    A_BYTES: gl.constexpr = ROWS * BLOCK_K * BITS // 8
    W_BYTES: gl.constexpr = COLS // PARTS * BLOCK_K * BITS // 8
    for k in range(first, last, BLOCK_K):
        bar = full.index(index * PARTS)
        mbarrier.wait(empty.index(index), phase)
        if GATHER:
            mbarrier.expect(bar, W_BYTES)
        else:
            mbarrier.expect(bar, W_BYTES + 2 * A_BYTES, pred=both)
            mbarrier.expect(bar, W_BYTES + A_BYTES, pred=both == 0)
        tma.async_copy_global_to_shared(w_desc, [at_w, k], bar, w_bufs.index(index * PARTS))
        if GATHER:
            ks = k + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, spread))
            from0 = a + (slot0 // TOPK).to(gl.int64)[:, None] * stride_am + ks[None, :]
            from1 = a + (slot1 // TOPK).to(gl.int64)[:, None] * stride_am + ks[None, :]
            async_copy.async_copy_global_to_shared(a_bufs.index(index * 2), from0, mask=(slot0 < num_valid)[:, None])
            async_copy.async_copy_global_to_shared(
                a_bufs.index(index * 2 + 1), from1, mask=(slot1 < num_valid)[:, None]
            )
            if PARTS == 1:
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                async_copy.commit_group()
        else:
            tma.async_copy_global_to_shared(a_desc, [at_a, k], bar, a_bufs.index(index * 2))
            tma.async_copy_global_to_shared(a_desc, [at_a + ROWS, k], bar, a_bufs.index(index * 2 + 1), pred=both)
        if PARTS == 2:
            second = full.index(index * 2 + 1)
            mbarrier.expect(second, W_BYTES)
            tma.async_copy_global_to_shared(w_desc, [at_w + COLS // 2, k], second, w_bufs.index(index * 2 + 1))
            if GATHER:
                _gathered(full.index(back(index, LAG, STAGES) * 2), LAG, k >= first + LAG * BLOCK_K)
        index, phase = advance(index, phase, STAGES)
    if GATHER and PARTS == 2:
        for i in gl.static_range(LAG):
            _gathered(full.index(back(index, LAG - i, STAGES) * 2), LAG - 1 - i, last >= first + (LAG - i) * BLOCK_K)
    return index, phase


@gluon.jit
def load_tiles(a_desc, a, w_desc, sorted_ids, experts, post, counter, a_bufs, w_bufs, full, empty, words, ready, free,
               num_valid, N, K, stride_am, TOPK: gl.constexpr, GROUP: gl.constexpr, BLOCK_K: gl.constexpr,
               STAGES: gl.constexpr, PARTS: gl.constexpr, GATHER: gl.constexpr, HANDS: gl.constexpr):  # fmt: skip
    """The loader. It looks the next tile up in the middle of a tile, when the ring is full and it has time."""
    spread: gl.constexpr = _spread(a_bufs.dtype.primitive_bitwidth, BLOCK_K, HANDS)
    num_m = gl.load(post) // (2 * ROWS)
    num_n = (N + COLS - 1) // COLS
    total = num_m * num_n
    index, phase, turn = 0, 1, 0
    middle = K // (2 * BLOCK_K) * BLOCK_K
    tile = gl.atomic_add(counter, 1, sem="relaxed")
    m, n, expert, both = _describe(gl.minimum(tile, total - 1), num_m, num_n, experts, sorted_ids, num_valid, GROUP)
    slot0, slot1 = _slots(sorted_ids, m, GATHER, spread)
    while tile < total:
        owner = gl.where(expert < 0, NOBODY, expert)
        word = (owner.to(gl.int64) << 32) | ((m << 12) | (n << 1) | both.to(gl.int32)).to(gl.int64)
        give(words, ready, free, turn, word, HANDS)
        turn += 1
        at_w = expert * N + n * COLS
        at_a = m * (2 * ROWS)
        none = expert < 0
        index, phase = _issue(0, gl.where(none, 0, middle), a_desc, a, w_desc, a_bufs, w_bufs, full, empty, index,
                              phase, at_w, at_a, both, slot0, slot1, num_valid, stride_am, TOPK, BLOCK_K, STAGES,
                              PARTS, GATHER, spread)  # fmt: skip
        after = gl.atomic_add(counter, 1, sem="relaxed")
        m, n, expert, next_both = _describe(gl.minimum(after, total - 1), num_m, num_n, experts, sorted_ids, num_valid,
                                            GROUP)  # fmt: skip
        next0, next1 = _slots(sorted_ids, m, GATHER, spread)
        index, phase = _issue(middle, gl.where(none, 0, K), a_desc, a, w_desc, a_bufs, w_bufs, full, empty, index,
                              phase, at_w, at_a, both, slot0, slot1, num_valid, stride_am, TOPK, BLOCK_K, STAGES,
                              PARTS, GATHER, spread)  # fmt: skip
        tile, both, slot0, slot1 = after, next_both, next0, next1
    give(words, ready, free, turn, -1, HANDS)
    if tile == total + gl.num_programs(0) - 1:
        gl.store(counter, 0)
