"""Expert parallelism: send each token to the ranks that hold its experts, and bring the results home.

The exchange is an all-to-all of rows whose counts are exchanged first, so that every rank knows every size before a
row moves. Two modes:

- `fast`: a token goes once to each rank that holds any of its experts, and that rank adds its experts' outputs up
  before sending one row back. Fewest bytes; the order of the additions depends on where the experts live.
- `deterministic`: a token goes once per chosen expert, the unweighted outputs come back, and the token's own rank adds
  them in slot order. With a kernel whose rows do not depend on their neighbours the same token gives the same bits
  whatever the batch and whatever the rank.

With `parts` 2 or more a rank's tokens travel in as many parts, and the rows of one part are under way while the experts
work on the part before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from xkernels import device as devices
from xkernels.ops._details import expert_parallel as _k
from xkernels.ops._details.common import cdiv, next_power_of_2
from xkernels.ops._details.grid import GRIDS, GridUse, synchronising_grid
from xkernels.ops.expert_layout import FP8_GROUP, EpLayout, EpUnsupported, Message, Mode, Wire, ep_layout
from xkernels.ops.fused_experts import PreparedExperts, fused_experts

__all__ = [
    "Configs",
    "Dispatched",
    "EpCapacityExceeded",
    "EpLayout",
    "EpPeerLost",
    "EpUnsupported",
    "Message",
    "Mode",
    "Wire",
    "ep_combine",
    "ep_dispatch",
    "ep_fused_experts",
    "ep_layout",
    "grids",
]

Configs = Callable[[int], tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]]
_CHUNK = 256
_FP8_MAX = 448.0


class EpCapacityExceeded(RuntimeError):
    """Some rank would receive more rows than the capacity; raised on every rank alike, before any row moves."""


class EpPeerLost(RuntimeError):
    """Another rank is gone or did not answer within the group's timeout."""


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

    x [M, H] of `layout.activations`; topk_weights float32 [M, k]; topk_ids int32 [M, k] over all experts, -1 (or any
    id that no expert has) for none. None of them is changed. Raises ValueError (before anything is sent) for tensors
    that do not fit, and EpCapacityExceeded or EpPeerLost on every rank alike.
    """
    return _depart(x, topk_weights, topk_ids, layout).arrive()


def _depart(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layout: EpLayout) -> _OnTheWay:
    """Exchange counts and set a dispatch's rows moving."""
    _check(x, topk_weights, topk_ids, layout)
    dest, per_token = _destinations(topk_ids, layout)
    place, counts = _route(dest, layout)
    matrix = _exchange_counts(counts, layout)
    sent, received = tuple(matrix[layout.rank]), tuple(row[layout.rank] for row in matrix)
    rows = _permute(x, place, per_token, sum(sent))
    ids, weights = _labels(topk_ids, topk_weights, place, sum(sent), layout)
    moving = _send_rows(rows, sent, received, layout)
    moving["ids"] = _travel("expert ids", ids, sent, received, layout)
    moving["weights"] = _travel("router weights", weights, sent, received, layout)
    return _OnTheWay(layout, moving, place.view(x.shape[0], per_token), topk_weights.contiguous(), sent, received)


@dataclass(frozen=True, eq=False)
class _OnTheWay:
    """A dispatch whose rows are moving; `arrive` waits for them."""

    layout: EpLayout
    moving: dict[str, _Moving]
    place: torch.Tensor
    token_weights: torch.Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]

    def arrive(self) -> Dispatched:
        """Wait for every tensor, and name this rank's experts by their local index."""
        came = {name: one.wait() for name, one in self.moving.items()}
        rows = _received_rows(came, self.layout)
        local = _of_expert(self.layout.expert_map, came["ids"]).int()
        return Dispatched(rows, local, came["weights"], self.place, self.token_weights, self.sent, self.received)


def ep_combine(
    y: torch.Tensor, dispatched: Dispatched, layout: EpLayout, *, routed_scaling_factor: float | None = None
) -> torch.Tensor:
    """Bring the experts' outputs home and add them up. Collective.

    y [R, H], one row for each row of `dispatched.x`. Returns [M, H]: in fast mode the sum over ranks in rank order, in
    deterministic mode the weighted sum in slot order; float32 additions, rounded once.
    """
    return _unpermute(_return(y, dispatched, layout).wait(), dispatched, layout, routed_scaling_factor)


