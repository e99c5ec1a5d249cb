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
