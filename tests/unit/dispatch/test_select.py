"""Selection: explicit requests win or are refused, auto walks the rows in order."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from moegate.dispatch import (
    OPS,
    PLATFORM_NAMES,
    ROWS,
    Capabilities,
    DispatchRefused,
    Problem,
    platform_name,
    rows_of,
    select,
)
from moegate.dispatch.platforms import PLATFORMS
from moegate.errors import UsageError

BARE = {name: Capabilities(name, "2.13.0", "3.8.0", interpreter=name == "cpu") for name in PLATFORM_NAMES}


@pytest.mark.parametrize(("platform", "backend"), [
    ("cuda-sm80", "triton"), ("cuda-sm89", "triton"), ("cuda-sm90", "triton"), ("cuda-sm100", "triton"),
    ("cuda-sm120", "triton"), ("rocm-gfx942", "triton"), ("rocm-gfx950", "triton"), ("xpu-bmg", "torch"),
    ("cpu", "torch"), ("npu", "reference"),
])  # fmt: skip
def test_auto_for_fused_experts(platform: str, backend: str) -> None:
    assert select("fused_experts", Problem(), BARE[platform]).resolved == backend


def outcome(op: str, platform: str, request: str) -> str:
    """The backend that a request gets, or `refused` with a reason."""
    try:
        return select(op, Problem(experts=64, topk=6), BARE[platform], request).resolved
    except DispatchRefused as refused:
        return "refused" if [s.backend for s in refused.chain] == [request] and refused.chain[0].why else "silent"


def test_a_request_is_honoured_or_refused_on_every_op_platform_and_name() -> None:
    for op, platform in itertools.product(OPS, PLATFORM_NAMES):
        for row in rows_of(op):
            assert outcome(op, platform, row.backend) in (row.backend, "refused")


def test_no_order_of_the_rows_changes_what_a_request_gets() -> None:
    mine = rows_of("fused_experts")
    for order in itertools.islice(itertools.permutations(mine), 0, 5000, 97):
        found = select("fused_experts", Problem(), BARE["cuda-sm90"], "triton", rows=order)
        assert found.resolved == "triton"


def test_triton_on_the_cpu_is_explicit_and_needs_the_interpreter() -> None:
    assert select("fused_experts", Problem(dtype="float32"), BARE["cpu"], "triton").resolved == "triton"
    compiled = dataclasses.replace(BARE["cpu"], interpreter=False)
    with pytest.raises(DispatchRefused) as refused:
        select("fused_experts", Problem(), compiled, "triton")
    assert refused.value.fix is not None
    assert refused.value.fix.startswith("set TRITON_INTERPRET=1, or ")
    assert select("fused_experts", Problem(), compiled).resolved == "torch"


def test_a_refusal_names_just_those_that_can_serve() -> None:
    for op, platform in itertools.product(OPS, PLATFORM_NAMES):
        names = [row.backend for row in rows_of(op)]
        able = [name for name in names if outcome(op, platform, name) == name]
        for name in set(names) - set(able):
            with pytest.raises(DispatchRefused) as refused:
                select(op, Problem(experts=64, topk=6), BARE[platform], name)
            said = f"ask for auto or one that can serve here: {', '.join(able)}"
            assert refused.value.fix == (said if able else "nothing here serves this problem")


def test_foreign_rows_need_their_package_setting_and_problem() -> None:
    block = Problem(quant="fp8_w8a8", block_shape=(128, 128))
    full = dataclasses.replace(BARE["cuda-sm90"], packages=frozenset({"deep_gemm"}))
    assert select("block_fp8_linear", block, full).resolved == "deep_gemm"
    assert select("block_fp8_linear", block, BARE["cuda-sm90"]).resolved == "triton"
    off = dataclasses.replace(full, env=(("SGLANG_ENABLE_JIT_DEEPGEMM", "0"),))
    assert select("block_fp8_linear", block, off).resolved == "triton"
    aiter = dataclasses.replace(BARE["rocm-gfx942"], packages=frozenset({"aiter"}), env=(("SGLANG_USE_AITER", "1"),))
    assert select("fused_experts", Problem(), aiter).resolved == "aiter"
    assert select("fused_experts", Problem(), dataclasses.replace(aiter, env=())).resolved == "triton"


def test_deep_gemm_takes_small_blocks_on_sm90_and_by_name_with_power_of_two_scales_on_sm100() -> None:
    packages = frozenset({"deep_gemm"})
    plain, powers = (Problem(quant="fp8_w8a8", block_shape=(32, 32), ue8m0=ue8m0) for ue8m0 in (False, True))
    hopper, blackwell = (dataclasses.replace(BARE[name], packages=packages) for name in ("cuda-sm90", "cuda-sm100"))
    assert select("block_fp8_linear", plain, hopper).resolved == "deep_gemm"
    assert select("block_fp8_linear", powers, blackwell, "deep_gemm").resolved == "deep_gemm"
    assert select("block_fp8_linear", powers, blackwell).resolved == "triton"
    with pytest.raises(DispatchRefused, match="ue8m0"):
        select("block_fp8_linear", plain, blackwell, "deep_gemm")


def test_scaled_mm_takes_two_blocks_and_steps_aside_where_the_device_refuses_it() -> None:
    xpu = BARE["xpu-bmg"]
    for shape in ((128, 128), (1, 128)):
        assert select("block_fp8_linear", Problem(quant="fp8_w8a8", block_shape=shape), xpu).resolved == "scaled_mm"
    for shape in ((1, 32), (64, 64), (32, 32)):
        assert select("block_fp8_linear", Problem(quant="fp8_w8a8", block_shape=shape), xpu).resolved == "triton"
    problem = Problem(quant="fp8_w8a8", block_shape=(128, 128))
    refusing = dataclasses.replace(xpu, probes=(("scaled_mm_block", False),))
    found = select("block_fp8_linear", problem, refusing)
    assert found.resolved == "triton"
    assert any(step.backend == "scaled_mm" and "refuses" in step.why for step in found.chain)
    old = dataclasses.replace(xpu, torch="2.10.1+xpu")
    assert select("block_fp8_linear", problem, old).resolved == "triton"


def test_the_chain_ends_with_the_choice_and_names_every_row_before_it() -> None:
    found = select("fused_experts", Problem(), BARE["cuda-sm90"])
    names = [row.backend for row in rows_of("fused_experts")]
    assert [step.backend for step in found.chain] == names[: names.index("triton") + 1]
    assert [step.chosen for step in found.chain] == [False] * (len(found.chain) - 1) + [True]


def test_unknown_names() -> None:
    with pytest.raises(UsageError, match="unknown op"):
        select("fused_expert", Problem(), BARE["cpu"])
    with pytest.raises(DispatchRefused, match="no backend"):
        select("fused_experts", Problem(), BARE["cpu"], "tritn")
    with pytest.raises(UsageError, match="unknown platform"):
        select("fused_experts", Problem(), Capabilities("cuda-sm70"))


def test_every_spelling_of_a_platform() -> None:
    for platform in PLATFORMS:
        for spelling in (platform.name, *platform.spellings):
            assert platform_name(spelling.upper()) == platform.name


def test_every_op_ends_with_its_reference_and_every_row_says_why() -> None:
    for op in OPS:
        rows = rows_of(op)
        assert rows[-1].backend == "reference"
        assert len({row.backend for row in rows}) == len(rows)
    assert all(row.reason for row in ROWS)


def test_only_rows_of_the_cpu_alone_give_it_as_their_reason() -> None:
    assert not [row for row in ROWS if "CPU" in row.reason and row.platforms != {"cpu"}]
