"""Decoding of MXFP4: pairs of e2m1 values with an e8m0 scale per 32 of them."""

from __future__ import annotations

import triton.language as tl

from xkernels.ops._details.common import helper, narrow


@helper
def _e2m1(code):
    """Value * 2^-126 of a 4-bit code (sign, two exponent bits, one mantissa bit) as float32.

    The three magnitude bits, put where float32 keeps its lowest exponent bits and highest mantissa bit, are the value
    scaled by 2^-126; subnormal codes stay subnormal.
    """
    code = code.to(tl.int32)
    return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True)


@helper
def unpack(packed, scales, dtype: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, COLS] values from uint8 pairs [ROWS, COLS / 2] (low nibble first) and e8m0 [ROWS, COLS / 32]."""
    pairs = tl.join(_e2m1(packed & 15), _e2m1(packed >> 4))
    values = tl.reshape(pairs, (ROWS, COLS // 32, 32))
    # 2^126 * 2^(e - 127) = 2^(e - 1), in two steps so that neither factor leaves float32's range
    power = tl.exp2(scales.to(tl.float32) - 127.0)
    values = (values * 8.507059173023462e37) * power[:, :, None]
    return narrow(tl.reshape(values, (ROWS, COLS)), dtype)
