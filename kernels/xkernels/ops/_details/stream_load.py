"""The loader of `stream_gemm`, which asks for weights and for nothing else, and what its parts share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from xkernels.ops._details.large_ring import advance

ROWS = gl.constexpr(16)  # rows of a block


@gluon.jit
def wait_before(WARPS: gl.constexpr):
    """Wait for the kernel before, as `pdl.wait_dependencies`, with every thread of so many warps."""
    threads = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [threads], dtype=gl.int32, is_pure=False,
                              pack=1)  # fmt: skip


@gluon.jit
def look_up(tile, num_n, experts, entries):
    """Block of rows, block of weight rows and expert of a tile, and anything beyond the last one.

    It does not wait for the number of tiles; `entries`, the length of `sorted_ids`, need not be whole blocks.
    """
    m = gl.minimum(tile // num_n, (entries - 1) // ROWS)
    return m, tile % num_n, gl.load(experts + m)


@gluon.jit
def entries_of(m, sorted_ids, num_valid, entries, layout: gl.constexpr):
    """The 16 entries of a block of rows; `num_valid` and more are padding."""
    place = m * ROWS + gl.arange(0, ROWS, layout=layout)
    return gl.load(sorted_ids + place, mask=place < entries, other=num_valid)


@gluon.jit
def load_weights(w_desc, experts, post, w_bufs, full, empty, entries, N, K, BLOCK_N: gl.constexpr,
                 BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, EVEN_K: gl.constexpr,
                 PDL: gl.constexpr, READY: gl.constexpr):  # fmt: skip
    """Walk the tiles; a stage is BLOCK_K columns as lines of 128 bytes. With READY nothing here waits for a kernel."""
    LINE: gl.constexpr = 1024 // w_bufs.dtype.primitive_bitwidth
    SUBS: gl.constexpr = BLOCK_K // LINE
    if PDL and not READY:
        wait_before(1)
    num_n = N // (BLOCK_N * PARTS)
    tile = gl.program_id(0)
    _, n, expert = look_up(tile, num_n, experts, entries)
    total = gl.load(post) // ROWS * num_n
    index, phase = 0, 1
    while tile < total:
        tile += gl.num_programs(0)
        first = expert * N + n * (BLOCK_N * PARTS)
        parts = gl.where(expert < 0, 0, PARTS)
        _, n, expert = look_up(tile, num_n, experts, entries)
        for part in range(parts):
            at_w = first + part * BLOCK_N
            for k in range(0, K, BLOCK_K):
                bar = full.index(index)
                mbarrier.wait(empty.index(index), phase)
                if EVEN_K:
                    mbarrier.expect(bar, BLOCK_N * 128 * SUBS)
                else:
                    lines = gl.minimum((K - k) // LINE, SUBS)
                    for count in gl.static_range(1, SUBS + 1):
                        mbarrier.expect(bar, BLOCK_N * 128 * count, pred=lines == count)
                for sub in gl.static_range(SUBS):
                    tma.async_copy_global_to_shared(w_desc, [at_w, k + sub * LINE], bar,
                                                    w_bufs.index(index * SUBS + sub),
                                                    pred=EVEN_K or k + sub * LINE < K)  # fmt: skip
                index, phase = advance(index, phase, STAGES)
