"""Expert parallelism: send each token to the ranks that hold its experts, and bring the results home.

The exchange is an all-to-all of rows whose counts are exchanged first, so that every rank knows every size before a
row moves. Two modes:

- `fast`: a token goes once to each rank that holds any of its experts, and that rank adds its experts' outputs up
  before sending one row back. Fewest bytes; the order of the additions depends on where the experts live.
- `deterministic`: a token goes once per chosen expert, the unweighted outputs come back, and the token's own rank adds
  them in slot order. With a kernel whose rows do not depend on their neighbours the same token gives the same bits
  whatever the batch and whatever the rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from xkernels import device as devices
from xkernels.ops._details import expert_parallel as _k
from xkernels.ops._details.common import cdiv, next_power_of_2
from xkernels.ops._details.grid import GRIDS, GridUse, synchronising_grid
from xkernels.ops.fused_experts import PreparedExperts, fused_experts

Configs = Callable[[int], tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]]
Mode = Literal["fast", "deterministic"]
_CHUNK = 256
_FP8_GROUP = 128
_FP8_MAX = 448.0


class EpUnsupported(ValueError):
    """A combination that cannot work; raised when the layout is built, never while tokens are on their way."""


class EpCapacityExceeded(RuntimeError):
    """Some rank would receive more rows than the capacity; raised on every rank alike, before any row moves."""


class EpPeerLost(RuntimeError):
    """Another rank is gone or did not answer within the group's timeout."""


@dataclass(frozen=True)
class Wire:
    """What a token's row looks like while it travels. It follows the checkpoint and is not a free choice.

    `bfloat16`, `float16`, `float32`: the activations as they are. `float8_e4m3fn`: one scale per 128 columns.
    """

    dtype: torch.dtype

    @classmethod
    def of_checkpoint(cls, quant: str | None, activations: torch.dtype) -> Wire:
        """FP8 experts read FP8 activations anyway, so their rows travel as FP8; every other row travels unchanged."""
        return cls(torch.float8_e4m3fn if quant == "fp8_w8a8" else activations)


@dataclass(frozen=True)
class Message:
    """One collective as this rank took part in it: for wire traces."""

    step: str
    dtype: str
    sent: tuple[int, ...]
    received: tuple[int, ...]
    row_bytes: int


@dataclass(frozen=True, eq=False)
class EpLayout:
    """Which experts live where, and how rows travel. Built once per layer; every check is made here.

    `expert_map` int32 [num_experts]: index among this rank's experts, -1 for a remote one. `owner` int32
    [num_experts]: the rank that holds it. `capacity`: most rows one rank may receive in one dispatch (None: any).
    """

    group: dist.ProcessGroup
    rank: int
    world: int
    num_experts: int
    hidden: int
    topk: int
    mode: Mode
    backend: str
    wire: Wire
    activations: torch.dtype
    capacity: int | None
    expert_map: torch.Tensor
    owner: torch.Tensor
    trace: list[Message] | None = field(default=None)

    @property
    def local_experts(self) -> slice:
        """This rank's experts among all."""
        per = cdiv(self.num_experts, self.world)
        return slice(min(self.rank * per, self.num_experts), min((self.rank + 1) * per, self.num_experts))


