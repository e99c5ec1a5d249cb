"""A mixture-of-experts layer's routed experts: align, up GEMM, gated activation, down GEMM, combine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xkernels.ops._details import moe_gemm as _k
from xkernels.ops._details.common import cdiv
from xkernels.ops.activation import SILU, Activation
from xkernels.ops.align import Alignment, moe_align_block_size
from xkernels.ops.reduce import moe_sum_reduce

_GROUP = 8  # gate and up rows alternate in groups of this many


@dataclass(frozen=True, eq=False)
class PreparedExperts:
    """Expert weights in the kernels' layout; the checkpoint's tensors are never changed.

    `w1` [E, 2 * padded N, H]: gate and up rows interleaved in groups of eight, padded with zero rows. `w2` [E, H, N].
    `b1` [E, 2 * padded N] in w1's order and `b2` [E, H], or None.
    """

    w1: torch.Tensor
    w2: torch.Tensor
    b1: torch.Tensor | None
    b2: torch.Tensor | None
    num_experts: int
    hidden: int
    intermediate: int
    activation: Activation

    @property
    def padded(self) -> int:
        """Intermediate size after padding to whole groups."""
        return self.w1.shape[1] // 2


def prepare_experts(
    w1: torch.Tensor,
    w2: torch.Tensor,
    *,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    activation: Activation = SILU,
) -> PreparedExperts:
    """Bring expert weights into the kernels' layout (once, at load time).

    w1 [E, 2N, H]: N gate rows, then N up rows; w2 [E, H, N]; b1 [E, 2N]; b2 [E, H]. float32, float16 or bfloat16.
    Raises ValueError when shapes or dtypes do not fit together.
    """
    _check_weights(w1, w2, b1, b2)
    experts, hidden, n = w2.shape[0], w2.shape[1], w2.shape[2]
    return PreparedExperts(
        interleave(w1), w2.contiguous(),
        None if b1 is None else interleave(b1), None if b2 is None else b2.contiguous(), experts, hidden, n, activation,
    )  # fmt: skip


def interleave(w1: torch.Tensor) -> torch.Tensor:
    """[E, 2N, ...] with gate rows before up rows -> [E, 2 * padded N, ...] alternating in groups of eight."""
    experts, rows = w1.shape[0], w1.shape[1] // 2
    tail = w1.shape[2:]
    padded = cdiv(rows, _GROUP) * _GROUP
    out = w1.new_zeros(experts, 2, padded, *tail)
    out[:, 0, :rows] = w1[:, :rows]
    out[:, 1, :rows] = w1[:, rows:]
    grouped = out.view(experts, 2, padded // _GROUP, _GROUP, *tail).transpose(1, 2)
    return grouped.reshape(experts, 2 * padded, *tail)


def deinterleave(w1: torch.Tensor, rows: int) -> torch.Tensor:
    """The inverse of `interleave`: [E, 2 * rows, ...], gate rows first."""
    experts, tail = w1.shape[0], w1.shape[2:]
    grouped = w1.view(experts, -1, 2, _GROUP, *tail).transpose(1, 2)
    halves = grouped.reshape(experts, 2, -1, *tail)[:, :, :rows]
    return halves.reshape(experts, 2 * rows, *tail)


def fused_experts(
    x: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    backend: str,
    up: Mapping[str, Any] | None = None,
    down: Mapping[str, Any] | None = None,
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float | None = None,
) -> torch.Tensor:
    """Routed experts of one layer.

    x [M, H]; topk_weights float32 [M, k]; topk_ids int32 [M, k], -1 for an expert that is not here (its share is
    zero). backend: `triton`, `torch` or `reference`, already resolved by `moegate.dispatch`. up, down: configs of the
    two projections for this M ({"BLOCK_SIZE_M": ..}); they must agree in BLOCK_SIZE_M; only `triton` needs them.
    Returns [M, H] of x's dtype. Raises ValueError when shapes do not fit or the backend is unknown.
    """
    _check_call(x, experts, topk_weights, topk_ids)
    row = _ROWS.get(backend)
    if row is None:
        raise ValueError(f"fused_experts has no backend {backend!r}: {', '.join(_ROWS)}")
    call = _Call(x, experts, topk_weights, topk_ids, up, down, apply_router_weight_on_input, routed_scaling_factor)
    return row(call)


def fused_experts_reference(
    x: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float | None = None,
) -> torch.Tensor:
    """The twin: float32 arithmetic throughout, one token after the other's experts; returns x's dtype."""
    _check_call(x, experts, topk_weights, topk_ids)
    call = _Call(x, experts, topk_weights, topk_ids, None, None, apply_router_weight_on_input, routed_scaling_factor)
    return _reference(call)


@dataclass(frozen=True)
class _Call:
    x: torch.Tensor
    experts: PreparedExperts
    weights: torch.Tensor
    ids: torch.Tensor
    up: Mapping[str, Any] | None
    down: Mapping[str, Any] | None
    weight_on_input: bool
    scale: float | None


def _triton(c: _Call) -> torch.Tensor:
    if c.up is None or c.down is None:
        raise ValueError("backend triton needs the configs of both projections (up and down)")
    if c.up["BLOCK_SIZE_M"] != c.down["BLOCK_SIZE_M"]:
        raise ValueError(
            f"up and down must share BLOCK_SIZE_M, not {c.up['BLOCK_SIZE_M']} and {c.down['BLOCK_SIZE_M']}"
        )
    if c.x.shape[0] == 0:
        return torch.empty_like(c.x)
    alignment = moe_align_block_size(c.ids, int(c.up["BLOCK_SIZE_M"]), c.experts.num_experts)
    hidden = up_projection(c.x, c.experts, c.weights, alignment, c.up, topk=c.ids.shape[1],
                           weight_on_input=c.weight_on_input)  # fmt: skip
    outs = down_projection(hidden, c.experts, c.weights, alignment, c.down, weight_on_input=c.weight_on_input)
    return moe_sum_reduce(outs, c.scale)


def launch_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Triton's launch options of a config; absent fields keep Triton's defaults."""
    return {name: config[name] for name in ("num_warps", "num_stages") if name in config}


