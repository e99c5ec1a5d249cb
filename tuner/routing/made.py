"""Made-up routings: which experts a batch's tokens choose."""

from __future__ import annotations

import torch

from moegate.errors import UsageError
from tuner.problem import Problem
from tuner.routing.source import KINDS

__all__ = ["make_routes"]


def make_routes(
    problem: Problem, size: int, count: int, *, device: torch.device, seed: int, kind: str = "uniform"
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`count` routings of `size` tokens: weights float32 [size, topk] that sum to one, ids int32 [size, topk].

    The last `shared` slots go to the last `shared` experts with weight 1, as engines that fuse shared experts do. With
    `ep` ranks the choice is among all their experts, this rank holds the first, and the others' are -1.
    Raises UsageError for an unknown kind.
    """
    if kind not in KINDS:
        raise UsageError(
            f"unknown routing {kind!r}", field="--routing", fix=f"{', '.join(KINDS)} or a folder of recordings"
        )
    generator = torch.Generator("cpu").manual_seed(seed * 1_000_003 + size)
    routed, own = problem.routed, problem.topk - problem.shared
    everywhere = routed * problem.ep
    out = []
    for _ in range(count):
        popularity = torch.randn(1, everywhere, generator=generator) * KINDS[kind]
        logits = torch.randn(size, everywhere, generator=generator) + popularity
        weights, ids = torch.topk(torch.softmax(logits, -1), own, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        ids = torch.where(ids < routed, ids, -1)
        if problem.shared:
            extra = torch.arange(routed, problem.E).expand(size, problem.shared)
            weights = torch.cat([weights, torch.ones(size, problem.shared)], -1)
            ids = torch.cat([ids, extra], -1)
        out.append((weights.float().contiguous().to(device), ids.int().contiguous().to(device)))
    return out
