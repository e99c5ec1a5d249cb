"""A mixture-of-experts layer's routed experts: align, up GEMM, gated activation, down GEMM, combine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from xkernels.ops._details.experts import (
    Call,
    down_projection,
    run_reference,
    run_torch,
    run_triton,
    up_projection,
)
from xkernels.ops.align import Alignment
from xkernels.ops.expert_config import check_config
from xkernels.ops.prepared import PreparedExperts, prepare_experts

__all__ = [
    "PreparedExperts",
    "expert_slots",
    "expert_slots_reference",
    "fused_experts",
    "fused_experts_reference",
    "prepare_experts",
]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_INTS = (torch.int32, torch.int64)

_ROWS: dict[str, Callable[[Call], torch.Tensor]] = {
    "triton": run_triton,
    "torch": run_torch,
    "reference": run_reference,
}


def fused_experts(
    x: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    backend: str,
    up: Mapping[str, Any] | None = None,
    down: Mapping[str, Any] | None = None,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float | None = None,
) -> torch.Tensor:
    """Routed experts of one layer.

    x [M, H] float32, float16 or bfloat16, with `triton` of unquantised weights' own dtype; topk_weights float32 [M, k],
    contiguous; topk_ids int32 or int64 [M, k], -1 for an expert that is not here: its share is zero, and so is that of
    any id that no expert has. expert_map: int32 or int64 [global experts], the local index of each or -1: topk_ids are
    global then. backend: `triton`, `torch` or `reference`, already resolved by `moegate.dispatch`. up, down: configs of
    the two projections for this M ({"BLOCK_SIZE_M": ..}); they must agree in BLOCK_SIZE_M; only `triton` needs them.
    The router weight multiplies the up projection's result with apply_router_weight_on_input, else the down
    projection's. Returns [M, H] of x's dtype. Raises ValueError when shapes, dtypes or values of a config do not fit,
    and for an unknown backend.
    """
    row = _ROWS.get(backend)
    if row is None:
        raise ValueError(f"fused_experts has no backend {backend!r}: {', '.join(_ROWS)}")
    _check_call(x, experts, topk_weights, topk_ids.shape)
    if topk_ids.dtype not in _INTS:
        raise ValueError(f"topk_ids must be int32 or int64, not {topk_ids.dtype}")
    if row is run_triton:
        _check_tiles(x, experts, up, down)
    ids = topk_ids if expert_map is None else _local(topk_ids, expert_map, experts.num_experts)
    if row is run_torch:  # the others look for the ids that they know, this one counts all there are
        ids = torch.where(ids == ids.clamp(-1, experts.num_experts - 1), ids, -1)
    scale = routed_scaling_factor
    return row(Call(x, experts, topk_weights, ids, up, down, apply_router_weight_on_input, scale))


def expert_slots(
    x: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    alignment: Alignment,
    up: Mapping[str, Any],
    down: Mapping[str, Any],
) -> torch.Tensor:
    """The two projections of backend `triton` alone: for who aligns the choice and sums over its slots elsewhere.

    x [M, H]; topk_weights float32 [M, k], contiguous; alignment of the chosen ids in blocks of both configs'
    BLOCK_SIZE_M. Returns [M, k, H] of x's dtype: its sum over k, as `moe_sum_reduce` takes it, is `fused_experts`.
    Raises ValueError when shapes or blocks do not fit.
    """
    _check_call(x, experts, topk_weights, topk_weights.shape)
    _check_tiles(x, experts, up, down)
    if {int(config["BLOCK_SIZE_M"]) for config in (up, down)} != {alignment.block}:
        raise ValueError(f"an alignment in blocks of {alignment.block} does not fit {dict(up)} and {dict(down)}")
    hidden = up_projection(x, experts, topk_weights, alignment, up, down=down)
    return down_projection(hidden, experts, topk_weights, alignment, down, x.dtype)


def expert_slots_reference(
    x: torch.Tensor, experts: PreparedExperts, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """The twin of `expert_slots`: `fused_experts_reference` of each slot alone."""
    slots = zip(topk_weights.split(1, 1), topk_ids.split(1, 1), strict=True)
    outs = [fused_experts_reference(x, experts, weights.contiguous(), ids) for weights, ids in slots]
    return torch.stack(outs, 1)


def function_of(backend: str) -> Callable[[Call], torch.Tensor]:
    """The function that a backend of `fused_experts` is; KeyError for a name that none has."""
    return _ROWS[backend]


def fused_experts_reference(
    x: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float | None = None,
) -> torch.Tensor:
    """The twin: float32 arithmetic on dequantised weights, one expert after the other; returns x's dtype."""
    return fused_experts(
        x, experts, topk_weights, topk_ids, backend="reference", expert_map=expert_map,
        apply_router_weight_on_input=apply_router_weight_on_input, routed_scaling_factor=routed_scaling_factor,
    )  # fmt: skip


def _local(ids: torch.Tensor, expert_map: torch.Tensor, experts: int) -> torch.Tensor:
    if expert_map.ndim != 1 or expert_map.dtype not in _INTS:
        raise ValueError(
            f"expert_map must be int32 or int64 [global experts], not {expert_map.dtype} {list(expert_map.shape)}"
        )
    size = expert_map.shape[0]
    if size < max(1, experts):
        raise ValueError(f"expert_map is of {size} global experts, which are fewer than the {experts} here")
    known = ids.clamp(0, size - 1)
    return torch.where(ids == known, expert_map[known.long()], -1).to(torch.int32)


def _check_call(x: torch.Tensor, e: PreparedExperts, weights: torch.Tensor, ids: torch.Size) -> None:
    if x.ndim != 2 or x.shape[1] != e.hidden:
        raise ValueError(f"x must be [tokens, {e.hidden}], not {list(x.shape)}")
    if x.dtype not in _FLOATS:
        raise ValueError(f"x must be float32, float16 or bfloat16, not {x.dtype}")
    if len(ids) != 2 or ids[0] != x.shape[0] or weights.shape != ids:
        raise ValueError(
            f"topk_weights and topk_ids must be [{x.shape[0]}, topk], not {list(weights.shape)} and {list(ids)}"
        )
    if weights.dtype != torch.float32:
        raise ValueError(f"topk_weights must be float32, not {weights.dtype}")
    if not weights.is_contiguous():
        raise ValueError(f"topk_weights must be contiguous, not with strides {list(weights.stride())}")


def _check_tiles(
    x: torch.Tensor, e: PreparedExperts, up: Mapping[str, Any] | None, down: Mapping[str, Any] | None
) -> None:
    """What backend `triton` asks for beside what every backend does."""
    if e.scheme.kind == "none" and x.dtype != e.w1.dtype:
        raise ValueError(f"backend triton multiplies x and weights of one dtype, not {x.dtype} and {e.w1.dtype}")
    if up is None or down is None:
        raise ValueError("backend triton needs the configs of both projections (up and down)")
    check_config("up", up)
    check_config("down", down)
