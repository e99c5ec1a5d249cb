"""The inner loops of `large_gemm`'s warp groups: one tile's products over all k-steps."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from xkernels.ops._details.large_ring import COLS, ROWS, advance, back


@gluon.jit
def _settled(x):
    """x, computed before what follows: else the sum waits for the next product, in registers that nobody has."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def plain_sum(a_bufs, w_bufs, full, empty, index, phase, steps, HALF: gl.constexpr, STAGES: gl.constexpr,
              GATHER: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """acc [64, 256] of a tile without scales, one k-step behind in giving stages back."""
    acc = gl.zeros([ROWS, COLS], gl.float32, layout)
    for step in range(steps):
        mbarrier.wait(full.index(index), phase)
        if GATHER:
            fence_async_shared()
        acc = warpgroup_mma(a_bufs.index(index * 2 + HALF), w_bufs.index(index).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index(back(index, 1, STAGES)), count=1, pred=step > 0)
        index, phase = advance(index, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(back(index, 1, STAGES)), count=1, pred=steps > 0)
    return acc, index, phase


@gluon.jit
def scaled_sum(a_bufs, w_bufs, full, empty, index, phase, steps, s, w0, w1, at_s, at_w0, at_w1, stride_sk, stride_wsk,
               UP: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """The two halves of a tile, [64, 128] each, with block scales applied to every k-step.

    s, w0, w1: scales of the first k-step, of rows and of the weights' two blocks, which are gate and up, or the two
    halves. Those of the others are asked for a k-step ahead; a row's lie side by side, so most come from the nearest
    cache.
    """
    acc0 = gl.zeros([ROWS, COLS // 2], gl.float32, layout)
    acc1 = gl.zeros([ROWS, COLS // 2], gl.float32, layout)
    zero = gl.zeros([ROWS, COLS // 2], gl.float32, layout)
    even = gl.arange(0, COLS // 2, layout=gl.SliceLayout(0, layout)) // 8 % 2 == 0
    for step in range(steps):
        a = a_bufs.index(index * 2 + HALF)
        mbarrier.wait(full.index(index * 2), phase)
        part = warpgroup_mma(a, w_bufs.index(index * 2).permute((1, 0)), zero, use_acc=False, is_async=True)
        if UP:
            f0 = s[:, None] * gl.where(even, w0, w1)[None, :]
            f1 = f0
        else:
            f0 = (s * w0)[:, None]
            f1 = (s * w1)[:, None]
        more = step + 1 < steps
        s = gl.load(at_s + (step + 1) * stride_sk, mask=more, other=0.0)
        w0 = gl.load(at_w0 + (step + 1) * stride_wsk, mask=more, other=0.0)
        w1 = gl.load(at_w1 + (step + 1) * stride_wsk, mask=more, other=0.0)
        part = warpgroup_mma_wait(0, deps=[part])
        acc0 = _settled(acc0 + part * f0)
        mbarrier.wait(full.index(index * 2 + 1), phase)
        part = warpgroup_mma(a, w_bufs.index(index * 2 + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(empty.index(index), count=1)
        acc1 = _settled(acc1 + part * f1)
        index, phase = advance(index, phase, STAGES)
    return acc0, acc1, index, phase
