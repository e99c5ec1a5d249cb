"""Kernels of the sum over expert slots."""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.common import narrow


@triton.jit(do_not_specialize=["factor"])
def sum_slots(x_ptr, out_ptr, h, stride_token, stride_slot, stride_col, stride_out, factor, TOPK: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """One block of columns of one token; slots are added in order, in float32."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < h
    at = x_ptr + token * stride_token + cols * stride_col
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOPK):
        total += tl.load(at + slot * stride_slot, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * stride_out + cols, narrow(total * factor, out_ptr.dtype.element_ty), mask=mask)
