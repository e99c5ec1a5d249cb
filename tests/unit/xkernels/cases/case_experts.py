"""Fused experts against the float32 twin: dtypes, quantisation schemes, odd shapes, tile paths."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from xkernels.device import is_interpreted, live
from xkernels.ops.activation import SILU, Activation
from xkernels.ops.align import moe_align_block_size
from xkernels.ops.fused_experts import (
    PreparedExperts,
    expert_slots,
    expert_slots_reference,
    fused_experts,
    fused_experts_reference,
    prepare_experts,
)
from xkernels.ops.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from xkernels.ops.prepared import Descriptors, deinterleave, interleave
from xkernels.ops.reduce import moe_sum_reduce
from xkernels.ops.scheme import Scheme, scheme_from_config

DEVICE = live().torch_device()
FP8 = torch.float8_e4m3fn
# Relative RMS error against the twin: rounding of operands and of the intermediate. In FP8 the bf16 rounding of the
# intermediate flips the last of three mantissa bits of some of it; a wrong scale or row costs 0.1 and more.
LIMIT = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
FP8_LIMIT = 4e-2


def config(m: int, n: int, k: int, **extra: Any) -> dict[str, Any]:
    return {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 2, **extra}


def routed(tokens: int, experts: int, topk: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    weights, ids = torch.topk(torch.softmax(torch.randn(tokens, experts, generator=g), -1), topk, -1)
    return weights.to(DEVICE), ids.int().to(DEVICE)


def random(*shape: int, seed: int, scale: float = 0.125) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def ident(tile: dict[str, Any]) -> str:
    return "-".join(map(str, tile.values()))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert not got.isnan().any()
    return float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-9))


SHAPES = [(1, 4, 2, 64, 32), (17, 5, 3, 72, 20), (6, 8, 2, 40, 24)]  # tokens, experts, topk, H, N


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_unquantised(dtype: torch.dtype, shape: tuple[int, ...], backend: str) -> None:
    tokens, e, k, h, n = shape
    p = prepare_experts(random(e, 2 * n, h, seed=1).to(dtype), random(e, h, n, seed=2).to(dtype))
    x = random(tokens, 2 * h, seed=3, scale=1).to(dtype)[:, ::2]  # strided
    weights, ids = routed(tokens, e, k)
    tile = config(16, 32, 32)
    got = fused_experts(x, p, weights, ids, backend=backend, up=tile, down=tile)
    assert error(got, fused_experts_reference(x.float(), p, weights, ids)) < LIMIT[dtype]


def test_unwritten_memory_shows() -> None:
    assert torch.empty(3, device=DEVICE).isnan().all()


def test_nothing_one_expert_and_absent_experts() -> None:
    p = prepare_experts(random(4, 48, 32, seed=1), random(4, 32, 24, seed=2))
    tile = config(16, 32, 32)
    empty = fused_experts(torch.empty(0, 32, device=DEVICE), p, *routed(0, 4, 2), backend="triton", up=tile, down=tile)
    assert empty.shape == (0, 32)
    x, (weights, ids) = random(37, 32, seed=3, scale=1), routed(37, 4, 2)
    for routing in (torch.full_like(ids, 3), ids.where(ids != 1, -1), torch.full_like(ids, -1)):
        want = fused_experts_reference(x, p, weights, routing)
        for backend in ("triton", "torch"):
            got = fused_experts(x, p, weights, routing, backend=backend, up=tile, down=tile)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert (want == 0).all()


def test_expert_map_is_the_ids_of_one_rank() -> None:
    full = prepare_experts(random(6, 32, 32, seed=1), random(6, 32, 16, seed=2))
    x, (weights, ids) = random(9, 32, seed=3, scale=1), routed(9, 6, 3)
    tile, total = config(16, 32, 32), torch.zeros(9, 32, device=DEVICE)
    for rank in range(2):
        own = slice(3 * rank, 3 * rank + 3)
        part = prepare_experts(random(6, 32, 32, seed=1)[own], random(6, 32, 16, seed=2)[own])
        mapping = torch.full((6,), -1, dtype=torch.int32, device=DEVICE)
        mapping[own] = torch.arange(3, dtype=torch.int32, device=DEVICE)
        total += fused_experts(x, part, weights, ids, backend="triton", up=tile, down=tile, expert_map=mapping)
    torch.testing.assert_close(total, fused_experts_reference(x, full, weights, ids), rtol=1e-4, atol=1e-5)


OPTIONS = [
    {"activation": Activation("swiglu", alpha=1.702, limit=7.0), "biases": True},
    {"activation": Activation("silu", limit=0.5), "apply_router_weight_on_input": True},
    {"activation": Activation("clamped", limit=1.0), "routed_scaling_factor": 2.5},
]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o["activation"].kind)
@pytest.mark.parametrize(("backend", "rows"), [("triton", 16), ("triton", 1), ("torch", 16)])
def test_activations_biases_and_scaling(option: dict[str, Any], backend: str, rows: int) -> None:
    kw = dict(option)
    activation, biases = kw.pop("activation"), kw.pop("biases", False)
    b1 = random(4, 48, seed=5, scale=1) if biases else None
    b2 = random(4, 32, seed=6, scale=1) if biases else None
    p = prepare_experts(random(4, 48, 32, seed=1), random(4, 32, 24, seed=2), b1=b1, b2=b2, activation=activation)
    x, (weights, ids) = random(9, 32, seed=3, scale=2), routed(9, 4, 2)
    tile = config(rows, 32, 32)
    got = fused_experts(x, p, weights, ids, backend=backend, up=tile, down=tile, **kw)
    torch.testing.assert_close(got, fused_experts_reference(x, p, weights, ids, **kw), rtol=1e-4, atol=1e-4)


def quantise(w: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "mxfp4":
        return quantize_mxfp4(w)
    e, r, c = w.shape
    if kind == "fp8_block":
        blocks = w.view(e, r // 128, 128, c // 128, 128)
        scale = blocks.abs().amax((2, 4)) / 448
        return (blocks / scale[:, :, None, :, None]).to(FP8).view(w.shape), scale
    scale = w.abs().amax(2 if kind == "fp8_channel" else (1, 2)) / 448
    return (w / scale.view(e, -1, 1)).to(FP8), scale.unsqueeze(-1) if kind == "fp8_channel" else scale


def quantised(kind: str, e: int, h: int, n: int, activation: Activation = SILU) -> PreparedExperts:
    (w1, s1), (w2, s2) = quantise(random(e, 2 * n, h, seed=1), kind), quantise(random(e, h, n, seed=2), kind)
    scheme = Scheme(kind, (128, 128) if kind == "fp8_block" else None)  # type: ignore[arg-type]
    return prepare_experts(w1, w2, scheme=scheme, w1_scale=s1, w2_scale=s2, activation=activation)


TILES = [
    config(16, 64, 128), config(64, 256, 128), config(16, 64, 64, USE_TMA=True), config(32, 64, 128, SWAP_AB=True),
    config(64, 64, 128, PROGRAMS=1), config(16, 64, 128, INLINE=False), config(64, 128, 128),
    config(64, 128, 128, QUANT_OUT=False, GROUP_SIZE_M=1),
]  # fmt: skip


@pytest.mark.parametrize("tile", TILES, ids=ident)
@pytest.mark.parametrize("kind", ["fp8_tensor", "fp8_channel", "fp8_block", "mxfp4"])
def test_quantised(kind: str, tile: dict[str, Any]) -> None:
    p = quantised(kind, 3, 256, 128)
    x, (weights, ids) = random(9, 256, seed=3, scale=1).bfloat16(), routed(9, 3, 2)
    got = fused_experts(x, p, weights, ids, backend="triton", up=tile, down=tile)
    limit = 6e-3 if kind == "mxfp4" else FP8_LIMIT
    assert error(got, fused_experts_reference(x.float(), p, weights, ids)) < limit
    if tile is TILES[0]:
        torch_row = fused_experts(x, p, weights, ids, backend="torch")
        assert error(torch_row, fused_experts_reference(x.float(), p, weights, ids)) < 2e-2


# BLOCK_SIZE_M 1: no tile divides the weights; all of a row's chunks are asked for ahead, or one of several.
VECTORS = [config(1, 16, 64, num_stages=4), config(1, 64, 32, num_stages=1), config(1, 32, 128, num_warps=2)]
# The first is narrower than a group of scales, and of the last rows of one program lie in two blocks.
WIDE = [config(1, 16, 64, num_stages=1), config(1, 64, 256, num_warps=8), config(1, 512, 128)]


@pytest.mark.parametrize("tile", VECTORS, ids=ident)
@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
def test_vectors_unquantised(dtype: torch.dtype, tile: dict[str, Any]) -> None:
    tokens, e, k, h, n = 3, 5, 3, 72, 40
    p = prepare_experts(random(e, 2 * n, h, seed=1).to(dtype), random(e, h, n, seed=2).to(dtype))
    x = random(tokens, 2 * h, seed=3, scale=1).to(dtype)[:, ::2]  # strided
    weights, ids = routed(tokens, e, k)
    got = fused_experts(x, p, weights, ids, backend="triton", up=tile, down=tile)
    assert error(got, fused_experts_reference(x.float(), p, weights, ids)) < LIMIT[dtype]


def test_vectors_of_nothing_one_expert_and_absent_experts() -> None:
    p, tile = prepare_experts(random(4, 48, 32, seed=1), random(4, 32, 24, seed=2)), VECTORS[0]
    empty = fused_experts(torch.empty(0, 32, device=DEVICE), p, *routed(0, 4, 2), backend="triton", up=tile, down=tile)
    assert empty.shape == (0, 32)
    x, (weights, ids) = random(7, 32, seed=3, scale=1), routed(7, 4, 2)
    for routing in (torch.full_like(ids, 3), ids.where(ids != 1, -1), torch.full_like(ids, -1)):
        want = fused_experts_reference(x, p, weights, routing)
        got = fused_experts(x, p, weights, routing, backend="triton", up=tile, down=tile)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_vectors_of_slots_and_of_rows_alone() -> None:
    p = prepare_experts(random(6, 96, 72, seed=1).bfloat16(), random(6, 72, 48, seed=2).bfloat16())
    x, (weights, ids), tile = random(4, 72, seed=3, scale=1).bfloat16(), routed(4, 6, 3), VECTORS[1]
    slots = expert_slots(x, p, weights, moe_align_block_size(ids, 1, 6), tile, tile)
    assert error(slots, expert_slots_reference(x, p, weights, ids)) < LIMIT[torch.bfloat16]
    together = fused_experts(x, p, weights, ids, backend="triton", up=tile, down=tile)
    assert torch.equal(moe_sum_reduce(slots), together)
    for row in range(4):  # whose bits do not depend on the others
        one = slice(row, row + 1)
        alone = fused_experts(x[one], p, weights[one], ids[one], backend="triton", up=tile, down=tile)
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("tile", WIDE, ids=ident)
@pytest.mark.parametrize("kind", ["fp8_tensor", "fp8_channel", "fp8_block", "mxfp4"])
def test_vectors_quantised(kind: str, tile: dict[str, Any]) -> None:
    p = quantised(kind, 3, 256, 128)
    x, (weights, ids) = random(2, 256, seed=3, scale=1).bfloat16(), routed(2, 3, 2)
    got = fused_experts(x, p, weights, ids, backend="triton", up=tile, down=tile)
    limit = 6e-3 if kind == "mxfp4" else FP8_LIMIT
    assert error(got, fused_experts_reference(x.float(), p, weights, ids)) < limit


def check_routings(p: Any, tile: dict[str, Any], sizes: tuple[int, ...], limit: float) -> None:
    """A whole layer beside the twin, rows that lie apart, odd routings, and the same bits again."""
    e, h = p.num_experts, p.hidden
    for tokens in sizes:
        x, (weights, ids) = random(tokens, 2 * h, seed=3, scale=1).to(torch.bfloat16)[:, ::2], routed(tokens, e, 2)
        for routing in (ids, ids.where(ids != 1, -1), torch.full_like(ids, 2), torch.full_like(ids, -1)):
            got = fused_experts(x, p, weights, routing, backend="triton", up=tile, down=tile)
            want = fused_experts_reference(x.float(), p, weights, routing)
            assert error(got, want) < limit
            again = fused_experts(x, p, weights, routing, backend="triton", up=tile, down=tile)
            assert torch.equal(got, again)


@pytest.mark.skipif("wgmma" not in live().features(), reason="needs a device with those products")
@pytest.mark.parametrize("kind", ["none", "fp8_block"])
@pytest.mark.parametrize("extra", [{}, {"num_stages": 2}, {"PDL": False, "GROUP_SIZE_M": 8}], ids=str)
def test_many_rows_on_hopper(kind: str, extra: dict[str, Any]) -> None:
    e, h, n = 5, 384, 256
    p = quantised(kind, e, h, n) if kind == "fp8_block" else prepare_experts(
        random(e, 2 * n, h, seed=1).to(torch.bfloat16), random(e, h, n, seed=2).to(torch.bfloat16)
    )  # fmt: skip
    tile = config(
        128, 256, 128 if kind == "fp8_block" else 64, **{"num_warps": 8, "num_stages": 4, "USE_TMA": True} | extra
    )
    check_routings(p, tile, (1, 63, 64, 65, 700), FP8_LIMIT if kind == "fp8_block" else LIMIT[torch.bfloat16])


@pytest.mark.skipif("wgmma" not in live().features(), reason="needs a device with those products")
@pytest.mark.parametrize(
    ("kind", "width", "stages", "extra"),
    [
        ("none", 128, 6, {}),
        ("none", 64, 10, {}),
        ("fp8_block", 128, 12, {}),
        ("fp8_block", 128, 10, {}),
        ("fp8_block", 128, 8, {}),
        ("fp8_block", 128, 8, {"PDL": False}),
    ],
)
def test_streamed_weights_on_hopper(kind: str, width: int, stages: int, extra: dict[str, Any]) -> None:
    e, h, n = 5, 384, 256
    p = quantised(kind, e, h, n) if kind == "fp8_block" else prepare_experts(
        random(e, 2 * n, h, seed=1).to(torch.bfloat16), random(e, h, n, seed=2).to(torch.bfloat16)
    )  # fmt: skip
    tile = config(16, width, 128, **{"num_warps": 4, "num_stages": stages, "USE_TMA": True} | extra)
    check_routings(p, tile, (1, 15, 16, 17, 300), FP8_LIMIT if kind == "fp8_block" else LIMIT[torch.bfloat16])


def test_padding_of_mxfp4_does_not_change_the_result() -> None:
    w1, w2 = random(2, 2 * 32, 64, seed=1), random(2, 64, 32, seed=2)
    (q1, s1), (q2, s2) = quantize_mxfp4(w1), quantize_mxfp4(w2)
    plain = prepare_experts(q1, q2, scheme=Scheme("mxfp4"), w1_scale=s1, w2_scale=s2)

    def halves(t: torch.Tensor) -> torch.Tensor:
        garbage = torch.full_like(t[:, :32], 0xF7)
        return torch.cat([t[:, :32], garbage, t[:, 32:], garbage], 1)

    wide2, ws2 = (torch.cat([t, torch.full_like(t, 0xF7)], 2) for t in (q2, s2))
    padded = prepare_experts(halves(q1), wide2, scheme=Scheme("mxfp4"), w1_scale=halves(s1), w2_scale=ws2,
                             intermediate=32)  # fmt: skip
    assert padded.intermediate == plain.intermediate == 32
    assert padded.padded == plain.padded == 64
    x, (weights, ids), tile = random(5, 64, seed=3, scale=1), routed(5, 2, 1), config(16, 32, 32)
    calls = [fused_experts(x, p, weights, ids, backend="triton", up=tile, down=tile) for p in (plain, padded)]
    assert torch.equal(*calls)


def test_prepared_weights_leave_the_checkpoint_alone() -> None:
    w1, w2 = random(2, 40, 16, seed=1), random(2, 16, 20, seed=2)
    before = w1.clone(), w2.clone()
    p = prepare_experts(w1, w2)
    assert torch.equal(deinterleave(p.w1, 20), w1)
    p.w1.zero_()
    p.w2.zero_()
    assert torch.equal(w1, before[0])
    # GPT-OSS stores gate and up alternating
    mixed = torch.stack([w1[:, :20], w1[:, 20:]], 2).flatten(1, 2)
    assert torch.equal(prepare_experts(mixed, w2, gate_up_interleaved=True).w1, interleave(w1))


def test_mxfp4_codes() -> None:
    x = torch.tensor([[0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0] * 4], device=DEVICE)
    packed, scale = quantize_mxfp4(x)
    assert scale.tolist() == [[127]]
    assert torch.equal(dequantize_mxfp4(packed, scale), x)


def test_descriptors_are_bounded_and_owned() -> None:
    made = Descriptors(limit=2)
    weight = torch.zeros(2, 32, 32, device=DEVICE)
    first = made.get("w1", weight, 16, 16)
    assert made.get("w1", weight, 16, 16) is first
    for size in (8, 32):
        made.get("w1", weight, size, 16)
    assert len(made) == 2
    assert made.get("w1", weight, 16, 16) is not first


def test_refusals() -> None:
    w1, w2 = random(2, 32, 16, seed=1), random(2, 16, 16, seed=2)
    p = prepare_experts(w1, w2)
    x, (weights, ids) = random(3, 16, seed=3), routed(3, 2, 1)
    tile = config(16, 32, 32)
    with pytest.raises(ValueError, match="no backend 'cutlass'"):
        fused_experts(x, p, weights, ids, backend="cutlass")
    with pytest.raises(ValueError, match="needs the configs"):
        fused_experts(x, p, weights, ids, backend="triton")
    with pytest.raises(ValueError, match="share BLOCK_SIZE_M"):
        fused_experts(x, p, weights, ids, backend="triton", up=tile, down=config(32, 32, 32))
    with pytest.raises(ValueError, match="w1 must be"):
        prepare_experts(w1, w2[:, :, :8])
    with pytest.raises(ValueError, match=r"scheme fp8_tensor has weights of"):
        prepare_experts(w1, w2, scheme=Scheme("fp8_tensor"))
    with pytest.raises(ValueError, match="name the scheme"):
        prepare_experts(w1, w2, w1_scale=torch.ones(2), w2_scale=torch.ones(2))
    few = config(1, 8, 32)
    with pytest.raises(ValueError, match="BLOCK_SIZE_N is 8; must be a power of two from 16"):
        fused_experts(x, p, weights, ids, backend="triton", up=few, down=few)
    big, blocks = config(16, 32, 256), quantised("fp8_block", 2, 256, 128)
    x, (weights, ids) = random(1, 256, seed=3), routed(1, 2, 1)
    with pytest.raises(ValueError, match="must divide the scale group"):
        fused_experts(x, blocks, weights, ids, backend="triton", up=big, down=big)


@pytest.mark.skipif(is_interpreted(), reason="needs compiled kernels")
def test_one_compile_serves_all_batch_sizes() -> None:
    from xkernels.ops._details import moe_gemm

    p = prepare_experts(random(8, 64, 64, seed=1).bfloat16(), random(8, 64, 32, seed=2).bfloat16())
    tile, counts = config(16, 32, 32), set()
    for tokens in (1, 3, 16, 24, 100):
        x = random(tokens, 64, seed=3).bfloat16()
        fused_experts(x, p, *routed(tokens, 8, 2), backend="triton", up=tile, down=tile)
        counts.add(sum(len(cache[0]) for cache in moe_gemm.up_gemm.device_caches.values()))
    assert len(counts) == 1


def test_descriptors_are_freed_with_their_weights_and_made_once_across_threads() -> None:
    p = prepare_experts(random(2, 32, 16, seed=1), random(2, 16, 16, seed=2))
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(p.descriptors.get, "w1", p.w1, 16, 16) for _ in range(32)]
        assert len({id(call.result()) for call in calls}) == 1
    weight = weakref.ref(p.w1)
    del calls, p
    gc.collect()
    assert weight() is None


def test_the_quantisation_config_is_not_changed() -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    before = copy.deepcopy(config)
    assert scheme_from_config(config) == Scheme("fp8_block", (128, 128))
    assert config == before
