"""Overlap of dependent kernels where the device can (CUDA's programmatic dependent launch); nothing elsewhere.

A kernel launched this way may start before its predecessor has finished, and that one before its own: several of a
row may be under way at once. Until `wait_dependencies` returns, a kernel reads nothing that another of the row writes
and writes nothing that another reads; every kernel of a row waits, so afterwards all before it are complete. After a
predecessor that calls `launch_dependents` only behind its own wait, it may also read what is older than that one.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from xkernels.ops._details.common import helper

# Absent from Triton 3.3, which is what compiles for Intel away from a device; there nothing asks for them.
_gdc_wait: Any = getattr(tl.extra.cuda, "gdc_wait", None)
_gdc_launch_dependents: Any = getattr(tl.extra.cuda, "gdc_launch_dependents", None)


@helper
def wait_dependencies(PDL: tl.constexpr):
    """Wait until the predecessor's writes are visible."""
    if PDL:
        _gdc_wait()


@helper
def launch_dependents(PDL: tl.constexpr):
    """Let the successor start once every program of this grid got here."""
    if PDL:
        _gdc_launch_dependents()
