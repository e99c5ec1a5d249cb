"""The grouped GEMMs for many rows on Hopper: persistent, with warps of their own for the loads.

A block has three parts. The loader walks the tiles and fills a ring of STAGES k-steps: weights through descriptors,
rows through descriptors (down projection) or gathered by token (up projection). Two warp groups each own 64 of a tile's
128 rows and all of its 256 columns; they share every weight tile, wait for nobody but the loader, and so one of them
computes while the other finishes a tile or applies FP8 scales. A group whose 64 rows are all padding passes its
k-steps on: an expert's rows are rounded up to 64, not to 128.

Tiles are taken from a counter (DYNAMIC) or by the grid's stride, and handed over in a ring of their own, one word each:
expert, block of rows, block of columns, and whether the second 64 rows are used; -1 ends the walk.

Barriers: a stage is `full` when the loader's bytes are there, and with GATHER the copies of each of its 128 threads;
`empty` when both groups have read it. A group waits for `full` before it arrives at `empty` even where it skips the
work: only so does no arrival fall into the phase before. Gathered copies are ordinary writes to the matrix unit, which
reads past them without a fence: each group places one after the wait (FENCE).

With LEAD the second group begins when k-step LEAD has arrived. It stays behind from then on, since both go at one pace,
and the groups' epilogues do not fall together. It costs as many stages of the ring; LEAD < STAGES - 1.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(64)  # rows of a warp group
COLS = gl.constexpr(256)  # weight rows of a tile
NOBODY = gl.constexpr(1 << 30)  # in place of an expert: the rows belong to none
SLOTS = gl.constexpr(2)  # tiles that the loader is ahead


@gluon.jit
def _overlap():
    """Wait for the kernel before, then let the next one start: what `pdl` does, for all 128 threads of a warp group."""
    threads = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [threads], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _advance(index, phase, STAGES: gl.constexpr):
    """The next place in a ring, and its phase."""
    index += 1
    return gl.where(index == STAGES, 0, index), gl.where(index == STAGES, phase ^ 1, phase)


@gluon.jit
def _take(words, ready, free, turn, HANDS: gl.constexpr):
    """The word of tile number `turn`, out of the ring of tiles."""
    slot = turn % SLOTS
    mbarrier.wait(ready.index(slot), turn // SLOTS & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [HANDS], [0])
    word = gl.max(words.index(slot).load(layout), 0)
    mbarrier.arrive(free.index(slot), count=1)
    return word


@gluon.jit
def _give(words, ready, free, turn, word, HANDS: gl.constexpr):
    """Put a tile's word into the ring of tiles."""
    slot = turn % SLOTS
    mbarrier.wait(free.index(slot), (turn // SLOTS & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [HANDS], [0])
    words.index(slot).store(gl.full([1], word, gl.int64, layout=layout))
    mbarrier.arrive(ready.index(slot), count=1)


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


@gluon.jit
def _slots(sorted_ids, m, GATHER: gl.constexpr, VEC: gl.constexpr, HANDS: gl.constexpr):
    """The entries of a tile's two groups of 64 rows, as the loader gathers them."""
    if GATHER:
        spread: gl.constexpr = gl.BlockedLayout([1, VEC], [4, 8], [HANDS, 1], [1, 0])
        rows = m * (2 * ROWS) + gl.arange(0, ROWS, layout=gl.SliceLayout(1, spread))
        slots = gl.load(sorted_ids + rows), gl.load(sorted_ids + rows + ROWS)
    else:
        slots = 0, 0
    return slots


@gluon.jit
def _issue(first, last, a_desc, a, w_desc, a_bufs, w_bufs, full, empty, index, phase, at_w, at_a, both, slot0, slot1,
           num_valid, stride_am, TOPK: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
           GATHER: gl.constexpr, HANDS: gl.constexpr):  # fmt: skip
    """Ask for a tile's columns first to last, a stage a k-step: PARTS weight tiles, one or two of rows."""
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
            spread: gl.constexpr = gl.BlockedLayout([1, 128 // BITS], [4, 8], [HANDS, 1], [1, 0])
            ks = k + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, spread))
            from0 = a + (slot0 // TOPK).to(gl.int64)[:, None] * stride_am + ks[None, :]
            from1 = a + (slot1 // TOPK).to(gl.int64)[:, None] * stride_am + ks[None, :]
            async_copy.async_copy_global_to_shared(a_bufs.index(index * 2), from0, mask=(slot0 < num_valid)[:, None])
            async_copy.async_copy_global_to_shared(
                a_bufs.index(index * 2 + 1), from1, mask=(slot1 < num_valid)[:, None]
            )
            async_copy.mbarrier_arrive(bar, increment_count=False)
        else:
            tma.async_copy_global_to_shared(a_desc, [at_a, k], bar, a_bufs.index(index * 2))
            tma.async_copy_global_to_shared(a_desc, [at_a + ROWS, k], bar, a_bufs.index(index * 2 + 1), pred=both)
        if PARTS == 2:
            second = full.index(index * 2 + 1)
            mbarrier.expect(second, W_BYTES)
            tma.async_copy_global_to_shared(w_desc, [at_w + COLS // 2, k], second, w_bufs.index(index * 2 + 1))
        index, phase = _advance(index, phase, STAGES)
    return index, phase


@gluon.jit
def _load(a_desc, a, w_desc, sorted_ids, experts, post, counter, a_bufs, w_bufs, full, empty, words, ready, free,
          num_valid, N, K, stride_am, TOPK: gl.constexpr, GROUP: gl.constexpr, BLOCK_K: gl.constexpr,
          STAGES: gl.constexpr, PARTS: gl.constexpr, GATHER: gl.constexpr, DYNAMIC: gl.constexpr,
          HANDS: gl.constexpr):  # fmt: skip
    """The loader. It looks the next tile up in the middle of a tile, when the ring is full and it has time."""
    VEC: gl.constexpr = 128 // a_bufs.dtype.primitive_bitwidth
    num_m = gl.load(post) // (2 * ROWS)
    num_n = (N + COLS - 1) // COLS
    total = num_m * num_n
    index, phase, turn = 0, 1, 0
    middle = K // (2 * BLOCK_K) * BLOCK_K
    tile = gl.atomic_add(counter, 1, sem="relaxed") if DYNAMIC else gl.program_id(0)
    m, n, expert, both = _describe(gl.minimum(tile, total - 1), num_m, num_n, experts, sorted_ids, num_valid, GROUP)
    slot0, slot1 = _slots(sorted_ids, m, GATHER, VEC, HANDS)
    while tile < total:
        owner = gl.where(expert < 0, NOBODY, expert)
        word = (owner.to(gl.int64) << 32) | ((m << 12) | (n << 1) | both.to(gl.int32)).to(gl.int64)
        _give(words, ready, free, turn, word, HANDS)
        turn += 1
        at_w = expert * N + n * COLS
        at_a = m * (2 * ROWS)
        none = expert < 0
        index, phase = _issue(0, gl.where(none, 0, middle), a_desc, a, w_desc, a_bufs, w_bufs, full, empty, index,
                              phase, at_w, at_a, both, slot0, slot1, num_valid, stride_am, TOPK, BLOCK_K, STAGES,
                              PARTS, GATHER, HANDS)  # fmt: skip
        after = gl.atomic_add(counter, 1, sem="relaxed") if DYNAMIC else tile + gl.num_programs(0)
        m, n, expert, next_both = _describe(gl.minimum(after, total - 1), num_m, num_n, experts, sorted_ids, num_valid,
                                            GROUP)  # fmt: skip
        next0, next1 = _slots(sorted_ids, m, GATHER, VEC, HANDS)
        index, phase = _issue(middle, gl.where(none, 0, K), a_desc, a, w_desc, a_bufs, w_bufs, full, empty, index,
                              phase, at_w, at_a, both, slot0, slot1, num_valid, stride_am, TOPK, BLOCK_K, STAGES,
                              PARTS, GATHER, HANDS)  # fmt: skip
        tile, both, slot0, slot1 = after, next_both, next0, next1
    _give(words, ready, free, turn, -1, HANDS)
    if DYNAMIC:
        if tile == total + gl.num_programs(0) - 1:
            gl.store(counter, 0)


@gluon.jit
def _sum(a_bufs, w_bufs, full, empty, index, phase, steps, HALF: gl.constexpr, STAGES: gl.constexpr,
         FENCE: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """acc [64, 256] of a tile without scales, one k-step behind in giving stages back."""
    acc = gl.zeros([ROWS, COLS], gl.float32, layout)
    last = index
    for step in range(steps):
        mbarrier.wait(full.index(index), phase)
        if FENCE:
            fence_async_shared()
        acc = warpgroup_mma(a_bufs.index(index * 2 + HALF), w_bufs.index(index).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index(last), count=1, pred=step > 0)
        last = index
        index, phase = _advance(index, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(last), count=1, pred=steps > 0)
    return acc, index, phase


@gluon.jit
def _settled(x):
    """x, computed before what follows: else the sum waits for the next product, in registers that nobody has."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _scaled_sum(a_bufs, w_bufs, full, empty, index, phase, steps, a_scale, from_s, from_w, next_w, stride_sk,
                stride_wsk, UP: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr, FENCE: gl.constexpr,
                layout: gl.constexpr):  # fmt: skip
    """The two halves of a tile, [64, 128] each, with block scales applied to every k-step.

    Scales are asked for a k-step ahead; a row's lie side by side, so most come from the nearest cache. The weights' two
    blocks are gate and up, or the two halves.
    """
    acc0 = gl.zeros([ROWS, COLS // 2], gl.float32, layout)
    acc1 = gl.zeros([ROWS, COLS // 2], gl.float32, layout)
    zero = gl.zeros([ROWS, COLS // 2], gl.float32, layout)
    even = gl.arange(0, COLS // 2, layout=gl.SliceLayout(0, layout)) // 8 % 2 == 0
    more = steps > 0
    s = gl.load(a_scale + from_s, mask=more, other=0.0)
    w0 = gl.load(from_w, mask=more, other=0.0)
    w1 = gl.load(next_w, mask=more, other=0.0)
    for step in range(steps):
        a = a_bufs.index(index * 2 + HALF)
        mbarrier.wait(full.index(index * 2), phase)
        if FENCE:
            fence_async_shared()
        part = warpgroup_mma(a, w_bufs.index(index * 2).permute((1, 0)), zero, use_acc=False, is_async=True)
        if UP:
            f0 = s[:, None] * gl.where(even, w0, w1)[None, :]
            f1 = f0
        else:
            f0 = (s * w0)[:, None]
            f1 = (s * w1)[:, None]
        more = step + 1 < steps
        s = gl.load(a_scale + (step + 1) * stride_sk + from_s, mask=more, other=0.0)
        w0 = gl.load(from_w + (step + 1) * stride_wsk, mask=more, other=0.0)
        w1 = gl.load(next_w + (step + 1) * stride_wsk, mask=more, other=0.0)
        part = warpgroup_mma_wait(0, deps=[part])
        acc0 = _settled(acc0 + part * f0)
        mbarrier.wait(full.index(index * 2 + 1), phase)
        part = warpgroup_mma(a, w_bufs.index(index * 2 + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(empty.index(index), count=1)
        acc1 = _settled(acc1 + part * f1)
        index, phase = _advance(index, phase, STAGES)
    return acc0, acc1, index, phase


@gluon.jit
def _gated(acc, WIDTH: gl.constexpr):
    """SiLU(gate) * up of [64, WIDTH] interleaved in groups of eight columns: [64, WIDTH / 2]."""
    gate, up = acc.reshape(ROWS, WIDTH // 16, 2, 8).permute(0, 1, 3, 2).split()
    power = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [gate * -1.4426950408889634],
                                      dtype=gl.float32, is_pure=True, pack=1)  # fmt: skip
    inverse = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [power + 1.0], dtype=gl.float32,
                                        is_pure=True, pack=1)  # fmt: skip
    return (gate * up * inverse).reshape(ROWS, WIDTH // 2)


@gluon.jit
def _quantised(x, scale, dtype: gl.constexpr):
    """x / scale as FP8, the division rounded as `quant.quant_rows` rounds it."""
    inverse = gl.div_rn(gl.full_like(scale, 1.0), scale)
    y = x * inverse[:, None]
    y = gl.fma(gl.fma(-y, scale[:, None], x), inverse[:, None], y)
    return gl.minimum(gl.maximum(y, -448.0), 448.0).to(dtype)


@gluon.jit
def _store_rows(acc, out, slot, factor, n0, N, num_valid, stride_out, WIDTH: gl.constexpr, MUL_WEIGHT: gl.constexpr):
    """Scatter [64, WIDTH] to the entries' rows, 16 bytes a thread; a warp keeps its rows, so nothing leaves it."""
    wide: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]] + ([[0, 128]] if WIDTH == 256 else []),
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0]], block_bases=[],
        shape=[ROWS, WIDTH],
    )  # fmt: skip
    if MUL_WEIGHT:
        acc *= factor[:, None]
    values = gl.convert_layout(acc.to(out.dtype.element_ty), wide)
    row = gl.convert_layout(slot, gl.SliceLayout(1, wide))
    cols = n0 + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, wide))
    at = out + row.to(gl.int64)[:, None] * stride_out + cols[None, :]
    gl.store(at, values, mask=(row < num_valid)[:, None] & (cols < N)[None, :])


