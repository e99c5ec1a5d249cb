"""The grouped GEMMs for many rows on Hopper: persistent, with warps of their own for the loads.

A block has three parts. The loader walks the tiles and fills a ring of STAGES k-steps: weights through descriptors,
rows through descriptors (down projection) or gathered by token (up projection). Two warp groups each own 64 of a tile's
128 rows and all of its 256 columns; they share every weight tile, wait for nobody but the loader, and so one of them
computes while the other finishes a tile or applies FP8 scales. A group whose 64 rows are all padding passes its
k-steps on: an expert's rows are rounded up to 64, not to 128.

Tiles are taken from a counter, and handed over in a ring of their own, one word each: expert, block of rows, block of
columns, and whether the second 64 rows are used; -1 ends the walk.

Barriers: a stage is `full` when the loader's bytes are there, and for gathered rows the copies of each of its 128
threads; `empty` when both groups have read it. A group waits for `full` before it arrives at `empty` even where it
skips the work: only so does no arrival fall into the phase before. Gathered copies are ordinary writes to the matrix
unit, which reads past them without a fence. In bf16 each group places one after the wait, while its product before is
computed; in FP8 that would be waited for, so there the loader does, and reports the rows itself.

With LEAD the second group begins when k-step LEAD has arrived. It stays behind from then on, since both go at one pace,
and the groups' epilogues do not fall together. It costs as many stages of the ring. In FP8 the loader reports gathered
rows LAG = STAGES / 2 - 1 k-steps after it asked for them: LEAD + LAG < STAGES.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from xkernels.ops._details.large_load import load_tiles
from xkernels.ops._details.large_ring import COLS, NOBODY, ROWS, SLOTS, advance, take
from xkernels.ops._details.large_store import activated, store_rows, up_plain, up_quantised
from xkernels.ops._details.large_sum import plain_sum, scaled_sum


@gluon.jit
def _overlap():
    """Wait for the kernel before, then let the next one start: what `pdl` does, for all 128 threads of a warp group."""
    threads = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [threads], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _parts(word):
    """Block of rows, block of columns and expert of a tile's word."""
    return ((word >> 12) & 0xFFFFF).to(gl.int32), ((word >> 1) & 0x7FF).to(gl.int32), (word >> 32).to(gl.int32)


@gluon.jit
def _entries(word, sorted_ids, HALF: gl.constexpr, NEEDED: gl.constexpr, layout: gl.constexpr):
    """Entries of a group's rows of a tile, asked for before it begins; anything where nobody needs them."""
    slot = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    if NEEDED:
        m, _, _ = _parts(word)
        slot = gl.load(sorted_ids + m * 2 * ROWS + HALF * ROWS + slot, mask=word >= 0, other=0)
    return slot


@gluon.jit
def _weights_of(slot, weight, num_valid, MUL_WEIGHT: gl.constexpr):
    """Router weights of entries, if the kernel multiplies by them."""
    factor = slot.to(gl.float32)
    if MUL_WEIGHT:
        factor = gl.load(weight + slot, mask=slot < num_valid, other=0.0)
    return factor


