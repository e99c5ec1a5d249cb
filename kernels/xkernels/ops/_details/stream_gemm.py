"""The grouped GEMMs for few rows on Hopper: what they do is stream weights, so a warp does nothing but ask for them.

A block has three parts around a ring of STAGES stages, each [BLOCK_N, BLOCK_K] weights, the same columns of a block's
16 rows, and in FP8 the scales of both. The loader keeps the ring full of weights and runs ahead across tiles. Two warps
copy the rows. One warp group multiplies, with the weights as the left operand: the matrix unit's long side is not
wasted on a handful of rows. Programs walk the tiles with the grid's stride; a tile is PARTS times BLOCK_N weight rows,
one after the other: the FP8 up projection quantises 128 columns at once.

Weights do not depend on the kernel before. Where the tiles' look-ups do not either (READY), the loader never waits for
that kernel: the ring fills while it finishes.

A stage is `full` when the weights' bytes and the rows are there, which each copying thread reports; rows are ordinary
writes to the matrix unit, so the group places the fence that they need after its wait. It is `empty` when the group has
multiplied it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from xkernels.ops._details.large_ring import advance, back
from xkernels.ops._details.large_store import _inverse
from xkernels.ops._details.stream_load import ROWS, entries_of, load_weights, look_up, wait_before
from xkernels.ops._details.stream_rows import WARPS, copy_rows


@gluon.jit
def _let_go():
    """Let the next kernel start, as `pdl.launch_dependents`."""
    threads = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [threads], dtype=gl.int32,
                              is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _plain_sum(a_bufs, w_bufs, full, empty, index, phase, K, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
               SUBS: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """acc [BLOCK_N, 16], one stage behind in giving stages back."""
    acc = gl.zeros([BLOCK_N, ROWS], gl.float32, layout)
    for k in range(0, K, BLOCK_K):
        mbarrier.wait(full.index(index), phase)
        fence_async_shared()
        for sub in gl.static_range(SUBS):
            acc = warpgroup_mma(w_bufs.index(index * SUBS + sub), a_bufs.index(index * SUBS + sub).permute((1, 0)), acc,
                                is_async=True)  # fmt: skip
        acc = warpgroup_mma_wait(SUBS, deps=[acc])
        mbarrier.arrive(empty.index(back(index, 1, STAGES)), count=1, pred=k > 0)
        index, phase = advance(index, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(back(index, 1, STAGES)), count=1, pred=K > 0)
    return acc, index, phase


@gluon.jit
def _factors(as_bufs, ws_bufs, line, layout: gl.constexpr):
    """What the product [BLOCK_N, 16] of a line of 128 columns is multiplied by."""
    s, w = as_bufs.index(line).load(gl.SliceLayout(0, layout)), ws_bufs.index(line).load(gl.SliceLayout(1, layout))
    return w[:, None] * s[None, :]


@gluon.jit
def _scaled_sum(a_bufs, w_bufs, as_bufs, ws_bufs, full, empty, index, phase, K, BLOCK_N: gl.constexpr,
                BLOCK_K: gl.constexpr, STAGES: gl.constexpr, EVEN_K: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """acc [BLOCK_N, 16] of FP8 with block scales; a stage is two lines, whose products are under way at once.

    Of a line beyond K anything is multiplied, and left out.
    """
    acc = gl.zeros([BLOCK_N, ROWS], gl.float32, layout)
    zero = gl.zeros([BLOCK_N, ROWS], gl.float32, layout)
    for k in range(0, K, BLOCK_K):
        mbarrier.wait(full.index(index), phase)
        fence_async_shared()
        part = warpgroup_mma(w_bufs.index(index * 2), a_bufs.index(index * 2).permute((1, 0)), zero, use_acc=False,
                             is_async=True)  # fmt: skip
        other = warpgroup_mma(w_bufs.index(index * 2 + 1), a_bufs.index(index * 2 + 1).permute((1, 0)), zero,
                              use_acc=False, is_async=True)  # fmt: skip
        first = _factors(as_bufs, ws_bufs, index * 2, layout)
        second = _factors(as_bufs, ws_bufs, index * 2 + 1, layout)
        part = warpgroup_mma_wait(1, deps=[part])
        acc += part * first
        other = warpgroup_mma_wait(0, deps=[other])
        mbarrier.arrive(empty.index(index), count=1)
        other = other * second
        acc += other if EVEN_K else gl.where(k + 128 < K, other, 0.0)
        index, phase = advance(index, phase, STAGES)
    return acc, index, phase


@gluon.jit
def _sum(a_bufs, w_bufs, as_bufs, ws_bufs, full, empty, index, phase, K, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
         SUBS: gl.constexpr, STAGES: gl.constexpr, FP8: gl.constexpr, EVEN_K: gl.constexpr,
         layout: gl.constexpr):  # fmt: skip
    """acc [BLOCK_N, 16] of the next stages' weights and rows. K 0: zeros."""
    if FP8:
        acc, index, phase = _scaled_sum(a_bufs, w_bufs, as_bufs, ws_bufs, full, empty, index, phase, K, BLOCK_N,
                                        BLOCK_K, STAGES, EVEN_K, layout)  # fmt: skip
    else:
        acc, index, phase = _plain_sum(a_bufs, w_bufs, full, empty, index, phase, K, BLOCK_N, BLOCK_K, SUBS, STAGES,
                                       layout)  # fmt: skip
    return acc, index, phase