def ep_layout(
    group: dist.ProcessGroup,
    *,
    num_experts: int,
    hidden: int,
    topk: int,
    mode: Mode,
    backend: str,
    activations: torch.dtype = torch.bfloat16,
    quant: str | None = None,
    capacity: int | None = None,
    device: torch.device | None = None,
    trace: list[Message] | None = None,
) -> EpLayout:
    """Give each rank of `group` a contiguous range of experts (the last ranks may hold fewer, or none).

    Raises EpUnsupported for what cannot work: deterministic mode with a backend whose rows depend on the batch, a
    hidden size that FP8's groups do not divide, more chosen experts than there are, a capacity below 1.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    wire = Wire.of_checkpoint(quant, activations)
    if mode not in ("fast", "deterministic"):
        raise EpUnsupported(f"mode must be fast or deterministic, not {mode!r}")
    if mode == "deterministic" and backend != "triton":
        raise EpUnsupported(f"deterministic mode needs backend triton: {backend} chooses its kernel by the batch size")
    if wire.dtype == torch.float8_e4m3fn and hidden % _FP8_GROUP:
        raise EpUnsupported(f"FP8 rows need a hidden size divisible by {_FP8_GROUP}, not {hidden}")
    if not 0 < topk <= num_experts:
        raise EpUnsupported(f"topk {topk} does not fit {num_experts} experts")
    if capacity is not None and capacity < 1:
        raise EpUnsupported(f"capacity must be at least 1 row, not {capacity}")
    experts = torch.arange(num_experts, dtype=torch.int32, device=device)
    owner = experts // cdiv(num_experts, world)
    local = torch.where(owner == rank, experts - rank * cdiv(num_experts, world), -1)
    return EpLayout(group, rank, world, num_experts, hidden, topk, mode, backend, wire, activations, capacity,
                    local.int(), owner.int(), trace)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Dispatched:
    """Rows that this rank's experts have to work on, and what is needed to bring the results home.

    `x` [R, H]; `ids` int32 [R, k or 1]: local expert ids, -1 for experts of other ranks; `weights` float32 like ids.
    `place` int32 [M, entries]: row of the send buffer for each entry of each token (-1: not sent).
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    place: torch.Tensor
    token_weights: torch.Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]


def ep_dispatch(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layout: EpLayout) -> Dispatched:
    """Send tokens to the ranks of their experts. Collective: every rank of the group calls it, also with 0 tokens.

    x [M, H] of `layout.activations`; topk_weights float32 [M, k]; topk_ids int32 [M, k] over all experts, -1 for none.
    None of them is changed. Raises ValueError (before anything is sent) for tensors that do not fit, and
    EpCapacityExceeded or EpPeerLost on every rank alike.
    """
    _check(x, topk_weights, topk_ids, layout)
    dest, per_token = _destinations(topk_ids, layout)
    place, counts = _route(dest, layout)
    matrix = _exchange_counts(counts, layout)
    sent, received = tuple(matrix[layout.rank]), tuple(row[layout.rank] for row in matrix)
    rows = _permute(x, place, per_token, sum(sent))
    ids, weights = _labels(topk_ids, topk_weights, place, sum(sent), layout)
    rows = _travel_rows(rows, sent, received, layout)
    ids = _travel("expert ids", ids, sent, received, layout)
    weights = _travel("router weights", weights, sent, received, layout)
    local = torch.where(ids >= 0, layout.expert_map[ids.clamp_min(0).long()], -1).int()
    return Dispatched(rows, local, weights, place.view(x.shape[0], per_token), topk_weights, sent, received)


def ep_combine(
    y: torch.Tensor, dispatched: Dispatched, layout: EpLayout, *, routed_scaling_factor: float | None = None
) -> torch.Tensor:
    """Bring the experts' outputs home and add them up. Collective.

    y [R, H], one row for each row of `dispatched.x`. Returns [M, H]: in fast mode the sum over ranks in rank order, in
    deterministic mode the weighted sum in slot order; float32 additions, rounded once.
    """
    if y.shape != dispatched.x.shape:
        raise ValueError(f"y must be {list(dispatched.x.shape)}, not {list(y.shape)}")
    home = _travel("outputs", y.contiguous(), dispatched.received, dispatched.sent, layout)
    return _unpermute(home, dispatched, layout, routed_scaling_factor)


def grids() -> list[GridUse]:
    """The grids that this process's synchronising kernels were started with, for server info and report."""
    return list(GRIDS.values())