@gluon.jit
def _scales_at(word, slot, a_scale, w_scale, num_valid, N, stride_sm, stride_wse, stride_wsn, HALF: gl.constexpr,
               TOPK: gl.constexpr, UP: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """Where a tile's first scales lie: of a group's rows, and of the two blocks that its weights are of.

    Gate and up blocks of 128 columns alternate in 8s; a tile of the down projection spans two blocks of 128 rows.
    """
    m, n, expert = _parts(word)
    owner = m * 2 * ROWS + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    if UP:
        owner = gl.where(slot < num_valid, slot // TOPK, 0)
    at_w = w_scale + expert.to(gl.int64) * stride_wse
    block = n * (COLS // 8) if UP else n * 2
    other = block + 1 if UP else gl.minimum(block + 1, (N + 127) // 128 - 1)
    return a_scale + owner * stride_sm, at_w + block * stride_wsn, at_w + other * stride_wsn


@gluon.jit
def _first_scales(word, slot, a_scale, w_scale, num_valid, N, stride_sm, stride_wse, stride_wsn, HALF: gl.constexpr,
                  TOPK: gl.constexpr, UP: gl.constexpr, FP8: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """Scales of a tile's first k-step, asked for before it begins; anything where there are none."""
    s, w0, w1 = 0.0, 0.0, 0.0
    if FP8:
        at_s, at_w0, at_w1 = _scales_at(word, slot, a_scale, w_scale, num_valid, N, stride_sm, stride_wse, stride_wsn,
                                        HALF, TOPK, UP, layout)  # fmt: skip
        some = (word >= 0) & ((word >> 32) != NOBODY)
        s = gl.load(at_s, mask=some, other=0.0)
        w0 = gl.load(at_w0, mask=some, other=0.0)
        w1 = gl.load(at_w1, mask=some, other=0.0)
    return s, w0, w1


@gluon.jit
def compute_tiles(a_scale, w_scale, out_desc, out, out_scale, weight, sorted_ids, a_bufs, w_bufs, full, empty, words,
                  ready, free, staged, num_valid, N, K, stride_sm, stride_sk, stride_wse, stride_wsn, stride_wsk,
                  stride_out, stride_os, HALF: gl.constexpr, TOPK: gl.constexpr, BLOCK_K: gl.constexpr,
                  STAGES: gl.constexpr, UP: gl.constexpr, FP8: gl.constexpr, LEAD: gl.constexpr,
                  MUL_WEIGHT: gl.constexpr):  # fmt: skip
    """A warp group: rows HALF * 64 to HALF * 64 + 63 of every tile."""
    WIDTH: gl.constexpr = COLS // 2 if FP8 else COLS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, WIDTH, 256 // a_bufs.dtype.primitive_bitwidth]
    )
    index, phase, turn = 0, 0, 0
    word = take(words, ready, free, turn, 4)
    slot = _entries(word, sorted_ids, HALF, FP8 or not UP, layout)
    s, w0, w1 = _first_scales(word, slot, a_scale, w_scale, num_valid, N, stride_sm, stride_wse, stride_wsn, HALF,
                              TOPK, UP, FP8, layout)  # fmt: skip
    while word >= 0:
        turn += 1
        m, n, expert = _parts(word)
        steps = gl.where(expert == NOBODY, 0, (K + BLOCK_K - 1) // BLOCK_K)
        if HALF == 1 and LEAD > 0:
            if turn == 1 and steps > LEAD:
                mbarrier.wait(full.index(LEAD * (2 if FP8 else 1)), 0)
        if HALF == 1 and word & 1 == 0:
            for _ in range(steps):
                mbarrier.wait(full.index(index * (2 if FP8 else 1)), phase)
                mbarrier.arrive(empty.index(index), count=1)
                index, phase = advance(index, phase, STAGES)
            word = take(words, ready, free, turn, 4)
            slot = _entries(word, sorted_ids, HALF, FP8 or not UP, layout)
            s, w0, w1 = _first_scales(word, slot, a_scale, w_scale, num_valid, N, stride_sm, stride_wse, stride_wsn,
                                      HALF, TOPK, UP, FP8, layout)  # fmt: skip
        elif FP8:
            factor = _weights_of(slot, weight, num_valid, MUL_WEIGHT)
            at_s, at_w0, at_w1 = _scales_at(word, slot, a_scale, w_scale, num_valid, N, stride_sm, stride_wse,
                                            stride_wsn, HALF, TOPK, UP, layout)  # fmt: skip
            acc0, acc1, index, phase = scaled_sum(a_bufs, w_bufs, full, empty, index, phase, steps, s, w0, w1, at_s,
                                                  at_w0, at_w1, stride_sk, stride_wsk, UP, HALF, STAGES,
                                                  layout)  # fmt: skip
            word = take(words, ready, free, turn, 4)
            next_slot = _entries(word, sorted_ids, HALF, FP8 or not UP, layout)
            if UP:
                acc0, acc1, scale = activated(acc0, acc1)
            s, w0, w1 = _first_scales(word, next_slot, a_scale, w_scale, num_valid, N, stride_sm, stride_wse,
                                      stride_wsn, HALF, TOPK, UP, FP8, layout)  # fmt: skip
            if UP:
                up_quantised(acc0, acc1, scale, out_desc, out_scale, staged, m, n, stride_os, HALF)
            else:
                store_rows(acc0, out, slot, factor, n * COLS, N, num_valid, stride_out, WIDTH, MUL_WEIGHT)
                store_rows(acc1, out, slot, factor, n * COLS + WIDTH, N, num_valid, stride_out, WIDTH, MUL_WEIGHT)
            slot = next_slot
        else:
            factor = _weights_of(slot, weight, num_valid, MUL_WEIGHT)
            acc, index, phase = plain_sum(a_bufs, w_bufs, full, empty, index, phase, steps, HALF, STAGES, UP, layout)
            word = take(words, ready, free, turn, 4)
            next_slot = _entries(word, sorted_ids, HALF, FP8 or not UP, layout)
            if UP:
                up_plain(acc, out_desc, staged, m, n, HALF)
            else:
                store_rows(acc, out, slot, factor, n * COLS, N, num_valid, stride_out, WIDTH, MUL_WEIGHT)
            slot = next_slot
    if UP:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_valid", "stride_os"])
def large_gemm(a_desc, a, a_scale, w_desc, w_scale, out_desc, out, out_scale, weight, sorted_ids, experts, post,
               counter, num_valid, N, K, stride_am, stride_sm, stride_sk, stride_wse, stride_wsn, stride_wsk,
               stride_out, stride_os, TOPK: gl.constexpr, GROUP: gl.constexpr, BLOCK_K: gl.constexpr,
               STAGES: gl.constexpr, UP: gl.constexpr, FP8: gl.constexpr, LEAD: gl.constexpr, PDL: gl.constexpr,
               MUL_WEIGHT: gl.constexpr):  # fmt: skip
    """Up: out[row] = silu(gate) * up of x[token] @ w[expert].T. Down: out[entry] = h[row] @ w[expert].T * weight.

    Up: a, bf16 or FP8 rows [tokens, K]; down: a_desc, of sorted rows. w [experts * N, K] through w_desc; blocks of 128
    sorted rows. FP8: scales a_scale per row and 128 columns, w_scale per prepared block; the up projection then
    quantises its result over the tile's 128 columns. Rows of no expert give zeros.
    """
    PARTS: gl.constexpr = 2 if FP8 else 1
    HANDS: gl.constexpr = 4 if UP else 1
    dtype: gl.constexpr = w_desc.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout(BLOCK_K * dtype.primitive_bitwidth // 8, dtype.primitive_bitwidth, 2)
    flags: gl.constexpr = mbarrier.MBarrierLayout()
    a_bufs = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, BLOCK_K], tile)
    w_bufs = gl.allocate_shared_memory(dtype, [PARTS * STAGES, COLS // PARTS, BLOCK_K], tile)
    full = gl.allocate_shared_memory(gl.int64, [STAGES * PARTS, 1], flags)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flags)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], flags)
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], flags)
    words = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i * PARTS), count=1 + ((1 if FP8 else 32 * HANDS) if UP else 0))
        if PARTS == 2:
            mbarrier.init(full.index(i * 2 + 1), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    if PDL:
        _overlap()
    staged = full
    if UP:
        staged = gl.allocate_shared_memory(out_desc.dtype, [2 * PARTS, ROWS, COLS // 2 // PARTS], out_desc.layout)
    gl.warp_specialize(
        [
            (compute_tiles, (a_scale, w_scale, out_desc, out, out_scale, weight, sorted_ids, a_bufs, w_bufs, full,
                             empty, words, ready, free, staged, num_valid, N, K, stride_sm, stride_sk, stride_wse,
                             stride_wsn, stride_wsk, stride_out, stride_os, 0, TOPK, BLOCK_K, STAGES, UP, FP8, LEAD,
                             MUL_WEIGHT)),
            (compute_tiles, (a_scale, w_scale, out_desc, out, out_scale, weight, sorted_ids, a_bufs, w_bufs, full,
                             empty, words, ready, free, staged, num_valid, N, K, stride_sm, stride_sk, stride_wse,
                             stride_wsn, stride_wsk, stride_out, stride_os, 1, TOPK, BLOCK_K, STAGES, UP, FP8, LEAD,
                             MUL_WEIGHT)),
            (load_tiles, (a_desc, a, w_desc, sorted_ids, experts, post, counter, a_bufs, w_bufs, full, empty, words,
                          ready, free, num_valid, N, K, stride_am, TOPK, GROUP, BLOCK_K, STAGES, PARTS, UP,
                          HANDS)),
        ],
        [4, HANDS],
        [224 if UP else 240, 56 if UP else 24],
    )  # fmt: skip