def max_blocks(alignment: Alignment, slots: int) -> int:
    """Upper bound of used blocks: each of `slots` routed entries opens at most one."""
    return min(alignment.expert_ids.numel(), slots)


def up_projection(
    x: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    alignment: Alignment,
    config: Mapping[str, Any],
    *,
    topk: int,
    weight_on_input: bool = False,
) -> torch.Tensor:
    """Up GEMM and gated activation: [used rows of the alignment, padded N] in sorted order, x's dtype."""
    block_m, block_n, block_k = (int(config[f"BLOCK_SIZE_{axis}"]) for axis in "MNK")
    slots = x.shape[0] * topk
    blocks = max_blocks(alignment, slots)
    n2, k = experts.w1.shape[1], experts.w1.shape[2]
    out = torch.empty(blocks * block_m, n2 // 2, dtype=x.dtype, device=x.device)
    _k.up_gemm[(blocks * cdiv(n2, block_n),)](
        x, experts.w1, experts.b1, out, topk_weights, alignment.sorted_ids, alignment.expert_ids,
        alignment.num_post_padded, slots, n2, k, x.stride(0), x.stride(1), experts.w1.stride(0), experts.w1.stride(1),
        out.stride(0), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=int(config.get("GROUP_SIZE_M", 1)),
        TOPK=topk, EVEN_K=k % block_k == 0, EVEN_N=n2 % block_n == 0, HAS_BIAS=experts.b1 is not None,
        MUL_WEIGHT=weight_on_input, **experts.activation.constexprs(), **launch_options(config),
    )  # fmt: skip
    return out


def down_projection(
    hidden: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    alignment: Alignment,
    config: Mapping[str, Any],
    *,
    weight_on_input: bool = False,
) -> torch.Tensor:
    """Down GEMM of sorted rows, times the router weight unless it was applied to the input: [M, topk, H]."""
    block_m, block_n, block_k = (int(config[f"BLOCK_SIZE_{axis}"]) for axis in "MNK")
    tokens, topk = topk_weights.shape
    n, k = experts.w2.shape[1], experts.w2.shape[2]
    out = torch.empty(tokens, topk, n, dtype=hidden.dtype, device=hidden.device)
    blocks = max_blocks(alignment, tokens * topk)
    _k.down_gemm[(blocks * cdiv(n, block_n),)](
        hidden, experts.w2, experts.b2, out, topk_weights, alignment.sorted_ids, alignment.expert_ids,
        alignment.num_post_padded, tokens * topk, n, k, hidden.stride(0), experts.w2.stride(0), experts.w2.stride(1),
        out.stride(1), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=int(config.get("GROUP_SIZE_M", 1)),
        EVEN_K=k % block_k == 0, EVEN_N=n % block_n == 0, HAS_BIAS=experts.b2 is not None,
        MUL_WEIGHT=not weight_on_input, **launch_options(config),
    )  # fmt: skip
    return out


def _torch(c: _Call) -> torch.Tensor:
    """Per-expert matmuls over the tokens that chose the expert, in the weights' dtype; fast on the CPU."""
    x, e = c.x, c.experts
    topk = c.ids.shape[1]
    flat = c.ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat + 1, minlength=e.num_experts + 1).tolist()
    out = torch.zeros(x.shape[0], x.shape[1], dtype=torch.float32, device=x.device)
    weights = c.weights.reshape(-1).float()
    at = counts[0]
    for expert, count in enumerate(counts[1:]):
        if not count:
            continue
        slots = order[at : at + count]
        at += count
        tokens = slots // topk
        rows = x[tokens]
        weight = weights[slots][:, None]
        y = torch.mm(rows, e.w1[expert].t()).float()
        y = y * weight if c.weight_on_input else y
        if e.b1 is not None:
            y = y + e.b1[expert].float()
        pairs = y.view(count, -1, 2, _GROUP)
        gate, up = pairs[:, :, 0].reshape(count, -1), pairs[:, :, 1].reshape(count, -1)
        act = e.activation.apply(gate, up)[:, : e.intermediate].to(x.dtype)
        y = torch.mm(act, e.w2[expert].t()).float()
        if e.b2 is not None:
            y = y + e.b2[expert].float()
        out.index_add_(0, tokens, y if c.weight_on_input else y * weight)
    return (out if c.scale is None else out * c.scale).to(x.dtype)