def _return(y: torch.Tensor, dispatched: Dispatched, layout: EpLayout) -> _Moving:
    """Set the experts' outputs moving towards the ranks that their tokens came from."""
    if y.shape != dispatched.x.shape:
        raise ValueError(f"y must be {list(dispatched.x.shape)}, not {list(y.shape)}")
    return _travel("outputs", y.contiguous(), dispatched.received, dispatched.sent, layout)


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
    cut = [tensor.tensor_split(layout.parts) for tensor in (x, topk_weights, topk_ids)]
    under_way = [_depart(a, w, i, layout) for a, w, i in zip(*cut, strict=True)]
    going_home = []
    for part in under_way:
        sent = part.arrive()
        going_home.append((sent, _return(_local(sent, experts, layout, configs), sent, layout)))
    outs = [_unpermute(moving.wait(), sent, layout, routed_scaling_factor) for sent, moving in going_home]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _local(sent: Dispatched, experts: PreparedExperts, layout: EpLayout, configs: Configs) -> torch.Tensor:
    """This rank's experts on the rows that arrived."""
    fixed = layout.mode == "deterministic"
    up, down = configs(1 if fixed else sent.x.shape[0])
    if not sent.x.shape[0]:
        return sent.x
    weights = torch.ones_like(sent.weights) if fixed else sent.weights
    return fused_experts(sent.x, experts, weights, sent.ids, backend=layout.backend, up=up, down=down)


def _check(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layout: EpLayout) -> None:
    if x.ndim != 2 or x.shape[1] != layout.hidden or x.dtype != layout.activations:
        raise ValueError(f"x must be [tokens, {layout.hidden}] {layout.activations}, not {list(x.shape)} {x.dtype}")
    if ids.shape != (x.shape[0], layout.topk) or ids.shape != weights.shape:
        raise ValueError(f"topk_ids and topk_weights must be [{x.shape[0]}, {layout.topk}], not {list(ids.shape)} "
                         f"and {list(weights.shape)}")  # fmt: skip


def _of_expert(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The table's entry for each id, -1 for an id that no expert has."""
    known = ids.clamp(0, table.shape[0] - 1)
    return torch.where(ids == known, table[known.long()], -1)


def _destinations(ids: torch.Tensor, layout: EpLayout) -> tuple[torch.Tensor, int]:
    """Rank that each entry goes to (int32, flat), -1 for none, and the number of entries of a token."""
    ranks = _of_expert(layout.owner, ids)
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


def _send_rows(
    rows: torch.Tensor, sent: tuple[int, ...], received: tuple[int, ...], layout: EpLayout
) -> dict[str, _Moving]:
    """Set rows moving in the wire's dtype."""
    if layout.wire.dtype != torch.float8_e4m3fn:
        return {"tokens": _travel("tokens", rows, sent, received, layout)}
    grouped = rows.float().unflatten(1, (layout.hidden // FP8_GROUP, FP8_GROUP))
    scale = grouped.abs().amax(-1).clamp_min(1e-10) / _FP8_MAX
    codes = (grouped / scale[:, :, None]).to(torch.float8_e4m3fn).flatten(1)
    return {"tokens": _travel("tokens", codes, sent, received, layout),
            "scales": _travel("scales", scale, sent, received, layout)}  # fmt: skip


def _received_rows(came: dict[str, torch.Tensor], layout: EpLayout) -> torch.Tensor:
    """Rows that came, in the activations' dtype."""
    if "scales" not in came:
        return came["tokens"]
    groups = came["tokens"].float().unflatten(1, (layout.hidden // FP8_GROUP, FP8_GROUP))
    return (groups * came["scales"][:, :, None]).flatten(1).to(layout.activations)


@dataclass(frozen=True, eq=False)
class _Moving:
    """An all-to-all that has begun. `source` is kept alive until it is over."""

    step: str
    rank: int
    source: torch.Tensor
    out: torch.Tensor
    work: Any

    def wait(self) -> torch.Tensor:
        """The rows that came; EpPeerLost where a rank is gone or too slow."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise EpPeerLost(f"rank {self.rank}: exchange of {self.step} failed: {error}") from error
        return self.out


def _travel(
    step: str, rows: torch.Tensor, sent: tuple[int, ...], received: tuple[int, ...], layout: EpLayout
) -> _Moving:
    """Begin one all-to-all of rows [sum(sent), C] -> [sum(received), C]."""
    out = torch.empty(sum(received), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    row_bytes = rows.element_size() * math.prod(rows.shape[1:])
    _note(step, rows.dtype, sent, received, row_bytes, layout)
    # Bytes, because not every transport knows every dtype.
    source, target = (tensor.reshape(-1).view(torch.uint8) for tensor in (rows, out))
    splits = ([n * row_bytes for n in received], [n * row_bytes for n in sent])
    try:
        work = dist.all_to_all_single(target, source, *splits, group=layout.group, async_op=True)
    except RuntimeError as error:
        raise EpPeerLost(f"rank {layout.rank}: exchange of {step} failed: {error}") from error
    return _Moving(step, layout.rank, source, out, work)


def _note(
    step: str, dtype: torch.dtype, sent: tuple[int, ...], received: tuple[int, ...], row_bytes: int, layout: EpLayout
) -> None:
    if layout.trace is not None:
        layout.trace.append(Message(step, str(dtype).removeprefix("torch."), sent, received, row_bytes))
