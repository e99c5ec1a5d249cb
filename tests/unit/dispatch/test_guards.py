"""Entry guards as rows ask them: three branches of a payload, and one predicate for weights and module."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from moegate.dispatch import Capabilities, DispatchRefused, Problem, select
from moegate.dispatch.guards import serves_per_channel_fp8
from moegate.families import Quant, layout_of

PAYLOADS = list(itertools.product(("float8_e4m3fn", "bfloat16", "float16", "uint8"), (True, False)))
SM100 = Capabilities("cuda-sm100", "2.13.0", "3.8.0", packages=frozenset({"flashinfer"}))
AITER = Capabilities("rocm-gfx942", "2.13.0", "3.8.0", packages=frozenset({"aiter"}), env=(("SGLANG_USE_AITER", "1"),))
TENSOR, CHANNEL = (Problem(quant="fp8_w8a8", per_channel=channel) for channel in (False, True))
BLOCK = Problem(quant="fp8_w8a8", block_shape=(128, 128))


@pytest.mark.parametrize(("payload", "scales"), PAYLOADS)
def test_the_mxfp8_payload_has_three_branches(payload: str, scales: bool) -> None:
    problem = Problem(quant="mxfp8", block_shape=(1, 32), a2a="deepep", payload=payload, payload_scales=scales)
    if (payload, scales) in (("float8_e4m3fn", True), ("bfloat16", False)):
        assert select("fused_experts", problem, SM100).resolved == "flashinfer_trtllm"
        return
    with pytest.raises(DispatchRefused, match="--quantization mxfp8") as caught:
        select("fused_experts", problem, SM100, "flashinfer_trtllm")
    assert f"{payload} {'with' if scales else 'without'} scales" in str(caught.value)


def test_a_payload_of_other_weights_or_of_no_transport_is_not_looked_at() -> None:
    alone = Problem(quant="mxfp8", block_shape=(1, 32), payload="uint8")
    assert select("fused_experts", alone, SM100).resolved == "flashinfer_trtllm"
    sent = Problem(quant="fp8_w8a8", block_shape=(128, 128), a2a="deepep", payload="uint8")
    packages = frozenset({"deep_gemm"})
    hopper = Capabilities("cuda-sm90", "2.13.0", "3.8.0", packages=packages)
    assert select("fused_experts", sent, hopper).resolved == "deep_gemm"


def test_one_predicate_for_weights_and_module() -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    config: dict[str, Any] = {
        "architectures": ["DeepseekV2ForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64,
        "moe_intermediate_size": 32, "num_hidden_layers": 2,
        "quantization_config": {"config_groups": {"group_0": {"weights": weights}}},
    }  # fmt: skip
    before = repr(config)
    quant = layout_of(config).quant
    assert serves_per_channel_fp8(quant)
    assert serves_per_channel_fp8(CHANNEL)
    assert repr(config) == before
    assert not serves_per_channel_fp8(Quant("fp8", "fp8_w8a8", (128, 128)))
    assert not serves_per_channel_fp8(Problem(quant="int8_w8a8", per_channel=True))


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (Problem(), None),
        (CHANNEL, None),
        (BLOCK, None),
        (Problem(quant="mxfp4_w4a16", block_shape=(1, 32)), None),
        (Problem(quant="fp8_w8a8", per_channel=True, a2a="mori"), None),
        (TENSOR, "without per-channel scales"),
        (Problem(quant="fp8_w8a8", per_channel=True, a2a="flashinfer"), "all-to-all"),
        (Problem(quant="fp8_w8a8", block_shape=(64, 64)), r"not \[64, 64\]"),
        (Problem(quant="int4_w4a16", block_shape=(0, 128)), "int4_w4a16"),
        (Problem(quant="mxfp8", block_shape=(1, 32)), "rocm-gfx950 alone"),
    ],
)
def test_aiter_takes_what_it_has_experts_for(problem: Problem, why: str | None) -> None:
    if why is None:
        assert select("fused_experts", problem, AITER, "aiter").resolved == "aiter"
        assert select("fused_experts", problem, AITER).resolved == "aiter"
        return
    with pytest.raises(DispatchRefused, match=why):
        select("fused_experts", problem, AITER, "aiter")


def test_a_row_that_auto_passes_by_says_what_it_lacks() -> None:
    found = select("fused_experts", TENSOR, AITER)
    assert found.resolved == "triton"
    assert any(step.backend == "aiter" and "per-channel" in step.why for step in found.chain)