def _reference(c: _Call) -> torch.Tensor:
    e = c.experts
    x = c.x.float()
    w1, w2 = deinterleave(e.w1.float(), e.intermediate), e.w2.float()
    b1 = None if e.b1 is None else deinterleave(e.b1.float(), e.intermediate)
    out = torch.zeros_like(x)
    for expert in range(e.num_experts):
        tokens, slots = torch.nonzero(c.ids == expert, as_tuple=True)
        if not tokens.numel():
            continue
        weight = c.weights[tokens, slots].float()[:, None]
        y = x[tokens] @ w1[expert].T
        y = y * weight if c.weight_on_input else y
        y = y if b1 is None else y + b1[expert]
        y = e.activation.apply(y[:, : e.intermediate], y[:, e.intermediate :]) @ w2[expert].T
        y = y if e.b2 is None else y + e.b2[expert].float()
        out.index_add_(0, tokens, y if c.weight_on_input else y * weight)
    return (out if c.scale is None else out * c.scale).to(c.x.dtype)


_ROWS: dict[str, Callable[[_Call], torch.Tensor]] = {"triton": _triton, "torch": _torch, "reference": _reference}


def _check_weights(w1: torch.Tensor, w2: torch.Tensor, b1: torch.Tensor | None, b2: torch.Tensor | None) -> None:
    if w1.ndim != 3 or w2.ndim != 3 or w1.shape != (w2.shape[0], 2 * w2.shape[2], w2.shape[1]):
        raise ValueError(f"w1 must be [E, 2N, H] and w2 [E, H, N], not {list(w1.shape)} and {list(w2.shape)}")
    if w1.dtype != w2.dtype:
        raise ValueError(f"w1 and w2 must have one dtype, not {w1.dtype} and {w2.dtype}")
    for name, bias, size in (("b1", b1, w1.shape[1]), ("b2", b2, w2.shape[1])):
        if bias is not None and bias.shape != (w1.shape[0], size):
            raise ValueError(f"{name} must be [{w1.shape[0]}, {size}], not {list(bias.shape)}")


def _check_call(x: torch.Tensor, e: PreparedExperts, weights: torch.Tensor, ids: torch.Tensor) -> None:
    if x.ndim != 2 or x.shape[1] != e.hidden:
        raise ValueError(f"x must be [tokens, {e.hidden}], not {list(x.shape)}")
    if ids.ndim != 2 or ids.shape[0] != x.shape[0] or weights.shape != ids.shape:
        raise ValueError(
            f"topk_weights and topk_ids must be [{x.shape[0]}, topk], not {list(weights.shape)} and {list(ids.shape)}"
        )
