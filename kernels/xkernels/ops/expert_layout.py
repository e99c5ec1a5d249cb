"""Which rank holds which experts, and how rows travel between ranks: built once per layer, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist

from xkernels.ops._details.common import cdiv

Mode = Literal["fast", "deterministic"]
FP8_GROUP = 128


class EpUnsupported(ValueError):
    """A combination that cannot work; raised when the layout is built, never while tokens are on their way."""


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
    `parts`: how many dispatches a layer's tokens are split into, the same on every rank.
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
    parts: int = 1

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
    parts: int = 1,
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
    if wire.dtype == torch.float8_e4m3fn and hidden % FP8_GROUP:
        raise EpUnsupported(f"FP8 rows need a hidden size divisible by {FP8_GROUP}, not {hidden}")
    if not 0 < topk <= num_experts:
        raise EpUnsupported(f"topk {topk} does not fit {num_experts} experts")
    if capacity is not None and capacity < 1:
        raise EpUnsupported(f"capacity must be at least 1 row, not {capacity}")
    if parts < 1:
        raise EpUnsupported(f"a layer's tokens travel in at least 1 part, not {parts}")
    experts = torch.arange(num_experts, dtype=torch.int32, device=device)
    owner = experts // cdiv(num_experts, world)
    local = torch.where(owner == rank, experts - rank * cdiv(num_experts, world), -1)
    return EpLayout(group, rank, world, num_experts, hidden, topk, mode, backend, wire, activations, capacity,
                    local.int(), owner.int(), trace, parts)  # fmt: skip
