"""Expert choice: which experts a token goes to, and with which weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from xkernels.ops._details import topk as _k
from xkernels.ops._details.common import cdiv, next_power_of_2

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
_FEW_ROWS = 16  # up to here reading a router once per row costs less than copying rows and starting three kernels
EPS = 1e-20  # keeps renormalisation finite when all chosen weights vanish


@dataclass(frozen=True)
class Router:
    """How logits become choices and weights.

    `scoring` maps logits to scores in float32. A correction bias (given per call) is added for the choice only; the
    weights are the unbiased scores. `renormalize` divides by the sum of the chosen weights. With `groups`, experts
    are chosen from the best `top_groups` groups: a group's score is the largest of its scores, or with a correction
    bias the sum of its two largest. `scale` (routed scaling factor) multiplies the weights. `shared_slots` appends
    fused shared experts after the routed ones: ids num_experts, num_experts + 1, ...; weight 1 / shared_scale, not
    part of the renormalisation and not multiplied by `scale`.
    """

    topk: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    scale: float | None = None
    groups: int = 1
    top_groups: int = 1
    shared_slots: int = 0
    shared_scale: float = 1.0

    def __post_init__(self) -> None:
        counts = (self.topk, self.groups, self.top_groups, self.shared_slots)
        if any(isinstance(n, bool) or not isinstance(n, int) for n in counts):
            raise ValueError(f"topk, groups, top_groups and shared_slots must be whole numbers: {self}")
        if self.topk < 1 or self.groups < 1 or not 1 <= self.top_groups <= self.groups or self.shared_slots < 0:
            raise ValueError(f"topk and groups must be positive and top_groups at most groups: {self}")
        if self.scoring not in ("softmax", "sigmoid", "sqrtsoftplus"):
            raise ValueError(f"scoring must be softmax, sigmoid or sqrtsoftplus, not {self.scoring!r}")
        if not math.isfinite(self.factor):
            raise ValueError(f"scale must be a finite number or None, not {self.scale}")
        if not (math.isfinite(self.shared_scale) and self.shared_scale > 0):
            raise ValueError(f"shared_scale must be a positive number, not {self.shared_scale}")

    @property
    def factor(self) -> float:
        """What the routed weights are multiplied by: `scale`, and 1 without one."""
        return 1.0 if self.scale is None else float(self.scale)


def topk(logits: torch.Tensor, router: Router, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts for each token.

    logits: [tokens, E], any float dtype, any strides; bias: float32 [E] or None. Returns weights float32 and ids
    int32, both [tokens, topk + shared_slots], best first (by the score used for the choice); ties go to the lower id.
    Raises ValueError when E is smaller than topk or does not divide into groups.
    """
    check_router(logits, router, bias)
    tokens, experts = logits.shape
    width = router.topk + router.shared_slots
    weights = torch.empty(tokens, width, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, width, dtype=torch.int32, device=logits.device)
    if tokens == 0:
        return weights, ids
    columns = next_power_of_2(experts)
    rows = max(1, min(32, 2048 // columns))
    bias = None if bias is None else bias.contiguous()
    _k.choose[(cdiv(tokens, rows),)](
        logits, bias, weights, ids, tokens, logits.stride(0), logits.stride(1), router.factor,
        1.0 / router.shared_scale, EXPERTS=experts, COLUMNS=columns, ROWS=rows, TOPK=router.topk,
        SLOTS=next_power_of_2(router.topk), WIDTH=width, SCORING=router.scoring, RENORM=router.renormalize,
        HAS_BIAS=bias is not None, GROUPS=router.groups, TOP_GROUPS=router.top_groups, EPS=EPS, num_warps=4,
    )  # fmt: skip
    return weights, ids


def topk_reference(
    logits: torch.Tensor, router: Router, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `topk` in plain torch."""
    check_router(logits, router, bias)
    scores = _score(logits.float(), router.scoring)
    choice = scores if bias is None else scores + bias.float()
    if router.groups > 1:
        choice = _mask_groups(choice, router, biased=bias is not None)
    # A stable descending sort gives ties to the lower id, as the kernel does.
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, : router.topk]
    weights = scores.gather(1, ids)
    if router.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + EPS)
    weights = weights * router.factor
    if router.shared_slots:
        tokens, experts = logits.shape
        shared = torch.arange(experts, experts + router.shared_slots, device=ids.device).expand(tokens, -1)
        ids = torch.cat([ids, shared], 1)
        weights = torch.cat([weights, torch.full_like(shared, 1.0 / router.shared_scale, dtype=torch.float32)], 1)
    return weights, ids.int()


def grouped_topk(
    logits: torch.Tensor, router: Router, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk` for a router with groups; raises ValueError when the router has none."""
    if router.groups < 2:
        raise ValueError("grouped_topk needs a router with groups > 1")
    return topk(logits, router, bias)


def grouped_topk_reference(
    logits: torch.Tensor, router: Router, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `grouped_topk` in plain torch."""
    if router.groups < 2:
        raise ValueError("grouped_topk needs a router with groups > 1")
    return topk_reference(logits, router, bias)


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Router logits in float32: x [T, H] of any float dtype, weight float32 [E, H] -> [T, E].

    A few rows are read as they are, in one kernel; many go to a matrix product of their float32 copy. Raises ValueError
    when shapes do not fit or rows are not contiguous.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or weight.dtype != torch.float32:
        raise ValueError(f"x [T, H] and weight float32 [E, H] are wanted, not {list(x.shape)} and {list(weight.shape)}")
    tokens, width = x.shape
    if not 0 < tokens <= _FEW_ROWS:
        return router_logits_reference(x, weight)
    if x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError("rows of x and weight must be contiguous")
    experts = weight.shape[0]
    out = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    _k.router_dot[(tokens, cdiv(experts, 4))](
        x, weight, out, width, x.stride(0), weight.stride(0), EXPERTS=experts, ROWS=4, BLOCK=512, num_warps=4
    )
    return out


def router_logits_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The twin of `router_logits` in plain torch."""
    return torch.nn.functional.linear(x.float(), weight)


def _score(logits: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    if scoring == "softmax":
        return torch.softmax(logits, -1)
    if scoring == "sigmoid":
        return torch.sigmoid(logits)
    return torch.sqrt(torch.nn.functional.softplus(logits))


def _mask_groups(choice: torch.Tensor, router: Router, *, biased: bool) -> torch.Tensor:
    grouped = choice.unflatten(1, (router.groups, -1))
    best = grouped.topk(min(2, grouped.shape[2]), -1).values.sum(-1) if biased else grouped.amax(-1)
    kept = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, : router.top_groups]
    mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
    return grouped.masked_fill(~mask[:, :, None], float("-inf")).flatten(1)


def check_router(logits: torch.Tensor, router: Router, bias: torch.Tensor | None) -> None:
    """Raise ValueError where logits [tokens, E] do not fit the router."""
    if logits.ndim != 2:
        raise ValueError(f"logits must be [tokens, experts], not {list(logits.shape)}")
    experts = logits.shape[1]
    if experts % router.groups:
        raise ValueError(f"{experts} experts do not divide into {router.groups} groups")
    if router.topk > experts // router.groups * router.top_groups:
        raise ValueError(f"topk {router.topk} exceeds the experts that can be chosen: {experts} in {router}")
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"bias must be [{experts}], not {list(bias.shape)}")
