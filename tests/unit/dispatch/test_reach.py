"""Whether our own look-up of configs is on the path of a model: only where its weights are ones that we serve."""

from __future__ import annotations

from typing import Any

import pytest

from moegate.dispatch.reach import reachability
from moegate.families import layout_of

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 64, "num_experts_per_tok": 6, "hidden_size": 1024,
    "moe_intermediate_size": 256, "num_hidden_layers": 2,
}  # fmt: skip


def reach(quantization: dict[str, Any] | None, device: str = "NVIDIA_H200", **asked: Any) -> tuple[bool, str, str]:
    layout = layout_of(SHAPE if quantization is None else {**SHAPE, "quantization_config": quantization})
    found = reachability("moegate", layout, layout.key(device), **asked)
    return found.reachable, found.resolved, found.why


@pytest.mark.parametrize("quantization", [
    None, {"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": [128, 128]}, {"quant_method": "mxfp4"},
    {"quant_method": "w8a8_fp8"},
])  # fmt: skip
@pytest.mark.parametrize("request_", ["auto", "triton"])
def test_weights_that_we_serve_reach_it(quantization: dict[str, Any] | None, request_: str) -> None:
    assert reach(quantization, request=request_)[:2] == (True, "triton")


@pytest.mark.parametrize(("quantization", "why"), [
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, "does not serve int4_w4a16 weights"),
    ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "does not serve int8_w8a16 weights"),
    ({"quant_method": "nvfp4", "quant_algo": "NVFP4"}, "does not serve nvfp4_w4a16 weights"),
    ({"quant_method": "w8a8_int8"}, "does not serve int8_w8a8 weights"),
    ({"quant_method": "mxfp8"}, "not [1, 32]"),
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "not [64, 64]"),
])  # fmt: skip
@pytest.mark.parametrize("request_", ["auto", "triton"])
def test_weights_that_we_do_not_serve_are_refused(quantization: dict[str, Any], why: str, request_: str) -> None:
    reachable, resolved, said = reach(quantization, request=request_)
    assert (reachable, resolved) == (False, "refused")
    assert why in said


def test_a_device_whose_triton_has_no_fp8_looks_up_no_config_of_it() -> None:
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert reach(block, "NVIDIA_A100-SXM4-80GB")[:2] == (False, "torch")
    assert reach(None, "NVIDIA_A100-SXM4-80GB")[:2] == (True, "triton")
    assert reach(block, "NVIDIA_L40S")[:2] == (True, "triton")
