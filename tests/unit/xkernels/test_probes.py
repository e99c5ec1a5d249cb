"""Facts of a live device, as dispatch asks for them: found out once, and enough to step aside before the first call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moegate.dispatch import Capabilities, Problem, select
from serving.server.experts import capabilities
from xkernels.device import CpuDevice
from xkernels.ops import linear
from xkernels.probes import asking

BLOCK = Problem(quant="fp8_w8a8", block_shape=(128, 128))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """Every product that a device which refuses block scales was asked for."""
    made: list[torch.device] = []

    def refuse(a: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        made.append(a.device)
        raise RuntimeError("block scales are not supported here")

    linear._probe.cache_clear()
    linear._stride_of_scales.cache_clear()
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", refuse, raising=False)
    yield made
    linear._probe.cache_clear()
    linear._stride_of_scales.cache_clear()


@pytest.mark.skipif(not hasattr(torch.nn.functional, "scaled_mm"), reason="this torch has no scaled_mm")
def test_a_device_that_refuses_is_asked_once(calls: list[torch.device]) -> None:
    ask = asking(CpuDevice())
    assert ask("scaled_mm_block") is False
    made = len(calls)
    assert made > 0
    assert {ask("scaled_mm_block"), asking(CpuDevice())("scaled_mm_block")} == {False}
    assert len(calls) == made


def test_what_nothing_finds_out_has_no_answer() -> None:
    assert asking(CpuDevice())("npu_arch35") is None


def on_xpu(caps: Capabilities) -> Capabilities:
    return dataclasses.replace(caps, platform="xpu-bmg", torch="2.13.0", triton="3.8.0")


def test_what_a_process_can_do_says_that_its_device_refuses(calls: list[torch.device]) -> None:
    found = select("block_fp8_linear", BLOCK, on_xpu(capabilities(CpuDevice())))
    assert found.resolved == "triton"
    assert any(step.backend == "scaled_mm" and "refuses" in step.why for step in found.chain)


def test_a_process_asks_its_device_nothing_for_what_it_serves(calls: list[torch.device]) -> None:
    caps = capabilities(CpuDevice())
    for op in ("fused_experts", "topk", "store_kv_cache", "decode_attention"):
        select(op, Problem(experts=64, topk=6), on_xpu(caps))
        select(op, Problem(experts=64, topk=6), caps)
    assert not calls
