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
    lock,
    platform_name,
    rows_of,
    select,
)
from moegate.dispatch.platforms import PLATFORMS
from moegate.errors import UsageError

BARE = {name: Capabilities(name, "2.13.0", "3.8.0", interpreter=name == "cpu") for name in PLATFORM_NAMES}


@pytest.mark.parametrize(("platform", "backend"), [
    ("cuda-sm80", "triton"), ("cuda-sm89", "triton"), ("cuda-sm90", "triton"), ("cuda-sm100", "triton"),
    ("cuda-sm110", "triton"), ("cuda-sm120", "triton"), ("rocm-gfx90a", "triton"), ("rocm-gfx942", "triton"),
    ("rocm-gfx950", "triton"), ("rocm-gfx11", "triton"), ("rocm-gfx12", "triton"), ("rocm-gfx1250", "triton"),
    ("xpu-bmg", "torch"), ("cpu", "torch"), ("npu", "reference"),
])  # fmt: skip
def test_auto_for_fused_experts(platform: str, backend: str) -> None:
    assert select("fused_experts", Problem(), BARE[platform]).resolved == backend


def outcome(op: str, platform: str, request: str) -> str:
    """The backend that a request gets, or `refused` with a reason."""
    try:
        return select(op, lock.usual(op), BARE[platform], request).resolved
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
                select(op, lock.usual(op), BARE[platform], name)
            assert able
            assert refused.value.fix == f"ask for auto or one that can serve here: {', '.join(able)}"


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
    with pytest.raises(DispatchRefused) as refused:  # auto takes it for [128,128] alone, and nobody else has the block
        select("block_fp8_linear", powers, blackwell)
    assert refused.value.fix == "ask by name for one that can serve here: deep_gemm"
    with pytest.raises(DispatchRefused, match="ue8m0"):
        select("block_fp8_linear", plain, blackwell, "deep_gemm")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("platform", ["cpu", "cuda-sm90", "rocm-gfx942", "xpu-bmg"])
def test_auto_takes_scaled_mm_with_scales_per_row_only_where_it_keeps_the_precision(platform: str, dtype: str) -> None:
    problem = Problem(dtype=dtype, quant="fp8_w8a8")
    keeps = dtype == "bfloat16" or platform == "cpu"
    assert select("fp8_linear", problem, BARE[platform]).resolved == ("scaled_mm" if keeps else "triton")
    assert select("fp8_linear", problem, BARE[platform], "scaled_mm").resolved == "scaled_mm"


def test_scaled_mm_takes_two_blocks_and_steps_aside_where_the_device_refuses_it() -> None:
    xpu = BARE["xpu-bmg"]
    for shape in ((128, 128), (1, 128)):
        assert select("block_fp8_linear", Problem(quant="fp8_w8a8", block_shape=shape), xpu).resolved == "scaled_mm"
    for shape in ((1, 32), (64, 64), (32, 32)):
        with pytest.raises(DispatchRefused, match=r"serves blocks \[1, 128\], \[128, 128\]"):
            select("block_fp8_linear", Problem(quant="fp8_w8a8", block_shape=shape), xpu)
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
    for field, word in (("quant", "magic"), ("activation", "gleu"), ("dtype", "bf16"), ("a2a", "deepeep")):
        with pytest.raises(UsageError, match=f"{field}: unknown {field} '{word}'") as wrong:
            Problem(**{field: word})  # type: ignore[arg-type]
        assert wrong.value.fix is not None
        assert wrong.value.fix.startswith("one of ")
    with pytest.raises(UsageError, match="block_shape"):
        Problem(quant="fp8_w8a8", block_shape=(128, 128, 1))  # type: ignore[arg-type]
    assert Problem(block_shape=[128, 128]) == Problem(block_shape=(128, 128))  # type: ignore[arg-type]


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


BLOCK128 = Problem(quant="fp8_w8a8", block_shape=(128, 128))
MXFP4 = Problem(quant="mxfp4_w4a16", block_shape=(1, 32), activation="swiglu")


