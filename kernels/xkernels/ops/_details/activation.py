"""Kernels of the gated activations."""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.common import INTERPRETED, helper, narrow

try:
    from triton.language.target_info import is_cuda
except ImportError:  # Triton 3.3, which compiles for Intel
    is_cuda = None

_ASKS_TARGET = tl.constexpr(is_cuda is not None)


@helper
def _sigmoid(x):
    """1 / (1 + exp(-x)) of float32: on CUDA six instructions, where exact limits and subnormals cost another eight.

    There the relative error is at most (4 + |x|) * 2**-23 above -87, and what is smaller than 2**-126 is 0.
    """
    CUDA: tl.constexpr = is_cuda() if _ASKS_TARGET and not INTERPRETED else False
    if CUDA:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )
        out = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [power + 1.0], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        out = 1.0 / (1.0 + tl.exp(-x))
    return out


@helper
def combine_gate(gate, up, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Gated activation of float32 tensors of one shape; LIMIT 0 means none. See `activation.Activation`."""
    if ACT == "swiglu":
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return gate * _sigmoid(ALPHA * gate) * (up + 1.0)
    if ACT == "clamped":
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return gate * _sigmoid(gate) * up
    out = gate * _sigmoid(gate)
    if LIMIT > 0.0:
        out = tl.minimum(out, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return out * up


@triton.jit
def gated(x_ptr, out_ptr, n, stride_row, stride_col, BLOCK: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr,
          LIMIT: tl.constexpr):  # fmt: skip
    """One block of one row: x [rows, 2n] strided, out [rows, n] contiguous."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    base = x_ptr + row * stride_row
    gate = tl.load(base + cols * stride_col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(base + (cols + n) * stride_col, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * n + cols, narrow(combine_gate(gate, up, ACT, ALPHA, LIMIT), out_ptr.dtype.element_ty), mask=mask
    )
