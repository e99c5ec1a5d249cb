"""Experts from a checkpoint's tensors against float32 products of them, which know nothing of the prepared layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from xkernels.device import live
from xkernels.ops.expert_config import check_config
from xkernels.ops.fused_experts import fused_experts, prepare_experts
from xkernels.ops.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from xkernels.ops.scheme import Scheme, block_shape

DEVICE = live().torch_device()
FP8 = torch.float8_e4m3fn
# Activations are rounded to FP8 on the way, which the products here know nothing of: a wrong scale costs 0.3 and more.
LIMIT = {"fp8_tensor": 7e-2, "fp8_channel": 7e-2, "fp8_block": 7e-2, "mxfp4": 6e-3}


def config(m: int, n: int, k: int, **extra: Any) -> dict[str, Any]:
    return {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 2, **extra}


# Every path of the two backends and the twin; the kernels' tiles quantise inside, outside, and row by row. Tiles of
# float32 are large: with few stages they fit the shared memory of a small device.
PATHS: list[tuple[str, dict[str, Any]]] = [
    ("triton", config(16, 64, 128, num_stages=2)), ("triton", config(64, 128, 64, num_stages=1)),
    ("triton", config(1, 32, 256)), ("torch", {}), ("reference", {}),
]  # fmt: skip


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def routed(tokens: int, experts: int, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = torch.topk(torch.softmax(random(tokens, experts, seed=7), -1), topk, -1)
    return weights.contiguous(), ids.int()


def dense(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The layer in float32, token by token."""
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            e = int(ids[token, slot])
            inner = torch.nn.functional.silu(gate[e] @ x[token]) * (up[e] @ x[token])
            out[token] += weights[token, slot] * (down[e] @ inner)
    return out


def agrees(experts: Any, halves: tuple[torch.Tensor, torch.Tensor, torch.Tensor], limit: float) -> None:
    x, (weights, ids) = random(5, experts.hidden, seed=3), routed(5, experts.num_experts, 2)
    want = dense(x, *halves, weights, ids)
    for backend, tile in PATHS:
        got = fused_experts(x, experts, weights, ids, backend=backend, up=tile, down=tile)
        assert not got.isnan().any()
        assert float((got - want).norm() / want.norm()) < limit, (backend, tile)


