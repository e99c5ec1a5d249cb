"""Helpers shared by the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from xkernels.device import is_interpreted, of


def _plain(fn: Any) -> Any:
    return fn


# Triton's interpreter computes a dot of bf16 operands wrongly (seen on 3.7.1 to 3.9.0), so kernels upcast there.
INTERPRETED = tl.constexpr(is_interpreted())

# A function that kernels call. Under the interpreter it stays a plain Python function: a nested jitted call there costs
# a quarter of a millisecond for patching the language once more, which its caller has done already.
helper: Callable[[Any], Any] = _plain if is_interpreted() else triton.jit


def overlapping(tensor: torch.Tensor, wanted: bool = True) -> dict[str, Any]:
    """Launch options of a kernel that may start while its predecessor drains, where the device can (see `pdl`)."""
    pdl = wanted and "pdl" in of(tensor).features()
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n` and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


@helper
def swizzle(pid, num_m, num_n, GROUP: tl.constexpr):
    """Tile (m, n) of program `pid`: GROUP rows of tiles walk the columns together, so they share weight tiles in L2."""
    in_group = GROUP * num_n
    first_m = (pid // in_group) * GROUP
    rows = min(num_m - first_m, GROUP)
    return first_m + (pid % in_group) % rows, (pid % in_group) // rows


@helper
def matmul_add(a, b, acc):
    """`acc + a @ b` in float32; exact products for float32 operands, and for bf16 under the interpreter."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@helper
def _round_mantissa(x, DROP: tl.constexpr):
    """Float32 rounded to nearest even at `DROP` bits above its last."""
    bits = x.to(tl.int32, bitcast=True)
    bits += (1 << (DROP - 1)) - 1 + ((bits >> DROP) & 1)
    return (bits & (-1 << DROP)).to(tl.float32, bitcast=True)


@helper
def narrow(x, dtype: tl.constexpr):
    """Float32 `x` as `dtype`, rounded to nearest even; the interpreter alone would cut bf16 and FP8 off."""
    if INTERPRETED and dtype == tl.bfloat16:
        x = tl.where(x == x, _round_mantissa(x, 16), x)
    if INTERPRETED and (dtype == tl.float8e4nv or dtype == tl.float8e4b8):
        # below the smallest normal number the step is constant: adding 1.5 * 2^23 steps rounds to whole ones
        LOW: tl.constexpr = 0.015625 if dtype == tl.float8e4nv else 0.0078125
        SHIFT: tl.constexpr = LOW / 8 * 12582912.0
        x = tl.where(tl.abs(x) < LOW, (x + SHIFT) - SHIFT, _round_mantissa(x, 20))
    return x.to(dtype)
