"""FP8 quantisation and FP8 linear layers against their twins."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xkernels.device import live
from xkernels.ops import linear
from xkernels.ops.linear import (
    block_fp8_linear,
    block_fp8_linear_reference,
    fp8_linear,
    fp8_linear_reference,
    prepare_block_fp8,
    prepare_fp8,
)
from xkernels.ops.quant import (
    per_token_group_quant_fp8,
    per_token_group_quant_fp8_reference,
    scaled_fp8_quant,
    scaled_fp8_quant_reference,
)
from xkernels.ops.scheme import Scheme, block_shape, scheme_from_config

DEVICE = live().torch_device()
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
ON_CPU = DEVICE.type == "cpu"
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"column_major": True},
    {"column_major": True, "tma_aligned": True},
    {"ue8m0": True},
    {"column_major": True, "tma_aligned": True, "ue8m0": True},
]


def same_values(got: torch.Tensor, want: torch.Tensor) -> None:
    """FP8 tensors equal but for rare ties that a division's last bit decides."""
    assert not got.float().isnan().any()
    assert int((got.float() != want.float()).sum()) <= 2e-3 * got.numel()
    torch.testing.assert_close(got.float(), want.float(), rtol=0.13, atol=2**-8)


@pytest.mark.parametrize("kw", LAYOUTS, ids=lambda kw: "-".join(kw) or "row-major")
@pytest.mark.parametrize("shape", [(1, 128, 128), (7, 384, 128), (5, 96, 32), (0, 128, 128), (131, 2048, 128)], ids=str)
@pytest.mark.parametrize("dtype", [FN, FNUZ] if ON_CPU else [FN], ids=str)
def test_group_quant(kw: dict[str, Any], shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, k, group = shape
    g = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, k, generator=g) * torch.exp(2 * torch.randn(rows, k, generator=g))).bfloat16().to(DEVICE)
    q, s = per_token_group_quant_fp8(x, group, dtype=dtype, **kw)
    want_q, want_s = per_token_group_quant_fp8_reference(x, group, dtype=dtype, **kw)
    assert (s.shape, s.dtype, s.stride()) == (want_s.shape, want_s.dtype, want_s.stride())
    if s.dtype == torch.int32:
        assert torch.equal(s, want_s)
    else:
        torch.testing.assert_close(s, want_s, rtol=1e-6, atol=0)
    same_values(q, want_q)


@given(exponent=st.integers(-20, 20), seed=st.integers(0, 100), dtype=st.sampled_from([FN, FNUZ] if ON_CPU else [FN]))
@settings(max_examples=10, deadline=None)
def test_group_quant_properties(exponent: int, seed: int, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent).to(DEVICE)
    q, s = per_token_group_quant_fp8(x, 32, dtype=dtype)
    back = (q.float().view(3, 2, 32) * s[:, :, None]).view(3, 64)
    # half a step of a 3-bit mantissa, or of the smallest subnormal
    bound = torch.maximum(x.abs() / 16, s.repeat_interleave(32, 1) * 2**-10) * 1.001
    assert ((back - x).abs() <= bound).all()
    powers, ps = per_token_group_quant_fp8(x, 32, dtype=dtype, ue8m0=True)
    assert torch.equal(torch.exp2(torch.log2(ps).round()), ps)
    assert ((ps >= s) & (ps < 2 * s)).all()
    assert not powers.float().isnan().any()


