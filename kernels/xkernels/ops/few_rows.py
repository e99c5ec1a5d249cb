"""Linear layers of a decode step of a few rows, each together with what comes before and after it in one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from xkernels.ops._details import few_rows as _k
from xkernels.ops._details.common import cdiv, next_power_of_2, overlapping
from xkernels.ops.align import Alignment, capacity, moe_align_block_size_reference
from xkernels.ops.decoder import add_rms_norm_reference
from xkernels.ops.reduce import moe_sum_reduce_reference
from xkernels.ops.topk import EPS, Router, check_router, router_logits_reference, topk_reference

FEW_ROWS = 4  # rows for which reading the weights is all that a linear layer costs
_TILE = 16384  # weights that a program holds at once
_COLS = 8  # most rows of weights of a program: each norms its rows of x itself, and fewer would do that more often
_WARPS = 4
_FILL = 1024  # entries of padding that are written at once


class Chosen(NamedTuple):
    """Experts of each row: weights float32 and ids int32, both [T, topk]; and their alignment, where one was wanted."""

    weights: torch.Tensor
    ids: torch.Tensor
    alignment: Alignment | None


def norm_linear(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    gain: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    overlap: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual sum, its RMS norm, and a linear layer of that, for at most FEW_ROWS rows.

    x [T, K]; delta [T, K], or [T, slots, K], whose slots are summed as `moe_sum_reduce` does; gain [K]; weight [N, K];
    bias [N]; rows contiguous. Returns (x + delta [T, K], rounded once; x itself without a delta) and
    norm(sum) * gain @ weight.T + bias [T, N] of x's dtype, in float32 in between, in an order that does not depend on
    T. overlap: ask for the weights while the predecessor drains, where the device can; not after streams have joined.
    Raises ValueError when shapes do not fit.
    """
    _check_rows(x, weight, gain)
    _check_beside(x, delta, bias, weight.shape[0])
    rows, width = x.shape
    cols = weight.shape[0]
    head, tail, each = _tiles(width)
    total = x if delta is None else torch.empty((rows, width), dtype=x.dtype, device=x.device)
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    d, slots, stride_slot = _slots(x, delta)
    _k.norm_linear[(cdiv(cols, each),)](
        x, d, gain, weight, bias, total, out, eps, cols, x.stride(0), d.stride(0), stride_slot, weight.stride(0),
        WIDTH=width, HEAD=head, TAIL=tail, ROWS=rows, COLS=each, SLOTS=slots, HAS_BIAS=bias is not None,
        num_warps=_WARPS, **overlapping(x, overlap),
    )  # fmt: skip
    return total, out


