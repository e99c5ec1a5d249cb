"""Kernels of the sum over expert slots."""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.common import narrow
from xkernels.ops._details.pdl import launch_dependents, wait_dependencies


@triton.jit(do_not_specialize=["tokens", "factor"])
def sum_slots(x, out, tokens, h, stride_token, stride_slot, stride_col, factor, TOPK: tl.constexpr,
              BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BLOCK elements of out [tokens, h], contiguous; slots are added in order, in float32."""
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = flat < tokens * h  # a multiple of h's divisor: the loads stay wide
    at = x + (flat // h).to(tl.int64) * stride_token + (flat % h) * stride_col
    wait_dependencies(PDL)
    launch_dependents(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOPK):
        total += tl.load(at + slot * stride_slot, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + flat, narrow(total * factor, out.dtype.element_ty), mask=mask)
