"""The weight-streaming grouped GEMM, its three parts run as threads: arithmetic, hand-over, walk over tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.ampere.async_copy")

from tests.unit.xkernels import gluon_emulator as emu
from tests.unit.xkernels.test_large_gemm import I32, Device, Layer, error, mutated, pointer, scalar
from xkernels.device import simulated
from xkernels.ops._details import experts, stream_experts, stream_load, stream_rows
from xkernels.ops._details import stream_gemm as stream_kernel
from xkernels.ops._details.stream_gemm import stream_gemm
from xkernels.ops.activation import Activation
from xkernels.ops.fused_experts import prepare_experts


class Few(Layer):
    """A layer in blocks of 16 rows, whose projections take the arguments of the kernel for many rows.

    by_column: scales lie in memory column by column.
    """

    block = 16

    def __init__(self, *args: Any, by_column: bool = False, **how: Any) -> None:
        super().__init__(*args, **how)
        self.by_column = by_column

    def turned(self, args: dict[str, Any]) -> dict[str, Any]:
        """The scales of `args` the other way round."""
        deep = int(args["K"]) // 128
        rows = np.ascontiguousarray(args["a_scale"].data.reshape(-1, deep).T)
        weights = np.ascontiguousarray(args["w_scale"].data.reshape(self.e, -1, deep).transpose(0, 2, 1))
        return {
            "a_scale": pointer(rows), "stride_sm": scalar(1), "stride_sk": scalar(rows.shape[1]),
            "w_scale": pointer(weights), "stride_wse": scalar(weights[0].size), "stride_wsn": scalar(1),
            "stride_wsk": scalar(weights.shape[2]),
        }  # fmt: skip

    def launch(self, kernel: Any, programs: int, seed: int, stages: int, step: int, **args: Any) -> None:
        post, up, k = np.array([self.rows.size, 0], np.int32), args["UP"], int(args["K"])
        block_n, line = args.pop("block_n"), 128 if self.fp8 else 64
        args["w_desc"] = emu.Descriptor(args["w_desc"].data, [block_n, line], self.dtype)
        if up:
            args |= {"out": pointer(args.pop("out_desc").data, self.dtype), "stride_out": scalar(self.n)}
        else:
            args |= {"a": pointer(args.pop("a_desc").data, self.dtype), "stride_am": scalar(k)}
        args |= self.turned(args) if self.by_column else {}
        every = dict.fromkeys(kernel.arg_names) | args | {
            "sorted_ids": pointer(self.rows, I32), "experts": pointer(self.owners, I32), "post": pointer(post, I32),
            "num_valid": scalar(self.slots), "entries": scalar(self.rows.size), "TOPK": self.topk, "BLOCK_N": block_n,
            "BLOCK_K": 2 * line, "STAGES": stages, "PARTS": 2 if up and self.fp8 else 1, "FP8": self.fp8,
            "EVEN_K": k % (2 * line) == 0, "PDL": True, "READY": self.fp8 or not up,
        }  # fmt: skip
        emu.Emulator(seed).launch(kernel, programs, 64, every)


CASES = [
    # m, experts, topk, H, N, fp8, routing, programs, stages, weight rows
    (5, 4, 2, 128, 128, False, "uniform", 3, 2, 64),
    (40, 3, 2, 384, 128, False, "filtered", 2, 3, 128),
    (33, 8, 2, 256, 128, False, "one", 4, 5, 128),
    (17, 4, 2, 256, 128, True, "uniform", 3, 3, 128),
    (9, 4, 2, 640, 384, True, "uniform", 2, 2, 128),  # an odd number of lines in both projections
    (40, 5, 2, 384, 256, True, "filtered", 2, 4, 128),
    (1, 4, 2, 1152, 128, True, "uniform", 5, 6, 128),
]


@pytest.mark.parametrize(("m", "e", "topk", "h", "n", "fp8", "routing", "programs", "stages", "block_n"), CASES)
def test_both_projections_against_float64(
    m: int, e: int, topk: int, h: int, n: int, fp8: bool, routing: str, programs: int, stages: int, block_n: int
) -> None:
    layer = Few(m, e, topk, h, n, fp8, seed=m, routing=routing)
    how = {"programs": programs, "stages": stages, "block_n": block_n}
    assert error(*layer.up(stream_gemm, seed=1, **how)) < (0.03 if fp8 else 0.004)
    assert error(*layer.down(stream_gemm, seed=2, **how)) < 0.004


def test_scales_may_lie_in_memory_column_by_column() -> None:
    layer = Few(20, 3, 2, 640, 384, True, seed=8, by_column=True)
    how = {"programs": 2, "stages": 5, "block_n": 128}
    assert error(*layer.up(stream_gemm, seed=1, **how)) < 0.03
    assert error(*layer.down(stream_gemm, seed=2, **how)) < 0.004


def test_nothing_depends_on_who_takes_which_tile() -> None:
    outs = []
    for programs, seed in ((1, 1), (4, 2), (3, 3)):
        layer = Few(20, 3, 2, 256, 128, False, seed=9)
        how = {"programs": programs, "stages": 3, "block_n": 64}
        layer.up(stream_gemm, seed=seed, **how)
        outs.append(layer.down(stream_gemm, seed=seed, **how)[0])
    assert np.array_equal(outs[0], outs[1])
    assert np.array_equal(outs[0], outs[2])


MODULES = (stream_load, stream_rows, stream_kernel)


def judged(kernel: Any, fp8: bool) -> float:
    """The error of an up projection whose K is no whole number of stages in FP8, with more tiles than programs."""
    layer = Few(20, 2, 2, 384, 384, fp8, seed=5, by_column=fp8)
    return error(*layer.up(kernel, seed=3, programs=2, stages=2, block_n=128))


@pytest.mark.parametrize("fp8", [False, True])
def test_of_the_kernel_as_it_is_the_emulator_notices_nothing(fp8: bool) -> None:
    assert judged(stream_gemm, fp8) < 0.03


@pytest.mark.parametrize(
    ("old", "new", "fp8"),
    [
        ("warpgroup_mma_wait(SUBS, deps=[acc])", "warpgroup_mma_wait(2 * SUBS, deps=[acc])", False),  # back too early
        ("mbarrier.init(empty.index(i), count=1)", "mbarrier.init(empty.index(i), count=2)", False),  # waits for ever
        ("count=1, pred=k > 0)", "count=1, pred=k >= 0)", False),  # gives back what it did not take
        ("gl.where(k + 128 < K, other, 0.0)", "other", True),  # a line beyond K
        ("turn // 8 % 2", "turn // 8 % 2 ^ 1", True),  # scales of the other block
        ("line * stride_sk", "line", True),  # of another row
        ("line * stride_wsk", "line", True),
        ("other * second", "other * _factors(as_bufs, ws_bufs, index * 2 + 1, layout)", True),  # of a later stage
        ("at_w = first + part * BLOCK_N", "at_w = first", True),  # both parts the same weights
    ],
)
def test_the_emulator_notices(old: str, new: str, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emu, "DEADLINE_S", 1.0)
    kernel = mutated(old, new, MODULES)
    try:
        found = judged(kernel, fp8)
    except (AssertionError, TimeoutError):
        return
    assert not found < 0.03


TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4,
        "num_stages": 6, "USE_TMA": True}  # fmt: skip


def refusal(config: dict[str, Any], *features: str, dtype: torch.dtype = torch.bfloat16, n: int = 128,
            **layer: Any) -> str | None:  # fmt: skip
    e = prepare_experts(torch.zeros(2, 2 * n, 128, dtype=dtype), torch.zeros(2, 128, n, dtype=dtype), **layer)
    with simulated(Device(*features)):  # type: ignore[arg-type]
        return stream_experts.refusal(e, config, dtype, torch.empty(1, device="meta"))


def test_a_plain_config_selects_the_kernel_and_whatever_it_is_not_for_stays_with_the_others() -> None:
    assert refusal(TILE, "pdl", "wgmma") is None
    assert refusal({**TILE, "BLOCK_SIZE_N": 64, "num_stages": 10, "PDL": False}, "wgmma") is None
    assert refusal(TILE, "pdl") == "the device has no wgmma"
    assert refusal({**TILE, "num_stages": 7}, "wgmma") == "num_stages is not 6"
    for name, value in (("BLOCK_SIZE_M", 32), ("BLOCK_SIZE_N", 256), ("BLOCK_SIZE_K", 64), ("num_warps", 8),
                        ("USE_TMA", False), ("num_stages", 5)):  # fmt: skip
        assert str(refusal({**TILE, name: value}, "wgmma")).startswith(name)
    assert refusal({**TILE, "INLINE": True}, "wgmma") == "INLINE is a rule of the other kernels"
    assert "bfloat16" in str(refusal(TILE, "wgmma", dtype=torch.float16))
    assert refusal(TILE, "wgmma", n=64) == "sizes are no multiples of 128"
    assert refusal(TILE, "wgmma", b2=torch.zeros(2, 128)) == "biases"
    assert "SiLU" in str(refusal(TILE, "wgmma", activation=Activation("swiglu", alpha=1.7, limit=7.0)))


def test_an_fp8_config_is_for_one_program_or_for_two_that_share_its_stages_and_takes_rows_quantised() -> None:
    form = stream_experts._FORMS["fp8_block"]
    assert [(form.programs(n), form.ring(n)) for n in form.counts(128)] == [(2, 2), (1, 5), (1, 6)]
    why = stream_experts.other_config
    assert why("fp8_block", {**TILE, "num_stages": 12}) is None
    assert why("fp8_block", {**TILE, "num_stages": 8}) is None
    assert why("fp8_block", {**TILE, "num_stages": 6}) == "num_stages is not 8 or 10 or 12"
    assert why("fp8_block", {**TILE, "BLOCK_SIZE_N": 64, "num_stages": 12}) == "BLOCK_SIZE_N is not 128"
    assert why("mxfp4", TILE) == "neither bfloat16 nor block scales: mxfp4"
    assert not experts._inline({**TILE, "num_stages": 12}, 128)
    assert experts._inline({**TILE, "num_stages": 6}, 128)
