"""MXFP4 in plain torch: e2m1 pairs with an e8m0 scale per 32 values."""

from __future__ import annotations

import torch

from xkernels.ops.scheme import MXFP4_GROUP

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MAX = 6.0


def dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K / 2] (low nibble first) and e8m0 uint8 [..., K / 32] -> float32 [..., K]."""
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=torch.float32, device=packed.device)
    values = torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], -1).flatten(-2)
    power = torch.exp2(scale.float() - 127.0)
    return (values.unflatten(-1, (-1, MXFP4_GROUP)) * power[..., None]).flatten(-2)


def quantize_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float [..., K], K a multiple of 32 -> (uint8 [..., K / 2], e8m0 uint8 [..., K / 32]).

    The scale is the largest magnitude's power of two over that of 6.0's (OCP microscaling rule); values round to the
    nearest code, ties to the smaller magnitude.
    """
    if x.shape[-1] % MXFP4_GROUP:
        raise ValueError(f"the last dimension must be a multiple of {MXFP4_GROUP}, not {x.shape[-1]}")
    groups = x.float().unflatten(-1, (-1, MXFP4_GROUP))
    peak = groups.abs().amax(-1)
    exponent = torch.floor(torch.log2(peak.clamp(min=2.0**-120))) - 2
    scaled = groups / torch.exp2(exponent)[..., None]
    magnitude = scaled.abs().clamp(max=_E2M1_MAX)
    table = torch.tensor(_E2M1, dtype=torch.float32, device=x.device)
    code = (magnitude[..., None] - table).abs().argmin(-1)
    code = (code + 8 * (scaled < 0)).flatten(-2).to(torch.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4), (exponent + 127).clamp(0, 254).to(torch.uint8)
