"""Entry guards: three branches, one predicate, and a replacement that is said."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from moegate.dispatch import DispatchRefused, Problem
from moegate.dispatch.guards import aiter_or_triton, mxfp8_payload, serves_per_channel_fp8
from moegate.families import Quant, layout_of

GOOD = {
    (True, "float8_e4m3fn", True): "mxfp8",
    (True, "bfloat16", False): "bfloat16",
    (False, "bfloat16", False): "bfloat16",
}


@pytest.mark.parametrize(
    "case", list(itertools.product((True, False), ("float8_e4m3fn", "bfloat16", "float16", "uint8"), (True, False)))
)
def test_the_mxfp8_payload_has_three_branches(case: tuple[bool, str, bool]) -> None:
    use, payload, scales = case
    if case in GOOD:
        assert mxfp8_payload(use_mxfp8=use, payload=payload, has_scales=scales) == GOOD[case]
        return
    with pytest.raises(DispatchRefused) as caught:
        mxfp8_payload(use_mxfp8=use, payload=payload, has_scales=scales)
    assert "--quantization mxfp8" in str(caught.value)
    assert payload in str(caught.value)


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
    assert serves_per_channel_fp8(Problem(quant="fp8_w8a8", per_channel=True))
    assert repr(config) == before
    assert not serves_per_channel_fp8(Quant("fp8", "fp8_w8a8", (128, 128)))
    assert not serves_per_channel_fp8(Problem(quant="int8_w8a8", per_channel=True))


@pytest.mark.parametrize(
    ("channel", "request_", "aiter", "runner", "why"),
    [
        (True, "auto", True, "aiter", None),
        (True, "aiter", True, "aiter", None),
        (True, "triton", True, "triton", None),
        (False, "auto", True, "triton", None),
        (False, "aiter", True, "triton", "no per-channel scales"),
        (True, "aiter", False, "triton", "cannot run here"),
    ],
)
def test_a_replaced_backend_is_said(channel: bool, request_: str, aiter: bool, runner: str, why: str | None) -> None:
    quant = Quant("compressed-tensors", "fp8_w8a8", per_channel=channel)
    found, replacement = aiter_or_triton(quant, request_, aiter=aiter)
    assert found == runner
    assert (replacement is None) == (why is None)
    if replacement is not None and why is not None:
        assert why in replacement.step.why
        assert replacement.step.backend == "aiter"
