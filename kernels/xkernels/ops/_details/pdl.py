"""Overlap of dependent kernels where the device can (CUDA's programmatic dependent launch); nothing elsewhere.

A kernel launched this way may start before its predecessor has finished. It may read only what older kernels wrote
until `wait_dependencies` returns.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_dependencies(PDL: tl.constexpr):
    """Wait until the predecessor's writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the successor start once every program of this grid got here."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_l2(pointers):
    """Ask for the cache lines at `pointers` (a tensor of global addresses) without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
