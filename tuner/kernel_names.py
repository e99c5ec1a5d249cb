"""Names of our own tuned kernels, for whoever reads compiled facts.

Light: the process that compiles for absent hardware asks before torch is there. A config selects which of them it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.problem import Projection

__all__ = ["EXPERTS", "GEMMS", "LINEAR", "SHARED", "STORE", "kernels_of"]

GEMMS: Mapping[Projection, str] = {"up": "up_gemm", "down": "down_gemm"}
"""Fused experts, for any rows."""

SHARED = ("large_gemm", "stream_gemm")
"""Fused experts, for many rows and for streamed weights: one kernel serves both projections."""

LINEAR = "fp8_gemm"
"""The block-FP8 linear layer."""

STORE = "store_kv"
"""Storing keys and values."""

_ROWS: Mapping[Projection, str] = {"up": "up_rows", "down": "down_rows"}


def kernels_of(projection: Projection) -> tuple[str, ...]:
    """The kernels of which every launch of a projection runs one."""
    return (GEMMS[projection], *SHARED, _ROWS[projection])


EXPERTS = tuple(dict.fromkeys(name for projection in GEMMS for name in kernels_of(projection)))
"""Fused experts, both projections."""
