"""Arguments that are not as a kernel reads them: taken for what they are, or refused with their name."""

from __future__ import annotations

import pytest
import torch

from xkernels.device import live
from xkernels.ops.fused_experts import fused_experts, prepare_experts

DEVICE = live().torch_device()
TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 2}


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
@pytest.mark.parametrize("mapped", [False, True])
def test_an_id_that_no_expert_has_adds_nothing(backend: str, mapped: bool) -> None:
    experts = prepare_experts(rand(4, 48, 32, seed=1) / 8, rand(4, 32, 24, seed=2) / 8)
    x, weights = rand(5, 32), rand(5, 2, seed=3).abs()
    ids = torch.tensor([[0, 9], [1, -5], [9, -(1 << 31)], [3, 1 << 20], [2, 1]], device=DEVICE)
    none = torch.where((ids < 0) | (ids > 3), -1, ids)
    here = torch.tensor([2, 0, 1, 3], dtype=torch.int32, device=DEVICE) if mapped else None
    got = fused_experts(x, experts, weights, ids, backend=backend, up=TILE, down=TILE, expert_map=here)
    want = fused_experts(x, experts, weights, none, backend="reference", expert_map=here)
    assert (got[2] == 0).all()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
