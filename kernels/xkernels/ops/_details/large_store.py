"""What `large_gemm`'s warp groups do with a finished tile: activate, quantise, store."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from xkernels.ops._details.large_ring import COLS, ROWS


@gluon.jit
def _inverse(x):
    """1 / x, nearly; x is a normal number."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _gated(acc, WIDTH: gl.constexpr):
    """SiLU(gate) * up of [64, WIDTH] interleaved in groups of eight columns: [64, WIDTH / 2]."""
    gate, up = acc.reshape(ROWS, WIDTH // 16, 2, 8).permute(0, 1, 3, 2).split()
    power = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [gate * -1.4426950408889634],
                                      dtype=gl.float32, is_pure=True, pack=1)  # fmt: skip
    return (gate * up * _inverse(power + 1.0)).reshape(ROWS, WIDTH // 2)


@gluon.jit
def _quantised(x, scale, dtype: gl.constexpr):
    """x / scale as FP8, but for a last bit of float32 before that. No |x| is more than 448 scales."""
    inverse = _inverse(scale)
    return (x * gl.fma(gl.fma(-scale, inverse, 1.0), inverse, inverse)[:, None]).to(dtype)


@gluon.jit
def store_rows(acc, out, slot, factor, n0, N, num_valid, stride_out, WIDTH: gl.constexpr, MUL_WEIGHT: gl.constexpr):
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
def up_plain(acc, out_desc, staged, m, n, HALF: gl.constexpr):
    """Activate a tile of the up projection and store it as bf16."""
    y = _gated(acc, COLS).to(out_desc.dtype)
    tma.store_wait(0)
    staged.index(HALF).store(y)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [m * 2 * ROWS + HALF * ROWS, n * (COLS // 2)], staged.index(HALF))


@gluon.jit
def activated(acc0, acc1):
    """Both halves of a tile of the up projection, activated, and the scale of each row: they are one group of 128."""
    y0 = _gated(acc0, COLS // 2)
    y1 = _gated(acc1, COLS // 2)
    peak = gl.maximum(gl.max(gl.maximum(gl.abs(y0), gl.abs(y1)), 1), 1e-10)
    scale = peak * (1 / 448)
    return y0, y1, gl.fma(gl.fma(scale, -448.0, peak), 1 / 448, scale)  # rounded as peak / 448 is


@gluon.jit
def up_quantised(y0, y1, scale, out_desc, out_scale, staged, m, n, stride_os, HALF: gl.constexpr):
    """Store the activated halves of a tile as FP8, with a scale per row."""
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
