"""FP8 operands of other engines' fused-MoE kernels: how they are made, and what their references multiply."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moegate.errors import UsageError
from tuner.problem import Problem
from xkernels.ops.quant import per_token_group_quant_fp8, per_token_group_quant_fp8_reference, scaled_fp8_quant
from xkernels.ops.scheme import BLOCK_K

__all__ = ["Operand", "block_of", "expert", "make_weight", "quantise", "rounded"]

_FP8 = torch.float8_e4m3fn
_TOP = 448.0


@dataclass(frozen=True)
class Operand:
    """Values, and their scales where they are FP8: per tensor, per expert, or per block."""

    values: torch.Tensor
    scale: torch.Tensor | None = None


def block_of(problem: Problem) -> tuple[int, int] | None:
    """The block shape of FP8 weights; None for one scale an expert. UsageError for columns that nobody quantises by."""
    block = problem.block_shape
    if block is not None and block[1] != BLOCK_K:
        raise UsageError(f"block shape {list(block)} is not adapted", field="--shape", fix=f"[{BLOCK_K}, {BLOCK_K}]")
    return block


def make_weight(weight: torch.Tensor, block: tuple[int, int] | None, unit: float) -> Operand:
    """FP8 weights [E, rows, K] from normal values, with scales around `unit`: [E], or [E, rows / bn, K / bk]."""
    experts, rows, columns = weight.shape
    if block is None:
        return Operand(weight.to(_FP8), torch.full((experts,), unit, device=weight.device))
    shape = (experts, -(-rows // block[0]), -(-columns // block[1]))
    # Scales differ from block to block, so that one that is applied to the wrong block shows.
    numbers = torch.arange(shape[0] * shape[1] * shape[2], device=weight.device).view(shape)
    return Operand(weight.to(_FP8), (0.5 + (numbers % 7) / 7) * unit)


def expert(weight: Operand, index: int, block: tuple[int, int] | None) -> torch.Tensor:
    """One expert's weight in float32."""
    values = weight.values[index].float()
    if weight.scale is None:
        return values
    scale = weight.scale[index]
    if block is None:
        return values * scale
    wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return values * wide[: values.shape[0], : values.shape[1]]


def quantise(rows: torch.Tensor, block: tuple[int, int] | None) -> Operand:
    """Activations [rows, K] in FP8 with scales [rows, K / 128], or one scale [1]."""
    if rows.device.type == "meta":
        shape = (1,) if block is None else (rows.shape[0], -(-rows.shape[1] // BLOCK_K))
        return Operand(torch.empty_like(rows, dtype=_FP8), torch.empty(shape, device="meta"))
    rows = rows.contiguous()
    return Operand(*(scaled_fp8_quant(rows) if block is None else per_token_group_quant_fp8(rows, BLOCK_K)))


def rounded(rows: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """float32 activations with the rounding of that quantisation."""
    if block is None:
        scale = rows.abs().max().float().clamp(min=1e-10) / _TOP
        return (rows.float() / scale).clamp(-_TOP, _TOP).to(_FP8).float() * scale
    values, scales = per_token_group_quant_fp8_reference(rows.contiguous(), BLOCK_K)
    return (values.float().unflatten(1, (-1, BLOCK_K)) * scales[:, :, None]).flatten(1)