def with_packages(platform: str, *packages: str, **more: object) -> Capabilities:
    return dataclasses.replace(BARE[platform], packages=frozenset(packages), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("problem", [
    Problem(quant="int4_w4a16", block_shape=(0, 128)), Problem(quant="int8_w8a8", per_channel=True),
    Problem(quant="nvfp4_w4a16", block_shape=(1, 16)), Problem(quant="mxfp8", block_shape=(1, 32)),
    Problem(quant="fp8_w8a8", block_shape=(64, 64)), Problem(quant="fp8_w8a8", block_shape=(1, 128)),
    Problem(quant="fp8_w8a8", block_shape=(1, 32)), Problem(block_shape=(128, 128)), Problem(activation="gelu"),
])  # fmt: skip
def test_our_experts_refuse_what_they_have_no_kernel_for(problem: Problem) -> None:
    for platform, request in itertools.product(PLATFORM_NAMES, ("auto", "triton", "torch", "reference")):
        with pytest.raises(DispatchRefused):
            select("fused_experts", problem, BARE[platform], request)


@pytest.mark.parametrize("problem", [
    Problem(), Problem(quant="fp8_w8a8"), Problem(quant="fp8_w8a8", per_channel=True), BLOCK128, MXFP4,
    Problem(activation="clamped"), Problem(quant="mxfp4_w4a16"),
])  # fmt: skip
def test_our_experts_take_what_they_have_kernels_for(problem: Problem) -> None:
    for request in ("auto", "triton"):
        assert select("fused_experts", problem, BARE["cuda-sm90"], request).resolved == "triton"
    for platform in PLATFORM_NAMES:
        assert select("fused_experts", problem, BARE[platform], "reference").resolved == "reference"


@pytest.mark.parametrize("block", [None, (32, 32), (1, 32), (64, 64), (128, 64), (64, 128)])
def test_dense_layers_have_the_blocks_that_their_weights_are_prepared_in(block: tuple[int, int] | None) -> None:
    for request in ("scaled_mm", "triton", "torch", "reference"):
        with pytest.raises(DispatchRefused, match="serves blocks"):
            select("block_fp8_linear", Problem(quant="fp8_w8a8", block_shape=block), BARE["cuda-sm90"], request)


@pytest.mark.parametrize("quant", [None, "int8_w8a8", "mxfp8", "mxfp4_w4a16", "int4_w4a16"])
def test_dense_layers_serve_fp8_weights_alone(quant: str | None) -> None:
    full = with_packages("cuda-sm90", "deep_gemm", "flashinfer", "sgl_kernel")
    for op, block in (("block_fp8_linear", (128, 128)), ("fp8_linear", None)):
        with pytest.raises(DispatchRefused, match="does not serve"):
            select(op, Problem(quant=quant, block_shape=block), full)


def test_triton_has_no_fp8_type_before_sm89() -> None:
    for op, problem in (("fused_experts", BLOCK128), ("block_fp8_linear", BLOCK128), ("scaled_fp8_quant", Problem())):
        assert select(op, problem, BARE["cuda-sm80"]).resolved == "torch"
        assert select(op, problem, BARE["cuda-sm89"]).resolved == "triton"


def test_mxfp4_of_the_engines() -> None:
    """FlashInfer on SM100 and SM120; else triton_kernels, on Blackwell up to a driver; by name elsewhere too."""
    both, kernels = ("flashinfer", "triton_kernels"), ("triton_kernels",)
    found = {name: select("fused_experts", MXFP4, with_packages(name, *both)).resolved
             for name in ("cuda-sm89", "cuda-sm90", "cuda-sm100", "cuda-sm120")}  # fmt: skip
    assert found == {"cuda-sm89": "triton_kernel", "cuda-sm90": "triton_kernel", "cuda-sm100": "flashinfer_mxfp4",
                     "cuda-sm120": "flashinfer_mxfp4"}  # fmt: skip
    assert select("fused_experts", MXFP4, with_packages("cuda-sm90", *both), "flashinfer_mxfp4").resolved
    for driver, resolved in (
        ("594.9", "triton_kernel"),
        ("", "triton_kernel"),
        ("595.0", "triton"),
        ("600.1", "triton"),
    ):
        caps = with_packages("cuda-sm100", *kernels, driver=driver)
        assert select("fused_experts", MXFP4, caps).resolved == resolved
        assert select("fused_experts", MXFP4, caps, "triton_kernel").resolved == "triton_kernel"
    assert (
        select("fused_experts", MXFP4, with_packages("cuda-sm90", *kernels, driver="600.1")).resolved == "triton_kernel"
    )


def test_nvfp4_goes_to_flashinfer_cutlass_by_itself_where_the_engine_says_so() -> None:
    problem = Problem(quant="nvfp4_w4a16", block_shape=(1, 16))
    for platform in ("cuda-sm110", "cuda-sm120"):
        assert select("fused_experts", problem, with_packages(platform, "flashinfer")).resolved == "flashinfer_cutlass"
    with pytest.raises(DispatchRefused) as refused:
        select("fused_experts", problem, with_packages("cuda-sm100", "flashinfer"))
    assert "flashinfer_cutlass" in str(refused.value.fix)


def test_the_npu_row_needs_its_architecture_and_scales() -> None:
    powers = dataclasses.replace(BLOCK128, ue8m0=True)
    plain = with_packages("npu", "torch_npu")
    new = dataclasses.replace(plain, probes=(("npu_arch35", True),))
    told = dataclasses.replace(new, env=(("SGLANG_NPU_ARCH35_REQUANT_BLOCK_FP8", "1"),))
    assert select("block_fp8_linear", powers, plain).resolved == "reference"
    assert select("block_fp8_linear", BLOCK128, new).resolved == "reference"
    assert select("block_fp8_linear", powers, new).resolved == "npu"
    assert select("block_fp8_linear", BLOCK128, told).resolved == "npu"


@pytest.mark.parametrize("op", ["topk", "grouped_topk"])
def test_the_gate_of_xpu_takes_powers_of_two_in_small_groups(op: str) -> None:
    caps = with_packages("xpu-bmg", "sgl_kernel")
    for experts, groups in ((64, 2), (256, 8)):
        assert select(op, Problem(experts=experts, groups=groups, topk=6), caps).resolved == "intel_xpu"
    for experts, groups in ((160, 8), (64, 1), (0, 1)):
        assert select(op, Problem(experts=experts, groups=groups, topk=6), caps).resolved == "triton"


LIVE = {
    "cuda-sm80": ("cuda-sm80", "cuda-sm86", "cuda-sm87", "SM_86"), "cuda-sm89": ("cuda-sm89",),
    "cuda-sm90": ("cuda-sm90", "sm90"), "cuda-sm100": ("cuda-sm100", "cuda-sm103", "sm_103"),
    "cuda-sm110": ("cuda-sm110", "cuda-sm101"), "cuda-sm120": ("cuda-sm120", "cuda-sm121"),
    "rocm-gfx90a": ("rocm-gfx90a", "gfx908"), "rocm-gfx942": ("rocm-gfx942",), "rocm-gfx950": ("gfx950",),
    "rocm-gfx11": ("rocm-gfx1100", "rocm-gfx1151"), "rocm-gfx12": ("rocm-gfx1201",), "rocm-gfx1250": ("rocm-gfx1250",),
    "xpu-bmg": ("xpu-bmg", "xpu-pvc", "xpu-acm", "xpu-xpu", "bmg", "xpu"), "npu": ("npu", "ascend"), "cpu": ("cpu",),
}  # fmt: skip


def test_what_a_live_device_calls_itself_is_answered_as_its_family() -> None:
    assert set(LIVE) == set(PLATFORM_NAMES)
    for family, words in LIVE.items():
        for op in OPS:
            asked = lock.usual(op)
            known = select(op, asked, BARE[family])
            for word in words:
                assert select(op, asked, dataclasses.replace(BARE[family], platform=word)) == known


def test_conditions_know_the_family_of_a_live_device() -> None:
    powers = Problem(quant="fp8_w8a8", block_shape=(32, 32), ue8m0=True)
    for platform in ("cuda-sm100", "cuda-sm103", "sm_103"):
        with pytest.raises(DispatchRefused):
            select("block_fp8_linear", powers, Capabilities(platform, "2.13", "3.8", packages=frozenset({"deep_gemm"})))


def test_the_device_is_asked_only_for_a_row_that_nothing_else_is_in_the_way_of() -> None:
    asked: list[str] = []

    def refuse(name: str) -> bool:
        asked.append(name)
        return False

    for platform, problem in (("cuda-sm90", BLOCK128), ("xpu-bmg", Problem())):
        op = "block_fp8_linear" if problem.quant else "fused_experts"
        select(op, problem, dataclasses.replace(BARE[platform], ask=refuse))
    assert not asked
    found = select("block_fp8_linear", BLOCK128, dataclasses.replace(BARE["xpu-bmg"], ask=refuse))
    assert (found.resolved, asked) == ("triton", ["scaled_mm_block"])
    with pytest.raises(DispatchRefused, match="refuses block recipes"):
        select("block_fp8_linear", BLOCK128, dataclasses.replace(BARE["cuda-sm90"], ask=refuse), "scaled_mm")
    able = dataclasses.replace(BARE["xpu-bmg"], ask=lambda name: True)
    assert select("block_fp8_linear", BLOCK128, able).resolved == "scaled_mm"