def quantise(w: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and what both are worth."""
    if kind == "mxfp4":
        columns = w.shape[2]
        codes, scale = quantize_mxfp4(torch.nn.functional.pad(w, (0, -columns % 32)))
        return codes[:, :, : columns // 2], scale, dequantize_mxfp4(codes, scale)[:, :, :columns]
    if kind == "fp8_block":
        scale = w.unflatten(1, (-1, 128)).unflatten(3, (-1, 128)).abs().amax((2, 4)) / 448
        wide = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    else:
        scale = w.abs().amax(2 if kind == "fp8_channel" else (1, 2)) / 448
        wide = scale.view(w.shape[0], -1, 1)
    codes = (w / wide).to(FP8)
    return codes, scale, codes.float() * wide


SIZES = [("fp8_block", 256, 128)] + [
    (kind, h, n)
    for kind in ("fp8_tensor", "fp8_channel", "mxfp4")
    for h, n in ((256, 96), (160, 72), (192, 200))  # columns, no multiples of 128
]


@pytest.mark.parametrize(("kind", "h", "n"), SIZES)
def test_sizes_beside_the_tiles(kind: str, h: int, n: int) -> None:
    (c1, s1, w1), (c2, s2, w2) = (
        quantise(random(3, *shape, seed=seed, scale=0.125), kind) for seed, shape in ((1, (2 * n, h)), (2, (h, n)))
    )
    scheme = Scheme(kind, (128, 128) if kind == "fp8_block" else None)  # type: ignore[arg-type]
    experts = prepare_experts(c1, c2, scheme=scheme, w1_scale=s1, w2_scale=s2)
    agrees(experts, (w1[:, :n], w1[:, n:], w2), LIMIT[kind])


@pytest.mark.parametrize("alternating", [False, True])
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("kind", ["fp8_tensor", "fp8_channel"])
def test_scales_of_gate_and_up(kind: str, columns: int, alternating: bool) -> None:
    """One scale for both projections of an expert or one for each, and rows that alternate or do not."""
    e, h, n, used = 3, 64, 32, 24  # checkpoints pad the intermediate size
    gate, up, down = (random(e, *s, seed=i).to(FP8) for i, s in enumerate(((n, h), (n, h), (h, n))))
    s2 = torch.full((e,), 0.25, device=DEVICE)
    if kind == "fp8_tensor":
        s1 = torch.tensor([[0.01, 0.5], [0.02, 0.3], [0.4, 0.03]], device=DEVICE)[:, :columns]
        wide = [s1[:, 0, None, None], s1[:, -1, None, None]]
        s1 = s1.squeeze(1)
    else:
        both = [random(e, n, seed=i).abs() + 0.1 for i in (8, 9)]
        wide = [s[:, :, None] for s in both]
        s1 = torch.stack(both, 2).flatten(1) if alternating else torch.cat(both, 1)
        s1 = s1 if columns == 1 else s1[:, :, None]
    parts = [t.view(torch.uint8) for t in (gate, up)]
    w1 = (torch.stack(parts, 2).flatten(1, 2) if alternating else torch.cat(parts, 1)).view(FP8)
    experts = prepare_experts(
        w1, down, scheme=Scheme(kind), w1_scale=s1, w2_scale=s2, gate_up_interleaved=alternating,  # type: ignore[arg-type]
        intermediate=used,
    )  # fmt: skip
    halves = tuple((t.float() * s)[:, :used] for t, s in zip((gate, up), wide, strict=True))
    agrees(experts, (*halves, down.float()[:, :, :used] * 0.25), LIMIT[kind])


def blocks(h: int, n: int, block: tuple[int, int] = (128, 128)) -> None:
    bn, bk = block
    w1, w2 = (torch.zeros(2, *shape, device=DEVICE).to(FP8) for shape in ((2 * n, h), (h, n)))
    s1, s2 = (torch.ones(2, -(-r // bn), -(-c // bk), device=DEVICE) for r, c in ((2 * n, h), (h, n)))
    prepare_experts(w1, w2, scheme=Scheme("fp8_block", block), w1_scale=s1, w2_scale=s2)


@pytest.mark.parametrize("block", [(64, 64), (128, 64), (64, 128), (256, 128), (128, 256), (1, 128), (16, 128)])
def test_other_blocks_are_refused(block: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"not \[{block[0]}, {block[1]}\]"):
        blocks(256, 128, block)


@pytest.mark.parametrize(("h", "n", "words"), [
    (256, 96, "intermediate size must be a multiple of 128 with scheme fp8_block, not 96"),
    (256, 200, "not 200"), (256, 64, "not 64"), (256, 100, "not 100"),
    (200, 128, "hidden size must be a multiple of 128 with scheme fp8_block, not 200"),
])  # fmt: skip
def test_rests_beside_blocks_are_refused(h: int, n: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        blocks(h, n)


def test_blocks_are_lists_or_tuples() -> None:
    assert Scheme("fp8_block", [128, 128]) == Scheme("fp8_block", (128, 128))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not 128"):
        block_shape(128)  # type: ignore[arg-type]


def test_scales_of_mxfp4() -> None:
    (c1, s1), (c2, s2) = quantize_mxfp4(random(2, 64, 64, seed=1)), quantize_mxfp4(random(2, 64, 32, seed=2))
    scheme, x, (weights, ids), tile = Scheme("mxfp4"), random(3, 64, seed=3), routed(3, 2, 1), config(16, 32, 64)
    outs = [
        fused_experts(
            x, prepare_experts(c1, c2, scheme=scheme, w1_scale=s1.view(dtype), w2_scale=s2.view(dtype)), weights, ids,
            backend="triton", up=tile, down=tile,
        )
        for dtype in (torch.uint8, torch.float8_e8m0fnu)
    ]  # fmt: skip
    assert torch.equal(*outs)
    with pytest.raises(ValueError, match=r"w2_scale of mxfp4 must be uint8 or float8_e8m0fnu, not torch.float32"):
        prepare_experts(c1, c2, scheme=scheme, w1_scale=s1, w2_scale=s2.float())
    with pytest.raises(ValueError, match="hidden size must be a multiple of 32 with scheme mxfp4, not 48"):
        prepare_experts(c1[:, :, :24], c2[:, :48], scheme=scheme, w1_scale=s1[:, :, :1], w2_scale=s2[:, :48])


def test_scales_of_fp8_are_no_integers() -> None:
    w1, w2 = random(2, 64, 64, seed=1).to(FP8), random(2, 64, 32, seed=2).to(FP8)
    scale = torch.ones(2, device=DEVICE)
    with pytest.raises(ValueError, match=r"w1_scale must be a floating-point tensor, not torch.int32"):
        prepare_experts(w1, w2, scheme=Scheme("fp8_tensor"), w1_scale=scale.int(), w2_scale=scale)


TILE = config(16, 32, 32)
WEIGHTS, IDS = torch.full((3, 2), 0.5), torch.tensor([[0, 1], [2, 3], [5, 4]])
CALLS: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.ones(3, 32).half()}, r"backend triton .* one dtype, not torch.float16 and torch.float32"),
    ({"x": torch.ones(3, 32).long()}, r"x must be float32, float16 or bfloat16, not torch.int64"),
    ({"x": torch.ones(3, 32).long(), "backend": "torch"}, r"x must be float32, float16 or bfloat16, not torch.int64"),
    ({"topk_ids": IDS.float()}, r"topk_ids must be int32 or int64, not torch.float32"),
    ({"topk_ids": IDS.float(), "backend": "torch"}, r"topk_ids must be int32 or int64, not torch.float32"),
    ({"topk_weights": WEIGHTS.half()}, r"topk_weights must be float32, not torch.float16"),
    ({"topk_weights": WEIGHTS.t().contiguous().t()}, r"topk_weights must be contiguous, not with strides \[1, 3\]"),
    ({"up": TILE | {"BLOCK_SIZE_M": 24}}, "up projection: BLOCK_SIZE_M is 24; must be a power of two from 16 .*, or 1"),
    ({"down": TILE | {"GROUP_SIZE_M": 0}}, "down projection: GROUP_SIZE_M is 0; must be an integer from 1"),
    ({"down": TILE | {"num_warps": [4]}}, r"num_warps is .*; must be a power of two from 1"),
    ({"up": {}}, "up projection: BLOCK_SIZE_M is missing"),
    ({"expert_map": torch.arange(5)}, "expert_map is of 5 global experts, which are fewer than the 6 here"),
    ({"expert_map": torch.arange(6).float()}, r"expert_map must be int32 or int64 \[global experts\], not"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "words"), CALLS, ids=[words[:40] for _, words in CALLS])
def test_calls_that_are_refused(wrong: dict[str, Any], words: str) -> None:
    experts = prepare_experts(random(6, 48, 32, seed=1), random(6, 32, 24, seed=2))
    call = {
        "x": torch.ones(3, 32),
        "topk_weights": WEIGHTS,
        "topk_ids": IDS,
        "backend": "triton",
        "up": TILE,
        "down": TILE,
    }
    call = {name: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for name, v in (call | wrong).items()}
    with pytest.raises(ValueError, match=words):
        fused_experts(experts=experts, **call)


def test_a_config_is_looked_at_in_every_call_of_its_values() -> None:
    tile = dict(TILE)
    check_config("up", tile)
    tile["BLOCK_SIZE_K"] = 48
    with pytest.raises(ValueError, match="BLOCK_SIZE_K is 48; must be a power of two from 16"):
        check_config("up", tile)


# The alignment of few entries is one program's, of many it is several chunks'.
@pytest.mark.parametrize(
    ("tokens", "tile"), [(3, config(1, 16, 64)), (3, config(16, 32, 32)), (90, config(64, 32, 32))]
)
def test_ids_of_no_expert_add_nothing_on_any_path(tokens: int, tile: dict[str, Any]) -> None:
    experts = prepare_experts(random(6, 48, 32, seed=1), random(6, 32, 24, seed=2), b2=random(6, 32, seed=4))
    x, (weights, ids) = random(tokens, 32, seed=3), routed(tokens, 6, 2)
    for absent in (6, -2, 1 << 20):
        got = fused_experts(x, experts, weights, ids.where(ids != 1, absent), backend="triton", up=tile, down=tile)
        want = fused_experts(x, experts, weights, ids.where(ids != 1, -1), backend="triton", up=tile, down=tile)
        assert torch.equal(got, want)
        assert not got.isnan().any()