def norm_linear_reference(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    gain: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `norm_linear` in plain torch."""
    if delta is not None and delta.ndim == 3:
        delta = moe_sum_reduce_reference(delta)
    total, _ = add_rms_norm_reference(x, () if delta is None else (delta,), gain, eps)
    offset = None if bias is None else bias.float()
    return total, torch.nn.functional.linear(_normed(total, gain, eps), weight.float(), offset).to(x.dtype)


def norm_rows(
    x: torch.Tensor, delta: torch.Tensor | None, gain: torch.Tensor, eps: float, *, overlap: bool = True
) -> torch.Tensor:
    """RMS norm of at most FEW_ROWS residual sums: norm(x + delta) * gain [T, K] of x's dtype.

    Arguments, the sum and errors are `norm_linear`'s.
    """
    _check_rows(x, x, gain)
    _check_beside(x, delta, None, 0)
    rows, width = x.shape
    head, tail, _ = _tiles(width)
    normed = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    d, slots, stride_slot = _slots(x, delta)
    _k.norm_rows[(rows,)](
        x, d, gain, normed, eps, x.stride(0), d.stride(0), stride_slot, WIDTH=width, HEAD=head, TAIL=tail, SLOTS=slots,
        num_warps=_WARPS, **overlapping(x, overlap),
    )  # fmt: skip
    return normed


def norm_rows_reference(x: torch.Tensor, delta: torch.Tensor | None, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """The twin of `norm_rows` in plain torch."""
    if delta is not None and delta.ndim == 3:
        delta = moe_sum_reduce_reference(delta)
    return add_rms_norm_reference(x, () if delta is None else (delta,), gain, eps)[1]


def row_logits(x: torch.Tensor, weight: torch.Tensor, *, overlap: bool = True) -> torch.Tensor:
    """Logits of at most FEW_ROWS rows: x @ weight.T, rounded to x's dtype, as float32 [T, N].

    x [T, K]; weight [N, K]; rows contiguous. A row's bits do not depend on T. overlap: as for `norm_linear`. Raises
    ValueError when shapes do not fit.
    """
    _check_rows(x, weight, None)
    rows, width = x.shape
    cols = weight.shape[0]
    head, tail, each = _tiles(width)
    out = torch.empty((rows, cols), dtype=torch.float32, device=x.device)
    _k.row_logits[(cdiv(cols, each),)](
        x, weight, out, cols, x.stride(0), weight.stride(0), WIDTH=width, HEAD=head, TAIL=tail, ROWS=rows, COLS=each,
        num_warps=_WARPS, **overlapping(x, overlap),
    )  # fmt: skip
    return out


def row_logits_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The twin of `row_logits` in plain torch."""
    return torch.nn.functional.linear(x.float(), weight.float()).to(x.dtype).float()


def norm_gate(
    x: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    router: torch.Tensor | None,
    gate_up: torch.Tensor | None,
    *,
    overlap: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a feed-forward block does first with the RMS norm of at most FEW_ROWS rows, in one kernel.

    x [T, K]; gain [K]; router float32 [E, K] or None; gate_up [2I, K], gate rows first, or None (not both). Returns
    (normed rows [T, K] of x's dtype, router logits float32 [T, E], silu(gate) * up [T, I] of x's dtype); without a
    router the first two are empty, without gate_up the last. overlap: as for `norm_linear`. Raises ValueError when
    shapes do not fit.
    """
    if router is None and gate_up is None:
        raise ValueError("a router, a gated projection or both are wanted")
    for name, weight in (("router", router), ("gate_up", gate_up)):
        if weight is not None:
            _check_rows(x, weight, gain, ("x", name))
    if (router is not None and router.dtype != torch.float32) or (gate_up is not None and gate_up.shape[0] % 2):
        raise ValueError("a router is float32, and gate_up has as many gate rows as up rows")
    rows, width = x.shape
    experts = 0 if router is None else router.shape[0]
    inner = 0 if gate_up is None else gate_up.shape[0] // 2
    head, tail, each = _tiles(width, matrices=2)
    normed = torch.empty((rows, width if experts else 0), dtype=x.dtype, device=x.device)
    logits = torch.empty((rows, experts), dtype=torch.float32, device=x.device)
    gated = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    _k.norm_gate[(cdiv(experts, each) + cdiv(inner, each),)](
        x, gain, router, gate_up, normed, logits, gated, eps, inner, x.stride(0),
        0 if router is None else router.stride(0), 0 if gate_up is None else gate_up.stride(0), WIDTH=width, HEAD=head,
        TAIL=tail, ROWS=rows, COLS=each, EXPERTS=experts, GATED=inner > 0, num_warps=_WARPS, **overlapping(x, overlap),
    )  # fmt: skip
    return normed, logits, gated


def norm_gate_reference(
    x: torch.Tensor, gain: torch.Tensor, eps: float, router: torch.Tensor | None, gate_up: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The twin of `norm_gate` in plain torch."""
    value = _normed(x, gain, eps)
    logits = x.new_empty((x.shape[0], 0)).float() if router is None else router_logits_reference(value, router)
    gated = x.new_empty((x.shape[0], 0))
    if gate_up is not None:
        gate, up = torch.nn.functional.linear(value, gate_up.float()).chunk(2, dim=-1)
        gated = (torch.nn.functional.silu(gate) * up).to(x.dtype)
    return value.to(x.dtype) if router is not None else x.new_empty((x.shape[0], 0)), logits, gated


def add_linear(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, *, overlap: bool = True) -> torch.Tensor:
    """residual + x @ weight.T for at most FEW_ROWS rows.

    x [T, K]; weight [N, K]; residual [T, N]. Returns [T, N] of residual's dtype, rounded once. overlap: as for
    `norm_linear`. Raises ValueError when shapes do not fit.
    """
    _check_rows(x, weight, None)
    out = _check_residual(x, weight, residual)
    _launch_choose_add(None, Router(1), None, None, (x, weight, residual, out), out, overlap)
    return out


def add_linear_reference(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The twin of `add_linear` in plain torch."""
    return (residual.float() + torch.nn.functional.linear(x.float(), weight.float())).to(residual.dtype)


def choose_experts(
    logits: torch.Tensor,
    router: Router,
    correction: torch.Tensor | None,
    block: int | None,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
    residual: torch.Tensor,
    *,
    overlap: bool = True,
) -> tuple[Chosen, torch.Tensor]:
    """Experts of at most FEW_ROWS rows, and beside their choice what shared experts add to the residual, in one kernel.

    logits float32 [T, E] and correction float32 [E] or None, contiguous; router without shared slots. block: also sort
    the entries into blocks of that many, as `moe_align_block_size` does. shared: gated rows [T, I] and down weights
    [H, I], or None; residual [T, H]. Returns the choice (as `topk`), and residual + gated @ down.T [T, H]: the residual
    itself without shared experts. overlap: as for `norm_linear`. Raises ValueError when shapes do not fit.
    """
    check_router(logits, router, correction)
    if router.shared_slots or not 0 < logits.shape[0] <= FEW_ROWS or not logits.is_contiguous():
        raise ValueError(f"contiguous logits [1 to {FEW_ROWS}, E] and no shared slots, not {list(logits.shape)}")
    if residual.ndim != 2 or residual.shape[0] != logits.shape[0]:
        raise ValueError(f"residual must be [{logits.shape[0]}, H], not {list(residual.shape)}")
    if correction is not None and not correction.is_contiguous():
        raise ValueError(f"correction must be [{logits.shape[1]}], contiguous, not of stride {correction.stride(0)}")
    if block is not None and block < 1:
        raise ValueError(f"block must be positive, not {block}")
    tokens, experts = logits.shape
    weights = torch.empty((tokens, router.topk), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, router.topk), dtype=torch.int32, device=logits.device)
    alignment = None if block is None else _empty_alignment(tokens * router.topk, block, experts, logits.device)
    chosen = Chosen(weights, ids, alignment)
    total, add = residual, None
    if shared is not None:
        _check_rows(*shared, None, ("gated rows", "down weights"))
        total = _check_residual(*shared, residual)
        add = (*shared, residual, total)
    _launch_choose_add(logits, router, correction, chosen, add, residual, overlap)
    return chosen, total


def choose_experts_reference(
    logits: torch.Tensor,
    router: Router,
    correction: torch.Tensor | None,
    block: int | None,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
    residual: torch.Tensor,
) -> tuple[Chosen, torch.Tensor]:
    """The twin of `choose_experts` in plain torch."""
    weights, ids = topk_reference(logits, router, correction)
    alignment = None if block is None else moe_align_block_size_reference(ids, block, logits.shape[1])
    return Chosen(weights, ids, alignment), residual if shared is None else add_linear_reference(*shared, residual)


def _launch_choose_add(
    logits: torch.Tensor | None,
    router: Router,
    correction: torch.Tensor | None,
    chosen: Chosen | None,
    add: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
    like: torch.Tensor,
    overlap: bool,
) -> None:
    """The kernel of `choose_experts` and `add_linear`."""
    weights, ids, alignment = chosen or (None, None, None)
    x, weight, residual, out = add or (None, None, None, None)
    experts = 0 if logits is None else logits.shape[1]
    sorted_ids, expert_ids, post = (None, None, None)
    if alignment is not None:
        sorted_ids, expert_ids, post = alignment.sorted_ids, alignment.expert_ids, alignment.num_post_padded
    width, cols = (1, 0) if weight is None else (weight.shape[1], weight.shape[0])
    head, tail, each = _tiles(width)
    cap = 0 if sorted_ids is None else sorted_ids.numel()
    _k.choose_add[((logits is not None) + cdiv(cols, each),)](
        logits, correction, weights, ids, sorted_ids, expert_ids, post, x, weight, residual, out, like.shape[0],
        router.factor, cap, 0 if expert_ids is None else expert_ids.numel(), cols,
        *(0 if t is None else t.stride(0) for t in (x, weight, residual)), WIDTH=width, HEAD=head, TAIL=tail,
        ROWS=like.shape[0], COLS=each, CHOOSE=logits is not None, ADD=weight is not None, EXPERTS=experts,
        COLUMNS=next_power_of_2(experts), MOST=FEW_ROWS, TOPK=router.topk, SLOTS=next_power_of_2(router.topk),
        SCORING=router.scoring, RENORM=router.renormalize, BIASED=correction is not None, GROUPS=router.groups,
        TOP_GROUPS=router.top_groups, EPS=EPS, BLOCK=0 if alignment is None else alignment.block,
        FILL=min(_FILL, next_power_of_2(cap)), num_warps=_WARPS, **overlapping(like, overlap),
    )  # fmt: skip


def _slots(x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, int, int]:
    """What a kernel takes for delta, how many slots it has, and the stride from one to the next."""
    if delta is None:
        return x, 0, 0
    return (delta, delta.shape[1], delta.stride(1)) if delta.ndim == 3 else (delta, 1, 0)


def _tiles(width: int, matrices: int = 1) -> tuple[int, int, int]:
    """Columns of the two tiles that a row of weights is read as (the second may be 0), and rows per program."""
    head = 1 << (width.bit_length() - 1)
    tail = 0 if width == head else next_power_of_2(width - head)
    fit = max(1, _TILE // matrices // (head + tail))
    return head, tail, min(_COLS // matrices, 1 << (fit.bit_length() - 1))


def _empty_alignment(numel: int, block: int, experts: int, device: torch.device) -> Alignment:
    cap = capacity(numel, block, experts)
    sorted_ids, expert_ids, post = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (cap, cdiv(cap, block), 2)
    )
    return Alignment(sorted_ids, expert_ids, post, block)


def _normed(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    value = x.float()
    return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * gain.float()


def _check_rows(
    x: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor | None, names: tuple[str, str] = ("x", "weight")
) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or not 0 < x.shape[0] <= FEW_ROWS:
        raise ValueError(f"{names[0]} [1 to {FEW_ROWS}, K] and {names[1]} [N, K] are wanted, not {list(x.shape)} and "
                         f"{list(weight.shape)}")  # fmt: skip
    if x.shape[1] < 1 or weight.shape[0] < 1 or x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError(f"{names[0]} and {names[1]} must have contiguous rows and not be empty")
    if gain is not None and (gain.shape != (x.shape[1],) or gain.stride(0) != 1):
        raise ValueError(f"gain must be [{x.shape[1]}], contiguous, not {list(gain.shape)}")


def _check_beside(x: torch.Tensor, delta: torch.Tensor | None, bias: torch.Tensor | None, cols: int) -> None:
    if delta is not None:
        fits = delta.ndim in (2, 3) and (delta.shape[0], delta.shape[-1]) == x.shape and 0 not in delta.shape
        if not fits or delta.dtype != x.dtype or delta.stride(-1) != 1:
            raise ValueError(f"delta must be as x {list(x.shape)}, rows contiguous, not {list(delta.shape)}")
    if bias is not None and (bias.shape != (cols,) or bias.stride(0) != 1):
        raise ValueError(f"bias must be [{cols}], contiguous, not {list(bias.shape)}")


def _check_residual(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """An empty tensor for the sum."""
    if residual.shape != (x.shape[0], weight.shape[0]) or residual.stride(1) != 1:
        raise ValueError(f"residual must be {[x.shape[0], weight.shape[0]]} with contiguous rows, not "
                         f"{list(residual.shape)} of strides {residual.stride()}")  # fmt: skip
    return torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