def test_group_quant_of_zeros_three_dimensions_and_refusals() -> None:
    q, s = per_token_group_quant_fp8(torch.zeros(2, 3, 64, device=DEVICE), 32)
    assert (q.float() == 0).all()
    assert s.shape == (2, 3, 2)
    assert s.isfinite().all()
    x = torch.zeros(4, 64, device=DEVICE)
    for bad, words in (
        ({"group": 48}, "multiple of group"),
        ({"group": 32, "tma_aligned": True}, "column-major"),
        ({"group": 32, "dtype": torch.float16}, "dtype must be"),
    ):
        with pytest.raises(ValueError, match=words):
            per_token_group_quant_fp8(x, **bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        per_token_group_quant_fp8(x.t(), 4)


@pytest.mark.parametrize("shape", [(1, 40), (17, 1100), (3, 64)])
def test_scaled_quant(shape: tuple[int, int]) -> None:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for kw in ({}, {"per_token": True}, {"scale": torch.tensor([0.01], device=DEVICE)}):
        q, s = scaled_fp8_quant(x, **kw)  # type: ignore[arg-type]
        want_q, want_s = scaled_fp8_quant_reference(x, **kw)  # type: ignore[arg-type]
        torch.testing.assert_close(s, want_s, rtol=1e-6, atol=0)
        same_values(q, want_q)
    with pytest.raises(ValueError, match="either scale or per_token"):
        scaled_fp8_quant(x, torch.ones(1, device=DEVICE), per_token=True)
    for scale in (torch.tensor(0.01, dtype=torch.float64), torch.tensor([[0.01]], dtype=torch.bfloat16)):
        q, s = scaled_fp8_quant(x, scale.to(DEVICE))
        assert (s.dtype, s.shape) == (torch.float32, (1,))
        same_values(q, scaled_fp8_quant_reference(x, scale.to(DEVICE))[0])
    with pytest.raises(ValueError, match=r"scale must be float32, not torch\.int64"):
        scaled_fp8_quant(x, torch.ones(1, dtype=torch.int64, device=DEVICE))


@pytest.mark.parametrize("eps", [0.0, 1e-40, 5e-36, -1.0, float("nan"), float("inf")])
def test_an_eps_without_a_normal_scale_is_refused(eps: float) -> None:
    zeros = torch.zeros(2, 64, device=DEVICE)
    for quantise in (per_token_group_quant_fp8, per_token_group_quant_fp8_reference):
        with pytest.raises(ValueError, match="eps must be at least"):
            quantise(zeros, 32, eps=eps)
        q, s = quantise(zeros, 32, eps=6e-36)
        assert not q.float().any()
        assert (1 / s).isfinite().all()


def weights(n: int, k: int, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(n)
    shape = (-(-n // block[0]), -(-k // block[1]))
    return torch.randn(n, k, generator=g).to(FN).to(DEVICE), torch.rand(shape, generator=g).to(DEVICE)


@pytest.mark.parametrize("block", [(128, 128), (1, 128)], ids=str)
@pytest.mark.parametrize("shape", [(1, 40, 256), (17, 200, 384), (2, 130, 128)], ids=str)
def test_block_linear(block: tuple[int, int], shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    w, s = weights(n, k, block)
    p = prepare_block_fp8(w, s, list(block))
    x = torch.randn(m, 2, k, generator=torch.Generator().manual_seed(3)).bfloat16().to(DEVICE)
    bias = torch.randn(n, device=DEVICE)
    want = block_fp8_linear_reference(x.float(), p, bias=bias)
    for backend in ("triton", "torch"):
        got = block_fp8_linear(x, p, backend=backend, bias=bias)
        assert got.dtype == x.dtype
        assert got.shape == (m, 2, n)
        assert float((got.float() - want).norm() / want.norm()) < 6e-3
    q, qs = per_token_group_quant_fp8(x.reshape(-1, k).contiguous(), 128, column_major=True)
    got = block_fp8_linear(q, p, backend="triton", x_scale=qs, out_dtype=torch.float32)
    assert float((got - want.view(-1, n) + bias).norm() / want.norm()) < 6e-3


def linear_of(**change: Any) -> torch.Tensor:
    """A block-FP8 linear layer of FP8 rows [3, 256], with some arguments in another way."""
    given: dict[str, Any] = {"x": torch.ones(3, 256, device=DEVICE).to(FN), "x_scale": torch.ones(3, 2, device=DEVICE),
                             "bias": torch.ones(40, device=DEVICE), "out_dtype": torch.float32, **change}  # fmt: skip
    prepared = prepare_block_fp8(*weights(40, 256, (128, 128)), (128, 128))
    return block_fp8_linear(given.pop("x"), prepared, backend="triton", **given)


WRONG_OPERANDS = {
    "x_scale must be float32 [3, 2]": [
        {"x_scale": torch.ones(shape)} for shape in ((1, 2), (3, 1), (6,), (1, 3, 2), (2, 3), ())
    ] + [{"x_scale": torch.ones(3, 2, dtype=dtype)} for dtype in (torch.int32, torch.float64)],
    "bias must be float [40]": [
        {"bias": torch.ones(shape)} for shape in ((3, 40), (1,), (2, 1, 40), (41,))
    ] + [{"bias": torch.ones(40, dtype=torch.int32)}],
    "weights' dtype torch.float8_e4m3fn, not torch.float8_e4m3fnuz": [{"x": torch.ones(3, 256).to(FNUZ)}],
    "x must be [..., 256]": [{"x": torch.ones(3, 200)}, {"x": torch.ones(())}],
    "needs x_scale and out_dtype": [{"x_scale": None}, {"out_dtype": None}, {"x": torch.ones(3, 256)}],
    "x must be float32, float16, bfloat16 or FP8": [
        {"x": torch.ones(3, 256).to(dtype), "x_scale": None} for dtype in (torch.float8_e5m2, torch.int64)
    ],
    "out_dtype must be float32": [{"out_dtype": torch.int32}, {"out_dtype": FN}],
    "config lacks BLOCK_SIZE_K": [{"config": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32}}],
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG_OPERANDS)
def test_operands_that_do_not_fit_are_refused_by_name(words: str) -> None:
    for change in WRONG_OPERANDS[words]:
        there = {key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for key, value in change.items()}
        with pytest.raises(ValueError, match=re.escape(words)):
            linear_of(**there)
    assert linear_of(x_scale=torch.ones(2, 3, device=DEVICE).t()).equal(linear_of())
    three = torch.ones(1, 3, 256, device=DEVICE).to(FN)
    assert linear_of(x=three, x_scale=torch.ones(1, 3, 2, device=DEVICE)).equal(linear_of()[None])


def test_a_k_that_scale_groups_do_not_divide_is_said_to_be_the_fault() -> None:
    prepared = prepare_block_fp8(*weights(40, 200, (128, 128)), (128, 128))
    with pytest.raises(ValueError, match="K must be a multiple of 128, not 200"):
        block_fp8_linear(torch.ones(3, 200, device=DEVICE), prepared, backend="triton")


def test_weights_that_are_not_what_the_kernels_read_are_refused_when_prepared() -> None:
    w, s = weights(40, 256, (128, 128))
    for weight in (w.bfloat16(), w.float().to(torch.int8)):
        with pytest.raises(ValueError, match=f"weight must be .*, not {weight.dtype}"):
            prepare_block_fp8(weight, s, (128, 128))
        with pytest.raises(ValueError, match=f"weight must be .*, not {weight.dtype}"):
            prepare_fp8(weight, s[0, 0])
    for prepare in (lambda scale: prepare_block_fp8(w, scale, (128, 128)), lambda scale: prepare_fp8(w, scale[0, 0])):
        with pytest.raises(ValueError, match=r"scale must be float32 .*, not torch\.int32"):
            prepare(s.int())
    with pytest.raises(ValueError, match="layout must be one of row_major, scaled_mm, not 'col'"):
        prepare_block_fp8(w, s, (128, 128), "col")  # type: ignore[arg-type]
    for block in ((128.0, 128.0), "ab", None, (True, 128)):
        with pytest.raises(ValueError, match="block must be two whole numbers"):
            prepare_block_fp8(w, s, block)  # type: ignore[arg-type]


def test_layouts_are_bit_exact_and_named() -> None:
    w, s = weights(256, 384, (128, 128))
    before = s.clone()
    moved = prepare_block_fp8(w, s, (128, 128), layout="scaled_mm")
    assert moved.layout == "scaled_mm"
    assert torch.equal(moved.scale[:, :3], s)
    assert torch.equal(s, before)
    with pytest.raises(ValueError, match="layout row_major, not scaled_mm"):
        block_fp8_linear(torch.zeros(1, 384, device=DEVICE), moved, backend="triton")
    with pytest.raises(ValueError, match="layout scaled_mm, not row_major"):
        block_fp8_linear(torch.zeros(1, 384, device=DEVICE), prepare_block_fp8(w, s, (128, 128)), backend="scaled_mm")


@pytest.mark.parametrize("bad", [[1, 32], [64, 64], [], [128], [128, 128, 1]], ids=str)
def test_block_shapes_are_refused_by_name(bad: list[int]) -> None:
    w, s = weights(128, 128, (128, 128))
    for given_as in (list, tuple):
        with pytest.raises(ValueError, match=r"\[1, 128\] or \[128, 128\]") as caught:
            prepare_block_fp8(w, s, given_as(bad))
        assert str(list(bad)) in str(caught.value)
    assert block_shape([128, 128]) == block_shape((128, 128)) == (128, 128)


def test_scaled_mm_is_refused_with_a_reason_or_agrees() -> None:
    reason = linear.scaled_mm_refusal(DEVICE)
    if ON_CPU:
        assert reason is not None
        assert "refuses block scales on cpu" in reason
        return
    if reason is not None:
        pytest.skip(reason)
    for block in ((128, 128), (1, 128)):
        for n, k in ((256, 512), (512, 640)):
            w, s = weights(n, k, block)
            x = torch.randn(17, k, device=DEVICE).bfloat16()
            got = block_fp8_linear(x, prepare_block_fp8(w, s, block, layout="scaled_mm"), backend="scaled_mm")
            want = block_fp8_linear_reference(x.float(), prepare_block_fp8(w, s, block))
            assert float((got.float() - want).norm() / want.norm()) < 6e-3


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_fp8_linear(rows: bool, per_token: bool) -> None:
    w = torch.randn(48, 96, generator=torch.Generator().manual_seed(1)).to(FN).to(DEVICE)
    scale = torch.rand(48, 1, device=DEVICE) + 0.5 if rows else torch.tensor(0.02, device=DEVICE)
    p = prepare_fp8(w, scale)
    x = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(2)).bfloat16().to(DEVICE)
    want = fp8_linear_reference(x.float(), p, per_token=per_token)
    for backend in ("triton", "torch", "scaled_mm"):
        got = fp8_linear(x, p, backend=backend, per_token=per_token)
        assert float((got.float() - want).norm() / want.norm()) < 6e-3, backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("refuses", [False, True])
def test_scaled_mm_gives_the_dtype_that_was_asked_and_its_precision_where_torch_can(
    dtype: torch.dtype, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def scaled_mm(*args: Any, output_dtype: torch.dtype) -> torch.Tensor:
        asked.append(output_dtype)
        if refuses and output_dtype != torch.bfloat16:
            raise ValueError("Only bf16 high precision output types are supported for row-wise scaling.")
        return own(*args, output_dtype=output_dtype)

    own = torch.nn.functional.scaled_mm
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(linear, "_row_output", linear._row_output.__wrapped__)
    w = torch.randn(48, 96, generator=torch.Generator().manual_seed(1)).to(FN).to(DEVICE)
    p = prepare_fp8(w, torch.rand(48, generator=torch.Generator().manual_seed(2)).to(DEVICE))
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(3)).to(dtype).to(DEVICE)
    got = fp8_linear(x, p, backend="scaled_mm")
    assert got.dtype == dtype
    if dtype == torch.bfloat16:
        assert asked == [torch.bfloat16]
    error = float((got.float() - fp8_linear_reference(x.float(), p)).norm() / got.float().norm())
    exact = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 6e-3}[dtype]
    assert error < (6e-3 if refuses or not ON_CPU else exact)


def test_operands_of_fp8_linear_that_do_not_fit_are_refused_by_name() -> None:
    p = prepare_fp8(torch.ones(40, 64, device=DEVICE).to(FN), torch.ones((), device=DEVICE))
    x = torch.ones(3, 64, device=DEVICE)
    wrong = ((x.to(FN), None, "x must be float32"), (x.int(), None, "x must be float32"),
             (x[:, :60], None, "x must be [..., 64]"), (x, torch.ones(3, 40), "bias must be float [40]"),
             (x, torch.ones(1), "bias must be float [40]"))  # fmt: skip
    for rows, bias, words in wrong:
        with pytest.raises(ValueError, match=re.escape(words)):
            fp8_linear(rows, p, backend="triton", bias=None if bias is None else bias.to(DEVICE))
    with pytest.raises(ValueError, match="not with block scales"):
        fp8_linear(torch.ones(3, 256, device=DEVICE), prepare_block_fp8(*weights(40, 256, (1, 128)), (1, 128)),
                   backend="triton")  # fmt: skip
    with pytest.raises(ValueError, match="not scaled per row"):
        block_fp8_linear(x, p, backend="triton")


def test_schemes_come_from_the_config() -> None:
    assert scheme_from_config(None) == Scheme()
    assert scheme_from_config({"quant_method": "fp8"}) == Scheme("fp8_tensor")
    assert scheme_from_config({"quant_method": "fp8", "weight_block_size": [128, 128]}) == Scheme(
        "fp8_block", (128, 128)
    )
    assert scheme_from_config({"quant_method": "mxfp4", "modules_to_not_convert": []}) == Scheme("mxfp4")
    group = {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
    assert scheme_from_config({"quant_method": "compressed-tensors", "config_groups": {"g": group}}) == Scheme(
        "fp8_channel"
    )
    for bad in ({"quant_method": "awq"}, {"quant_method": "fp8", "weight_block_size": [64, 64]}):
        with pytest.raises(ValueError, match=r"supported|must be"):
            scheme_from_config(bad)
