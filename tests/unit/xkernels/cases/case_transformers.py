"""Whole mixture-of-experts layers against transformers' own, on tiny random models."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from xkernels.device import live
from xkernels.ops.activation import SILU, Activation, silu_and_mul
from xkernels.ops.fused_experts import fused_experts, prepare_experts
from xkernels.ops.topk import Router, topk

DEVICE = live().torch_device()
TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1}
SIZES = {"hidden_size": 32, "num_experts_per_tok": 3, "hidden_act": "silu"}


@pytest.fixture(autouse=True)
def transformers() -> Any:
    """The package; a GPU host's own one may be too old (test_interpreted allows no such skip)."""
    return pytest.importorskip("transformers", minversion="5", reason="its layers are compared as 5 has them")


def layer(family: str, block: str, config: str, **sizes: Any) -> Any:
    """A layer of transformers with random weights."""
    folder = f"transformers.models.{family}"
    made = getattr(importlib.import_module(f"{folder}.configuration_{family}"), config)(**SIZES, **sizes)
    made._experts_implementation = "eager"
    torch.manual_seed(0)
    module = getattr(importlib.import_module(f"{folder}.modeling_{family}"), block)(made)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / 4)
    return module.float().eval().to(DEVICE)


def ours(x: torch.Tensor, experts: Any, logits: torch.Tensor, router: Router, backend: str, bias: Any = None) -> Any:
    weights, ids = topk(logits, router, bias)
    return fused_experts(x, experts, weights, ids, backend=backend, up=TILE, down=TILE)


def tokens() -> torch.Tensor:
    return torch.randn(1, 11, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@torch.no_grad()
def test_mixtral(backend: str) -> None:
    block = layer("mixtral", "MixtralSparseMoeBlock", "MixtralConfig", num_local_experts=6, intermediate_size=24)
    x = tokens()
    p = prepare_experts(block.experts.gate_up_proj, block.experts.down_proj)
    got = ours(x[0], p, x[0] @ block.gate.weight.T, Router(3), backend)
    torch.testing.assert_close(got, block(x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [True, False])
@torch.no_grad()
def test_qwen3_moe(norm: bool) -> None:
    block = layer("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", num_experts=8, moe_intermediate_size=24,
                  norm_topk_prob=norm)  # fmt: skip
    x = tokens()
    p = prepare_experts(block.experts.gate_up_proj, block.experts.down_proj)
    got = ours(x[0], p, x[0] @ block.gate.weight.T, Router(3, renormalize=norm), "triton")
    torch.testing.assert_close(got, block(x)[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_deepseek_v3() -> None:
    block = layer("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config", n_routed_experts=8, num_local_experts=8,
                  n_shared_experts=2, moe_intermediate_size=24, n_group=4, topk_group=2, routed_scaling_factor=2.5,
                  norm_topk_prob=True)  # fmt: skip
    block.gate.e_score_correction_bias.copy_(torch.randn(8) / 4)
    x = tokens()
    p = prepare_experts(block.experts.gate_up_proj, block.experts.down_proj)
    router = Router(3, "sigmoid", groups=4, top_groups=2, scale=2.5)
    got = ours(x[0], p, x[0] @ block.gate.weight.T, router, "triton", block.gate.e_score_correction_bias)
    shared = block.shared_experts
    gate_up = torch.cat([shared.gate_proj(x[0]), shared.up_proj(x[0])], -1)
    got = got + shared.down_proj(silu_and_mul(gate_up, SILU))
    torch.testing.assert_close(got, block(x)[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_gpt_oss() -> None:
    block = layer("gpt_oss", "GptOssMLP", "GptOssConfig", num_local_experts=6, intermediate_size=24)
    x, e = tokens(), block.experts
    p = prepare_experts(
        e.gate_up_proj.transpose(1, 2).contiguous(), e.down_proj.transpose(1, 2).contiguous(), b1=e.gate_up_proj_bias,
        b2=e.down_proj_bias, gate_up_interleaved=True, activation=Activation("swiglu", alpha=1.702, limit=7.0),
    )  # fmt: skip
    got = ours(x[0], p, x[0] @ block.router.weight.T + block.router.bias, Router(3), "triton")
    torch.testing.assert_close(got, block(x)[0][0], rtol=1e-4, atol=1e-4)