def ep_fused_experts(
    x: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    layout: EpLayout,
    *,
    configs: Configs,
    routed_scaling_factor: float | None = None,
) -> torch.Tensor:
    """A mixture-of-experts layer over the ranks of a group: dispatch, this rank's experts, combine.

    `experts` holds this rank's experts only (`layout.local_experts`). `configs` gives the configs of the up and down
    projection for the number of rows that this rank received. In deterministic mode it is asked for one row whatever
    arrived: the tile shape is part of the result's bits.
    """
    sent = ep_dispatch(x, topk_weights, topk_ids, layout)
    up, down = configs(1 if layout.mode == "deterministic" else sent.x.shape[0])
    ones = torch.ones_like(sent.weights) if layout.mode == "deterministic" else sent.weights
    y = fused_experts(sent.x, experts, ones, sent.ids, backend=layout.backend, up=up, down=down) \
        if sent.x.shape[0] else sent.x  # fmt: skip
    return ep_combine(y, sent, layout, routed_scaling_factor=routed_scaling_factor)


def _check(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layout: EpLayout) -> None:
    if x.ndim != 2 or x.shape[1] != layout.hidden or x.dtype != layout.activations:
        raise ValueError(f"x must be [tokens, {layout.hidden}] {layout.activations}, not {list(x.shape)} {x.dtype}")
    if ids.shape != (x.shape[0], layout.topk) or ids.shape != weights.shape:
        raise ValueError(f"topk_ids and topk_weights must be [{x.shape[0]}, {layout.topk}], not {list(ids.shape)} "
                         f"and {list(weights.shape)}")  # fmt: skip


def _destinations(ids: torch.Tensor, layout: EpLayout) -> tuple[torch.Tensor, int]:
    """Rank that each entry goes to (int32, flat), -1 for none, and the number of entries of a token."""
    ranks = torch.where(ids >= 0, layout.owner[ids.clamp_min(0).long()], -1)
    if layout.mode == "deterministic":
        return ranks.reshape(-1).int().contiguous(), layout.topk
    every = torch.arange(layout.world, dtype=torch.int32, device=ids.device)
    wanted = (ranks[:, :, None] == every).any(1)
    return torch.where(wanted, every, -1).reshape(-1).int().contiguous(), layout.world


