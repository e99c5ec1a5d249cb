"""Gated activations between the up and the down projection of an expert."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from xkernels.ops._details import activation as _k
from xkernels.ops._details.common import cdiv, next_power_of_2

Kind = Literal["silu", "swiglu", "clamped"]


@dataclass(frozen=True)
class Activation:
    """How gate and up become one value, in float32.

    - `silu`: silu(gate) * up. With `limit`: min(silu(gate), limit) * clamp(up, -limit, limit).
    - `swiglu` (GPT-OSS; needs `alpha` and `limit`): g = min(gate, limit), u = clamp(up, -limit, limit),
      g * sigmoid(alpha * g) * (u + 1).
    - `clamped` (DeepSeek-V4's swiglu limit): silu(min(gate, limit)) * clamp(up, -limit, limit).

    No limit is None. Raises ValueError for another kind, a limit that is not above zero, and what a kind lacks or does
    not take.
    """

    kind: Kind = "silu"
    alpha: float | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"activation must be one of {', '.join(get_args(Kind))}, not {self.kind!r}")
        if self.limit is not None and not 0 < self.limit < math.inf:
            raise ValueError(f"activation limit must be a number above zero, or None for no limit, not {self.limit}")
        if self.alpha is not None and not math.isfinite(self.alpha):
            raise ValueError(f"activation alpha must be a finite number, not {self.alpha}")
        if self.kind == "swiglu" and (self.alpha is None or self.limit is None):
            raise ValueError("activation swiglu needs alpha and limit (GPT-OSS: 1.702 and 7.0)")
        if self.kind == "clamped" and self.limit is None:
            raise ValueError("activation clamped needs limit")
        if self.kind != "swiglu" and self.alpha is not None:
            raise ValueError(f"activation {self.kind} takes no alpha")

    def constexprs(self) -> dict[str, object]:
        """The kernels' compile-time parameters."""
        return {"ACT": self.kind, "ALPHA": float(self.alpha or 0.0), "LIMIT": float(self.limit or 0.0)}

    def apply(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The activation in plain torch; float32 in, float32 out."""
        if self.kind == "swiglu":
            assert self.alpha is not None
            assert self.limit is not None
            gate = gate.clamp(max=self.limit)
            return gate * torch.sigmoid(self.alpha * gate) * (up.clamp(-self.limit, self.limit) + 1)
        if self.kind == "clamped":
            assert self.limit is not None
            return torch.nn.functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)
        out = torch.nn.functional.silu(gate)
        if self.limit is not None:
            out, up = out.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return out * up


SILU = Activation()


def silu_and_mul(x: torch.Tensor, activation: Activation = SILU) -> torch.Tensor:
    """Gated activation of the two halves of the last dimension.

    x: [..., 2N], gate first, any strides; float32, float16 or bfloat16. Returns [..., N], contiguous, dtype of x;
    computed in float32. Raises ValueError for an odd last dimension.
    """
    _check(x)
    rows = x.reshape(-1, x.shape[-1])
    n = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block = min(1024, next_power_of_2(n))
    grid = (rows.shape[0], cdiv(n, block))
    _k.gated[grid](rows, out, n, rows.stride(0), rows.stride(1), BLOCK=block, num_warps=4, **activation.constexprs())
    return out


def silu_and_mul_reference(x: torch.Tensor, activation: Activation = SILU) -> torch.Tensor:
    """The twin of `silu_and_mul` in plain torch."""
    _check(x)
    gate, up = x.float().chunk(2, dim=-1)
    return activation.apply(gate, up).to(x.dtype)


def _check(x: torch.Tensor) -> None:
    if x.ndim < 1 or x.shape[-1] % 2 or x.shape[-1] == 0:
        raise ValueError(f"silu_and_mul needs an even, non-empty last dimension, not {list(x.shape)}")
