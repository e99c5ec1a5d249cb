"""Sum of the experts' outputs of each token."""

from __future__ import annotations

import torch

from xkernels.ops._details import reduce as _k
from xkernels.ops._details.common import cdiv, overlapping

_BLOCK = 1024


def moe_sum_reduce(
    x: torch.Tensor,
    routed_scaling_factor: float | None = None,
    out: torch.Tensor | None = None,
    *,
    overlap: bool = False,
) -> torch.Tensor:
    """Sum over the slots of each token, times `routed_scaling_factor` (None: 1).

    x: [tokens, topk, H], any strides; returns [tokens, H] of x's dtype, summed in float32 in slot order: the order is
    the same for every batch, so a token's bits do not depend on its neighbours.
    `out` receives the result if given: contiguous [tokens, H].
    overlap: let the kernel start while its predecessor drains, where the device can.
    """
    out = _out(x, out)
    tokens, topk, h = x.shape
    if out.numel() == 0:
        return out
    factor = 1.0 if routed_scaling_factor is None else float(routed_scaling_factor)
    _k.sum_slots[(cdiv(tokens * h, _BLOCK),)](
        x, out, tokens, h, x.stride(0), x.stride(1), x.stride(2), factor, TOPK=topk, BLOCK=_BLOCK,
        num_warps=4, **overlapping(x, overlap),
    )  # fmt: skip
    return out


def moe_sum_reduce_reference(
    x: torch.Tensor, routed_scaling_factor: float | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The twin of `moe_sum_reduce`: the same additions in the same order, so it agrees bit for bit."""
    out = _out(x, out)
    total = torch.zeros_like(out, dtype=torch.float32)
    for slot in range(x.shape[1]):
        total += x[:, slot].float()
    return out.copy_(total * (1.0 if routed_scaling_factor is None else float(routed_scaling_factor)))


def _out(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if x.ndim != 3:
        raise ValueError(f"moe_sum_reduce needs [tokens, topk, H], not {list(x.shape)}")
    if out is None:
        return torch.empty(x.shape[0], x.shape[2], dtype=x.dtype, device=x.device)
    if out.shape != (x.shape[0], x.shape[2]) or not out.is_contiguous():
        raise ValueError(f"out must be [{x.shape[0]}, {x.shape[2]}] contiguous, not {list(out.shape)}")
    return out