def _route(dest: torch.Tensor, layout: EpLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Place of each entry in the send buffer, and entries per rank (both int32)."""
    place = torch.empty_like(dest)
    ranks = next_power_of_2(layout.world)
    counts = torch.zeros(ranks, dtype=torch.int32, device=dest.device)
    numel = dest.numel()
    if numel:
        programs = synchronising_grid(cdiv(numel, _CHUNK), "ep_route", layout.wire.dtype, devices.of(dest))
        per_program = cdiv(cdiv(numel, programs), _CHUNK) * _CHUNK
        table = torch.empty(programs, ranks, dtype=torch.int32, device=dest.device)
        arrived = torch.zeros(1, dtype=torch.int32, device=dest.device)
        _k.route[(programs,)](dest, place, counts, table, arrived, numel, per_program, PROGRAMS=programs, RANKS=ranks,
                              CHUNK=_CHUNK, num_warps=4)  # fmt: skip
    return place, counts[: layout.world]


def _permute(x: torch.Tensor, place: torch.Tensor, per_token: int, rows: int) -> torch.Tensor:
    """Rows in the order of the send buffer: [rows, H]."""
    x = x.contiguous()
    out = torch.empty(rows, x.shape[1], dtype=x.dtype, device=x.device)
    if rows:
        block = min(2048, next_power_of_2(x.shape[1]))
        per_program = max(1, 4096 // block)
        _k.permute[(cdiv(place.numel(), per_program), cdiv(x.shape[1], block))](
            x, out, place, place.numel(), x.shape[1], x.stride(0), out.stride(0), PER_TOKEN=per_token,
            ROWS=per_program, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def _unpermute(home: torch.Tensor, sent: Dispatched, layout: EpLayout, scale: float | None) -> torch.Tensor:
    """Each token's rows of `home`, added up in order: [M, H]."""
    tokens, entries = sent.place.shape
    out = torch.empty(tokens, layout.hidden, dtype=layout.activations, device=home.device)
    if tokens:
        # One program per row up to 2048 columns: at 64 MiB all of them are resident at once, and none waits for a slot.
        block = min(2048, next_power_of_2(layout.hidden))
        _k.unpermute[(tokens, cdiv(layout.hidden, block))](
            home, out, sent.place, sent.token_weights, layout.hidden, layout.hidden, out.stride(0),
            1.0 if scale is None else float(scale), ENTRIES=entries, WEIGHTED=layout.mode == "deterministic",
            BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def _labels(
    ids: torch.Tensor, weights: torch.Tensor, place: torch.Tensor, rows: int, layout: EpLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids and router weights of each row of the send buffer: [rows, k], or [rows, 1] in deterministic mode."""
    kept = place >= 0
    at = place[kept].long()
    if layout.mode == "deterministic":
        source = (ids.reshape(-1, 1)[kept], weights.reshape(-1, 1)[kept])
    else:
        token = torch.arange(place.numel(), device=place.device)[kept] // layout.world
        source = (ids[token], weights[token])
    out = (torch.empty(rows, source[0].shape[1], dtype=torch.int32, device=ids.device),
           torch.empty(rows, source[1].shape[1], dtype=torch.float32, device=ids.device))  # fmt: skip
    for target, value in zip(out, source, strict=True):
        target[at] = value.to(target.dtype)
    return out


def _exchange_counts(counts: torch.Tensor, layout: EpLayout) -> list[list[int]]:
    """Rows that each rank sends to each rank. Every rank sees the whole matrix, so all refuse alike."""
    rows = [torch.empty_like(counts) for _ in range(layout.world)]
    try:
        dist.all_gather(rows, counts.contiguous(), group=layout.group)
    except RuntimeError as error:
        raise EpPeerLost(f"rank {layout.rank}: exchange of counts failed: {error}") from error
    _note("counts", counts.dtype, (1,) * layout.world, (1,) * layout.world, counts.numel() * 4, layout)
    matrix = [[int(n) for n in row] for row in torch.stack(rows).tolist()]
    if layout.capacity is not None:
        for rank in range(layout.world):
            wanted = sum(row[rank] for row in matrix)
            if wanted > layout.capacity:
                raise EpCapacityExceeded(f"rank {rank} would receive {wanted} rows; its capacity is {layout.capacity}")
    return matrix


def _travel_rows(
    rows: torch.Tensor, sent: tuple[int, ...], received: tuple[int, ...], layout: EpLayout
) -> torch.Tensor:
    """Rows over the wire in the wire's dtype, and back in the activations' dtype."""
    if layout.wire.dtype != torch.float8_e4m3fn:
        return _travel("tokens", rows, sent, received, layout)
    groups = layout.hidden // _FP8_GROUP
    grouped = rows.float().unflatten(1, (groups, _FP8_GROUP))
    scale = grouped.abs().amax(-1).clamp_min(1e-10) / _FP8_MAX
    codes = (grouped / scale[:, :, None]).to(torch.float8_e4m3fn).flatten(1)
    codes = _travel("tokens", codes, sent, received, layout)
    scale = _travel("scales", scale, sent, received, layout)
    back = codes.float().unflatten(1, (groups, _FP8_GROUP)) * scale[:, :, None]
    return back.flatten(1).to(layout.activations)


def _travel(
    step: str, rows: torch.Tensor, sent: tuple[int, ...], received: tuple[int, ...], layout: EpLayout
) -> torch.Tensor:
    """One all-to-all of rows [sum(sent), C] -> [sum(received), C]."""
    out = torch.empty(sum(received), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    row_bytes = rows.element_size() * math.prod(rows.shape[1:])
    _note(step, rows.dtype, sent, received, row_bytes, layout)
    # Bytes, because not every transport knows every dtype.
    source, target = (tensor.reshape(-1).view(torch.uint8) for tensor in (rows, out))
    try:
        dist.all_to_all_single(
            target, source, [n * row_bytes for n in received], [n * row_bytes for n in sent], group=layout.group
        )
    except RuntimeError as error:
        raise EpPeerLost(f"rank {layout.rank}: exchange of {step} failed: {error}") from error
    return out


def _note(
    step: str, dtype: torch.dtype, sent: tuple[int, ...], received: tuple[int, ...], row_bytes: int, layout: EpLayout
) -> None:
    if layout.trace is not None:
        layout.trace.append(Message(step, str(dtype).removeprefix("torch."), sent, received, row_bytes))