@gluon.jit
def _gated(acc, BLOCK_N: gl.constexpr):
    """SiLU(gate) * up of [BLOCK_N, 16] interleaved in groups of eight rows: [BLOCK_N / 2, 16]."""
    gate, up = acc.reshape(BLOCK_N // 16, 2, 8, ROWS).permute(0, 2, 3, 1).split()
    power = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [gate * -1.4426950408889634],
                                      dtype=gl.float32, is_pure=True, pack=1)  # fmt: skip
    return (gate * up * _inverse(power + 1.0)).reshape(BLOCK_N // 2, ROWS)


@gluon.jit
def _put(y, out, row, col, used, stride_out, HIGH: gl.constexpr):
    """Store y [HIGH, 16] to columns `col` on of the rows [16] where `used`."""
    across: gl.constexpr = gl.SliceLayout(0, y.type.layout)
    cols = col + gl.arange(0, HIGH, layout=gl.SliceLayout(1, y.type.layout))
    rows = gl.convert_layout(row, across)
    at = out + rows.to(gl.int64)[None, :] * stride_out + cols[:, None]
    gl.store(at, y.to(out.dtype.element_ty), mask=gl.convert_layout(used, across)[None, :])


@gluon.jit
def _put_quantised(y0, y1, out, out_scale, row, n, used, stride_out, stride_os):
    """Store two halves [64, 16] of 128 columns as FP8 with a scale per row, and those."""
    peak = gl.maximum(gl.maximum(gl.max(gl.abs(y0), 0), gl.max(gl.abs(y1), 0)), 1e-10)
    scale = peak * (1 / 448)
    scale = gl.fma(gl.fma(scale, -448.0, peak), 1 / 448, scale)  # rounded as peak / 448 is
    inverse = _inverse(scale)
    inverse = gl.fma(gl.fma(-scale, inverse, 1.0), inverse, inverse)
    _put(y0 * inverse[None, :], out, row, n * 128, used, stride_out, 64)
    _put(y1 * inverse[None, :], out, row, n * 128 + 64, used, stride_out, 64)
    rows = gl.convert_layout(row, scale.type.layout)
    gl.store(out_scale + rows * stride_os + n, scale, mask=gl.convert_layout(used, scale.type.layout))


@gluon.jit
def multiply(out, out_scale, weight, sorted_ids, experts, post, a_bufs, w_bufs, as_bufs, ws_bufs, full, empty,
             num_valid, entries, N, K, stride_out, stride_os, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
             STAGES: gl.constexpr, PARTS: gl.constexpr, UP: gl.constexpr, FP8: gl.constexpr, EVEN_K: gl.constexpr,
             PDL: gl.constexpr, READY: gl.constexpr, MUL_WEIGHT: gl.constexpr):  # fmt: skip
    """The warp group: every tile's product and what is done with it."""
    BITS: gl.constexpr = a_bufs.dtype.primitive_bitwidth
    SUBS: gl.constexpr = BLOCK_K * BITS // 1024
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 256 // BITS])
    along: gl.constexpr = gl.SliceLayout(0, layout)
    if PDL and not READY:
        wait_before(4)
    num_n = N // (BLOCK_N * PARTS)
    tile = gl.program_id(0)
    m, n, expert = look_up(tile, num_n, experts, entries)
    slot = entries_of(m, sorted_ids, num_valid, entries, along)
    total = gl.load(post) // ROWS * num_n
    if PDL and READY:
        wait_before(4)
    if PDL:
        _let_go()
    index, phase = 0, 0
    while tile < total:
        tile += gl.num_programs(0)
        next_m, next_n, next_expert = look_up(tile, num_n, experts, entries)
        next_slot = entries_of(next_m, sorted_ids, num_valid, entries, along)
        used = slot < num_valid
        place = m * ROWS + gl.arange(0, ROWS, layout=along)
        depth = gl.where(expert < 0, 0, K)
        factor = slot.to(gl.float32)
        if MUL_WEIGHT:
            factor = gl.load(weight + slot, mask=used, other=0.0)
        acc, index, phase = _sum(a_bufs, w_bufs, as_bufs, ws_bufs, full, empty, index, phase, depth, BLOCK_N, BLOCK_K,
                                 SUBS, STAGES, FP8, EVEN_K, layout)  # fmt: skip
        if PARTS == 2:
            y = _gated(acc, BLOCK_N)
            acc, index, phase = _sum(a_bufs, w_bufs, as_bufs, ws_bufs, full, empty, index, phase, depth, BLOCK_N,
                                     BLOCK_K, SUBS, STAGES, FP8, EVEN_K, layout)  # fmt: skip
            _put_quantised(y, _gated(acc, BLOCK_N), out, out_scale, place, n, used, stride_out, stride_os)
        elif UP:
            _put(_gated(acc, BLOCK_N), out, place, n * (BLOCK_N // 2), used, stride_out, BLOCK_N // 2)
        else:
            if MUL_WEIGHT:
                acc *= factor[None, :]
            _put(acc, out, slot, n * BLOCK_N, used, stride_out, BLOCK_N)
        m, n, expert, slot = next_m, next_n, next_expert, next_slot


@gluon.jit(do_not_specialize=["num_valid", "entries", "stride_os"])
def stream_gemm(a, a_scale, w_desc, w_scale, out, out_scale, weight, sorted_ids, experts, post, num_valid, entries, N,
                K, stride_am, stride_sm, stride_sk, stride_wse, stride_wsn, stride_wsk, stride_out, stride_os,
                TOPK: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
                PARTS: gl.constexpr, UP: gl.constexpr, FP8: gl.constexpr, EVEN_K: gl.constexpr, PDL: gl.constexpr,
                READY: gl.constexpr, MUL_WEIGHT: gl.constexpr):  # fmt: skip
    """Up: out[row] = silu(gate) * up of x[token] @ w[expert].T. Down: out[entry] = h[row] @ w[expert].T * weight.

    a: bf16 or FP8, tokens [tokens, K] or sorted rows [rows, K]. w [experts * N, K] through w_desc; N is a multiple of a
    tile's rows and K of a line of 128 bytes, with EVEN_K of BLOCK_K. FP8: scales a_scale per row and 128 columns,
    w_scale per prepared block; the up projection (PARTS 2) then quantises its result over 128 columns. Rows of no
    expert give zeros.
    """
    BITS: gl.constexpr = w_desc.dtype.primitive_bitwidth
    LINE: gl.constexpr = 1024 // BITS
    SUBS: gl.constexpr = BLOCK_K // LINE
    dtype: gl.constexpr = w_desc.dtype
    lines: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    flags: gl.constexpr = mbarrier.MBarrierLayout()
    a_bufs = gl.allocate_shared_memory(dtype, [SUBS * STAGES, ROWS, LINE], lines)
    w_bufs = gl.allocate_shared_memory(dtype, [SUBS * STAGES, BLOCK_N, LINE], lines)
    as_bufs, ws_bufs = a_bufs, w_bufs  # scales, and nothing that is used where there are none
    if FP8:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        as_bufs = gl.allocate_shared_memory(gl.float32, [SUBS * STAGES, ROWS], plain)
        ws_bufs = gl.allocate_shared_memory(gl.float32, [SUBS * STAGES, BLOCK_N], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flags)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flags)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 32 * WARPS)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (out, out_scale, weight, sorted_ids, experts, post, a_bufs, w_bufs, as_bufs, ws_bufs, full,
                        empty, num_valid, entries, N, K, stride_out, stride_os, BLOCK_N, BLOCK_K, STAGES, PARTS, UP,
                        FP8, EVEN_K, PDL, READY, MUL_WEIGHT)),
            (load_weights, (w_desc, experts, post, w_bufs, full, empty, entries, N, K, BLOCK_N, BLOCK_K, STAGES, PARTS,
                            EVEN_K, PDL, READY)),
            (copy_rows, (a, a_scale, w_scale, sorted_ids, experts, post, a_bufs, as_bufs, ws_bufs, full, empty,
                         num_valid, entries, N, K, stride_am, stride_sm, stride_sk, stride_wse, stride_wsn, stride_wsk,
                         TOPK, BLOCK_N, BLOCK_K, STAGES, PARTS, UP, FP8, PDL, READY)),
        ],
        [1, WARPS],
        [56, 56],
    )  # fmt: skip