@gluon.jit
def _up_plain(acc, out_desc, staged, m, n, HALF: gl.constexpr):
    """Activate a tile of the up projection and store it as bf16."""
    y = _gated(acc, COLS).to(out_desc.dtype)
    tma.store_wait(0)
    staged.index(HALF).store(y)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [m * 2 * ROWS + HALF * ROWS, n * (COLS // 2)], staged.index(HALF))


@gluon.jit
def _up_quantised(acc0, acc1, out_desc, out_scale, staged, m, n, stride_os, HALF: gl.constexpr):
    """Activate a tile of the up projection, a group of 128 columns, and store it as FP8 with a scale per row."""
    y0 = _gated(acc0, COLS // 2)
    y1 = _gated(acc1, COLS // 2)
    peak = gl.maximum(gl.max(gl.abs(y0), 1), gl.max(gl.abs(y1), 1))
    scale = gl.div_rn(gl.maximum(peak, 1e-10), gl.full_like(peak, 448.0))
    tma.store_wait(0)
    half: gl.constexpr = COLS // 4
    staged.index(HALF * 2).store(_quantised(y0, scale, out_desc.dtype))
    staged.index(HALF * 2 + 1).store(_quantised(y1, scale, out_desc.dtype))
    fence_async_shared()
    row = m * 2 * ROWS + HALF * ROWS
    tma.async_copy_shared_to_global(out_desc, [row, n * 2 * half], staged.index(HALF * 2))
    tma.async_copy_shared_to_global(out_desc, [row, n * 2 * half + half], staged.index(HALF * 2 + 1))
    rows = row + gl.arange(0, ROWS, layout=scale.type.layout)
    gl.store(out_scale + n + rows * stride_os, scale)


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
def _compute(a_scale, w_scale, out_desc, out, out_scale, weight, sorted_ids, a_bufs, w_bufs, full, empty, words, ready,
             free, staged, num_valid, N, K, stride_sm, stride_sk, stride_wse, stride_wsn, stride_wsk, stride_out,
             stride_os, HALF: gl.constexpr, TOPK: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
             UP: gl.constexpr, FP8: gl.constexpr, FENCE: gl.constexpr, LEAD: gl.constexpr,
             MUL_WEIGHT: gl.constexpr):  # fmt: skip
    """A warp group: rows HALF * 64 to HALF * 64 + 63 of every tile."""
    WIDTH: gl.constexpr = COLS // 2 if FP8 else COLS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, WIDTH, 256 // a_bufs.dtype.primitive_bitwidth]
    )
    index, phase, turn = 0, 0, 0
    word = _take(words, ready, free, turn, 4)
    slot = _entries(word, sorted_ids, HALF, FP8 or not UP, layout)
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
                index, phase = _advance(index, phase, STAGES)
            word = _take(words, ready, free, turn, 4)
            slot = _entries(word, sorted_ids, HALF, FP8 or not UP, layout)
        elif FP8:
            owner = m * 2 * ROWS + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
            if UP:
                owner = gl.where(slot < num_valid, slot // TOPK, 0)
            factor = _weights_of(slot, weight, num_valid, MUL_WEIGHT)
            # gate and up blocks of 128 columns alternate in 8s; a down tile spans two blocks of 128 rows
            at_w = w_scale + expert.to(gl.int64) * stride_wse
            block = n * (COLS // 8) if UP else n * 2
            other = block + 1 if UP else gl.minimum(block + 1, (N + 127) // 128 - 1)
            acc0, acc1, index, phase = _scaled_sum(a_bufs, w_bufs, full, empty, index, phase, steps, a_scale,
                                                   owner * stride_sm, at_w + block * stride_wsn,
                                                   at_w + other * stride_wsn, stride_sk, stride_wsk, UP, HALF, STAGES,
                                                   FENCE, layout)  # fmt: skip
            word = _take(words, ready, free, turn, 4)
            next_slot = _entries(word, sorted_ids, HALF, FP8 or not UP, layout)
            if UP:
                _up_quantised(acc0, acc1, out_desc, out_scale, staged, m, n, stride_os, HALF)
            else:
                _store_rows(acc0, out, slot, factor, n * COLS, N, num_valid, stride_out, WIDTH, MUL_WEIGHT)
                _store_rows(acc1, out, slot, factor, n * COLS + WIDTH, N, num_valid, stride_out, WIDTH, MUL_WEIGHT)
            slot = next_slot
        else:
            factor = _weights_of(slot, weight, num_valid, MUL_WEIGHT)
            acc, index, phase = _sum(a_bufs, w_bufs, full, empty, index, phase, steps, HALF, STAGES, FENCE, layout)
            word = _take(words, ready, free, turn, 4)
            next_slot = _entries(word, sorted_ids, HALF, FP8 or not UP, layout)
            if UP:
                _up_plain(acc, out_desc, staged, m, n, HALF)
            else:
                _store_rows(acc, out, slot, factor, n * COLS, N, num_valid, stride_out, WIDTH, MUL_WEIGHT)
            slot = next_slot
    if UP:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_valid", "stride_os"])
def large_gemm(a_desc, a, a_scale, w_desc, w_scale, out_desc, out, out_scale, weight, sorted_ids, experts, post,
               counter, num_valid, N, K, stride_am, stride_sm, stride_sk, stride_wse, stride_wsn, stride_wsk,
               stride_out, stride_os, TOPK: gl.constexpr, GROUP: gl.constexpr, BLOCK_K: gl.constexpr,
               STAGES: gl.constexpr, UP: gl.constexpr, FP8: gl.constexpr, GATHER: gl.constexpr,
               DYNAMIC: gl.constexpr, FENCE: gl.constexpr, LEAD: gl.constexpr, PDL: gl.constexpr,
               MUL_WEIGHT: gl.constexpr):  # fmt: skip
    """Up: out[row] = silu(gate) * up of x[token] @ w[expert].T. Down: out[entry] = h[row] @ w[expert].T * weight.

    a: bf16 or FP8 rows [tokens or sorted rows, K]; w [experts * N, K] through w_desc; blocks of 128 sorted rows. FP8:
    scales a_scale per row and 128 columns, w_scale per prepared block; the up projection then quantises its result
    over the tile's 128 columns. Rows of no expert give zeros.
    """
    PARTS: gl.constexpr = 2 if FP8 else 1
    HANDS: gl.constexpr = 4 if GATHER else 1
    dtype: gl.constexpr = w_desc.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 2)
    flags: gl.constexpr = mbarrier.MBarrierLayout()
    a_bufs = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, BLOCK_K], tile)
    w_bufs = gl.allocate_shared_memory(dtype, [PARTS * STAGES, COLS // PARTS, BLOCK_K], tile)
    full = gl.allocate_shared_memory(gl.int64, [STAGES * PARTS, 1], flags)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flags)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], flags)
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], flags)
    words = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i * PARTS), count=1 + (32 * HANDS if GATHER else 0))
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
            (_compute, (a_scale, w_scale, out_desc, out, out_scale, weight, sorted_ids, a_bufs, w_bufs, full, empty,
                        words, ready, free, staged, num_valid, N, K, stride_sm, stride_sk, stride_wse, stride_wsn,
                        stride_wsk, stride_out, stride_os, 0, TOPK, BLOCK_K, STAGES, UP, FP8, FENCE, LEAD, MUL_WEIGHT)),
            (_compute, (a_scale, w_scale, out_desc, out, out_scale, weight, sorted_ids, a_bufs, w_bufs, full, empty,
                        words, ready, free, staged, num_valid, N, K, stride_sm, stride_sk, stride_wse, stride_wsn,
                        stride_wsk, stride_out, stride_os, 1, TOPK, BLOCK_K, STAGES, UP, FP8, FENCE, LEAD, MUL_WEIGHT)),
            (_load, (a_desc, a, w_desc, sorted_ids, experts, post, counter, a_bufs, w_bufs, full, empty, words, ready,
                     free, num_valid, N, K, stride_am, TOPK, GROUP, BLOCK_K, STAGES, PARTS, GATHER, DYNAMIC, HANDS)),
        ],
        [4, HANDS],
        [224 if GATHER else 240, 56 if GATHER else 24],
    )  # fmt: skip
