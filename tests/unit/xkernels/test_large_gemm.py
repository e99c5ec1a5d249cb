"""The warp-specialised grouped GEMM, its parts run as threads: arithmetic, hand-over of stages and tiles, counters."""

from __future__ import annotations

import linecache
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.ampere.async_copy")

from tests.unit.xkernels import gluon_emulator as emu
from xkernels.device import simulated
from xkernels.ops._details import (
    counters,
    large_experts,
    large_gemm,
    large_load,
    large_ring,
    large_store,
    large_sum,
)
from xkernels.ops.activation import Activation
from xkernels.ops.fused_experts import prepare_experts

F32, I32 = emu.Dtype("f32"), emu.Dtype("i32")


def aligned(ids: Any, experts: int, block: int) -> tuple[Any, Any]:
    """Sorted entries and the expert of each block of so many, those of no local expert (-1) first."""
    flat, rows, owners = ids.ravel(), [], []
    for e in range(-1, experts):
        mine = np.flatnonzero(flat == e)
        blocks = -(-len(mine) // block)
        rows.append(np.concatenate([mine, np.full(blocks * block - len(mine), flat.size)]))
        owners += [e] * blocks
    return np.concatenate(rows).astype(np.int32), np.array(owners, np.int32)


def scalar(x: int) -> Any:
    return emu.value(np.int32(x))


def pointer(data: Any, dtype: Any = F32) -> Any:
    return emu.Pointer(data.reshape(-1), dtype)


class Layer:
    """One random layer and routing, its two projections through the emulator, and both in float64.

    routing: `uniform`; `filtered`, where a third of the entries belongs to no local expert (-1); `one`, where all
    tokens choose the same experts and the others stay empty.
    """

    block = 128

    def __init__(self, m: int, e: int, topk: int, h: int, n: int, fp8: bool, seed: int, routing: str = "uniform",
                 ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.m, self.e, self.topk, self.h, self.n, self.fp8 = m, e, topk, h, n, fp8
        self.dtype = emu.Dtype("fp8" if fp8 else "bf16")
        ids = np.stack([rng.permutation(e)[:topk] for _ in range(m)])
        if routing == "one":
            ids = np.broadcast_to(np.arange(topk), (m, topk))
        elif routing == "filtered":
            ids = np.where(rng.random(ids.shape) < 1 / 3, -1, ids)
        self.rows, self.owners = aligned(ids, e, self.block)
        self.slots = m * topk
        self.valid, self.token = self.rows < self.slots, np.minimum(self.rows // topk, m - 1)
        self.owner = np.repeat(self.owners, self.block)
        self.x, self.w1, self.w2 = (
            self.dtype.round(rng.standard_normal(s).astype(np.float32)) for s in ((m, h), (e, 2 * n, h), (e, h, n))
        )
        deep, across = max(1, h // 128), max(1, n // 128)
        self.xs, gate_up, self.s2 = (
            rng.uniform(0.5, 2, s).astype(np.float32) for s in ((m, deep), (e, across, 2, deep), (e, deep, across))
        )
        self.s1 = np.repeat(gate_up, 16, 1).reshape(e, -1, deep)
        self.weight = rng.uniform(0.1, 1, self.slots).astype(np.float32)
        self.counter = np.zeros(1, np.int32)

    def launch(self, kernel: Any, programs: int, seed: int, stages: int, step: int, **args: Any) -> None:
        post = np.array([self.rows.size, 0], np.int32)
        every = dict.fromkeys(kernel.arg_names) | {
            "sorted_ids": pointer(self.rows, I32), "experts": pointer(self.owners, I32), "post": pointer(post, I32),
            "counter": pointer(self.counter, I32), "num_valid": scalar(self.slots), "TOPK": self.topk, "GROUP": 16,
            "BLOCK_K": step, "STAGES": stages, "FP8": self.fp8,
            "LEAD": max(0, stages // 2 - 1), "PDL": False,
        }  # fmt: skip
        emu.Emulator(seed).launch(kernel, programs, 128, every | args)

    def up(self, kernel: Any, **how: Any) -> tuple[Any, Any]:
        """Activated rows, dequantised, from the emulator and in float64."""
        step, parts, rows = (128, 2, self.rows.size) if self.fp8 else (32, 1, self.rows.size)
        how["stages"] *= 1 if self.fp8 else 2
        out = np.full((rows, self.n), np.nan, np.float32)
        scale = np.full((rows, max(1, self.n // 128)), np.nan, np.float32)
        self.launch(
            kernel, step=step, a=pointer(self.x, self.dtype), a_scale=pointer(self.xs), w_scale=pointer(self.s1),
            w_desc=emu.Descriptor(self.w1.reshape(-1, self.h), [256 // parts, step], self.dtype),
            out_desc=emu.Descriptor(out, [64, 128 // parts], self.dtype), out_scale=pointer(scale),
            N=scalar(2 * self.n), K=scalar(self.h), stride_am=scalar(self.h), stride_sm=scalar(self.h // 128),
            stride_sk=1, stride_wse=scalar(self.s1[0].size), stride_wsn=scalar(self.h // 128), stride_wsk=1,
            stride_os=scalar(self.n // 128), UP=True, MUL_WEIGHT=False, **how,
        )  # fmt: skip
        self.hidden, self.hidden_scale = np.nan_to_num(out), np.nan_to_num(scale)
        want = np.zeros((rows, self.n))
        for e in range(self.e):
            mine = np.flatnonzero((self.owner == e) & self.valid)
            x, w = self.x[self.token[mine]].astype(np.float64), self.w1[e].astype(np.float64)
            if self.fp8:
                x *= np.repeat(self.xs[self.token[mine]], 128, 1)
                w *= np.repeat(np.repeat(self.s1[e], 8, 0), 128, 1)
            y = (x @ w.T).reshape(len(mine), self.n // 8, 2, 8)
            gate, up = (y[:, :, i].reshape(len(mine), self.n) for i in (0, 1))
            want[mine] = gate / (1 + np.exp(-gate)) * up
        got = out * np.repeat(scale, 128, 1) if self.fp8 else out
        return got[self.valid], want[self.valid]  # rows of no expert are zeros in both

    def down(self, kernel: Any, **how: Any) -> tuple[Any, Any]:
        """Entries times their router weights, from what `up` left."""
        step = 128 if self.fp8 else 64
        out = np.full((self.slots, self.h), np.nan, np.float32)
        self.launch(
            kernel, step=step, a_desc=emu.Descriptor(self.hidden, [64, step], self.dtype),
            a_scale=pointer(self.hidden_scale),
            w_desc=emu.Descriptor(self.w2.reshape(-1, self.n), [128 if self.fp8 else 256, step], self.dtype),
            w_scale=pointer(self.s2), out=pointer(out, emu.Dtype("bf16")), weight=pointer(self.weight),
            N=scalar(self.h), K=scalar(self.n), stride_sm=scalar(self.n // 128), stride_sk=1,
            stride_wse=scalar(self.s2[0].size), stride_wsn=scalar(self.s2.shape[2]), stride_wsk=1,
            stride_out=scalar(self.h), UP=False, MUL_WEIGHT=True, **how,
        )  # fmt: skip
        hidden = self.hidden * (np.repeat(self.hidden_scale, 128, 1) if self.fp8 else 1.0)
        want = np.zeros_like(out, np.float64)
        for e in range(self.e):
            mine = np.flatnonzero((self.owner == e) & self.valid)
            scale = np.repeat(np.repeat(self.s2[e], 128, 0)[: self.h], 128, 1) if self.fp8 else 1.0
            y = hidden[mine].astype(np.float64) @ (self.w2[e].astype(np.float64) * scale).T
            want[self.rows[mine]] = y * self.weight[self.rows[mine]][:, None]
        return out, want


def error(got: Any, want: Any) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


CASES = [
    # m, experts, topk, H, N, fp8, programs, stages, routing
    (17, 4, 2, 128, 64, False, 2, 2, "uniform"),
    (200, 3, 2, 320, 144, False, 3, 4, "uniform"),
    (300, 3, 2, 640, 192, False, 3, 3, "uniform"),
    (300, 3, 2, 384, 128, True, 3, 4, "uniform"),
    (130, 2, 2, 768, 256, True, 2, 2, "uniform"),
    (1, 4, 2, 256, 128, True, 5, 3, "uniform"),
    (1, 4, 2, 64, 64, False, 2, 4, "uniform"),
    (64, 8, 2, 192, 64, False, 4, 4, "one"),  # every block's second half is empty, six experts too
    (65, 8, 2, 128, 128, True, 3, 4, "one"),
    (128, 4, 1, 128, 64, False, 3, 3, "one"),  # blocks without padding
    (150, 3, 2, 192, 64, False, 3, 4, "filtered"),
    (150, 3, 2, 128, 128, True, 2, 4, "filtered"),
]


@pytest.mark.parametrize(("m", "e", "topk", "h", "n", "fp8", "programs", "stages", "routing"), CASES)
def test_both_projections_against_float64(
    m: int, e: int, topk: int, h: int, n: int, fp8: bool, programs: int, stages: int, routing: str
) -> None:
    layer = Layer(m, e, topk, h, n, fp8, seed=m, routing=routing)
    how = {"programs": programs, "stages": stages}
    assert error(*layer.up(large_gemm.large_gemm, seed=1, **how)) < (0.03 if fp8 else 0.004)
    assert error(*layer.down(large_gemm.large_gemm, seed=2, **how)) < 0.004
    assert layer.counter[0] == 0


def test_nothing_depends_on_who_takes_which_tile() -> None:
    outs = []
    for programs, seed in ((1, 1), (4, 2), (3, 3)):
        layer = Layer(100, 3, 2, 128, 64, False, seed=9)
        layer.up(large_gemm.large_gemm, programs=programs, stages=4, seed=seed)
        outs.append(layer.down(large_gemm.large_gemm, programs=programs, stages=4, seed=seed)[0])
    assert np.array_equal(outs[0], outs[1])
    assert np.array_equal(outs[0], outs[2])


MODULES = (large_ring, large_store, large_sum, large_load, large_gemm)


def _copy(module: types.ModuleType, text: str) -> types.ModuleType:
    """A module of the same package with another text."""
    name = f"_{module.__name__.rpartition('.')[2]}_{abs(hash(text))}"
    copy = types.ModuleType(name)
    copy.__file__ = str(Path(str(module.__file__)).with_name(name + ".py"))
    linecache.cache[copy.__file__] = (len(text), None, text.splitlines(True), copy.__file__)
    sys.modules[name] = copy
    exec(compile(text, copy.__file__, "exec"), copy.__dict__)
    return copy


def mutated(old: str, new: str, modules: tuple[types.ModuleType, ...] = MODULES) -> Any:
    """The kernel of a copy of its modules, the last of which has it by its own name, with one thing changed."""
    texts = {m: Path(str(m.__file__)).read_text(encoding="utf-8") for m in modules}
    assert sum(text.count(old) for text in texts.values()) >= 1
    names: dict[str, str] = {}
    for module, text in texts.items():
        for before, after in names.items():
            text = text.replace(f"from {before} import", f"from {after} import")
        names[module.__name__] = _copy(module, text.replace(old, new)).__name__
    name = modules[-1].__name__
    return getattr(sys.modules[names[name]], name.rpartition(".")[2])


IN_FP8 = ("mbarrier.init(full.index(i * 2 + 1), count=1)", "f1 = (s * w1)[:, None]")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (IN_FP8[0], IN_FP8[0].replace("count=1", "count=2")),  # waits for ever
        (IN_FP8[1], IN_FP8[1].replace("w1", "w0")),  # scales of another block
        ("warpgroup_mma_wait(1, deps=[acc])", "warpgroup_mma_wait(3, deps=[acc])"),  # gives a stage back too early
        ("mbarrier.init(empty.index(i), count=2)", "mbarrier.init(empty.index(i), count=1)"),
        ("pred=both == 0)", "pred=True)"),
        ("if HALF == 1 and word & 1 == 0:", "if HALF == 1:"),  # leaves rows out
    ],
)
def test_the_emulator_notices(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = old in IN_FP8
    layer, kernel = Layer(200, 2, 2, 256 if fp8 else 64, 2560, fp8, seed=5), mutated(old, new)
    layer.up(large_gemm.large_gemm, programs=2, stages=3, seed=3)
    monkeypatch.setattr(emu, "DEADLINE_S", 1.0)
    try:
        got, want = layer.down(kernel, programs=2, stages=3, seed=3)
    except (AssertionError, TimeoutError):
        return
    assert not error(got, want) < 0.004


TILE = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 16, "num_warps": 8,
        "num_stages": 4, "USE_TMA": True}  # fmt: skip


class Device:
    """What the choice asks of a device."""

    def __init__(self, *features: str) -> None:
        self.known = frozenset(features)

    def features(self) -> frozenset[str]:
        return self.known


def refusal(config: dict[str, Any], *features: str, dtype: torch.dtype = torch.bfloat16, n: int = 64,
            **layer: Any) -> str | None:  # fmt: skip
    e = prepare_experts(torch.zeros(2, 2 * n, 128, dtype=dtype), torch.zeros(2, 128, n, dtype=dtype), **layer)
    with simulated(Device(*features)):  # type: ignore[arg-type]
        return large_experts.refusal(e, config, dtype, torch.empty(1, device="meta"))


def test_a_plain_config_selects_the_kernel_and_whatever_it_is_not_for_stays_with_the_others() -> None:
    assert refusal(TILE, "pdl", "wgmma") is None
    assert refusal({**TILE, "num_stages": 2, "PDL": False}, "wgmma") is None
    short = {**TILE, "BLOCK_SIZE_K": 32, "num_stages": 8}
    assert refusal(short, "wgmma") is None
    assert refusal({**short, "num_stages": 9}, "wgmma") == "num_stages is not 2 to 8"
    assert refusal(TILE, "pdl") == "the device has no wgmma"
    for name, value in (("BLOCK_SIZE_M", 64), ("BLOCK_SIZE_N", 128), ("BLOCK_SIZE_K", 128), ("num_warps", 4),
                        ("USE_TMA", False), ("num_stages", 1), ("num_stages", 5)):  # fmt: skip
        assert str(refusal({**TILE, name: value}, "wgmma")).startswith(name)
    assert refusal({**TILE, "PROGRAMS": 0}, "wgmma") == "PROGRAMS is a rule of the other kernels"
    assert "bfloat16" in str(refusal(TILE, "wgmma", dtype=torch.float16))
    assert refusal(TILE, "wgmma", n=72) == "sizes are no multiples of 64"
    assert refusal(TILE, "wgmma", b2=torch.zeros(2, 128)) == "biases"
    assert "SiLU" in str(refusal(TILE, "wgmma", activation=Activation("swiglu", alpha=1.7, limit=7.0)))


@pytest.mark.parametrize("where", ["rows of 264", "one token of a matrix lying down", "eight bytes into a buffer"])
def test_rows_come_to_the_kernel_as_it_can_gather_them(where: str) -> None:
    """Compiled for such rows it would copy two bytes at once, which the device cannot: the compiler fails."""
    buffer = torch.arange(264 * 256).bfloat16()
    x = {
        "rows of 264": buffer.view(256, 264)[:, :256],
        "one token of a matrix lying down": buffer[:256].view(256, 1).t(),
        "eight bytes into a buffer": buffer[4 : 4 + 2 * 256].view(2, 256),
    }[where]
    got = large_experts.gatherable(x)
    assert torch.equal(got, x)
    assert got.stride() == (256, 1)
    assert got.data_ptr() % 16 == 0
    assert large_experts.gatherable(got) is got


def test_without_such_a_gluon_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xkernels.ops._details.large_gemm", None)  # as where an import of it fails
    why = large_experts.no_gluon()
    assert why is not None
    assert why.startswith("this Triton's Gluon is another one")
    monkeypatch.setattr(large_experts, "_NO_GLUON", why)
    assert refusal(TILE, "wgmma") == why


class Launches:
    """What counters ask of a device: the current stream, and whether it is being captured."""

    def __init__(self) -> None:
        self.stream, self.captured, self.waits = 1, False, 0

    def queue(self) -> int:
        return self.stream

    def capturing(self) -> bool:
        return self.captured

    def synchronize(self) -> None:
        self.waits += 1


def test_launches_that_may_run_at_once_count_in_words_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(counters, "of", lambda tensor: launches)
    monkeypatch.setattr(counters, "_POOLS", {})
    monkeypatch.setattr(counters, "_BLOCK", 8)
    like = torch.empty(3)

    def word() -> int:
        found = counters.counter(like)
        assert found.shape == (1,)
        assert found.dtype == torch.int32
        assert int(found) == 0
        assert found.data_ptr() % 16 == 0  # else a launch is compiled a second time
        kept.append(found)
        return found.data_ptr()

    kept: list[torch.Tensor] = []
    first = word()
    assert word() == first  # one stream: one after the other
    launches.stream = 2
    second = word()
    assert second != first
    launches.captured = True
    graph = [word() for _ in range(10)]  # more than are left: those the graph sets to zero itself
    assert len({first, second, *graph}) == 12
    launches.captured, launches.stream = False, 1
    assert word() == first
    (pool,) = counters._POOLS.values()
    assert launches.waits == len(pool.blocks) == 2  # what the capture took is kept: its graph has the address alone
