"""Residual norms and rotary positions against their twins, and a whole decoder over the fused operators."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serving.server.decoder import Decoder, Prompt
from serving.server.experts import Experts
from serving.server.glue import TorchGlue, TritonGlue
from serving.server.kvcache import KvCache
from serving.server.spec import read_spec
from serving.server.weights import Random, build
from xkernels.device import live
from xkernels.ops.decoder import (
    add_rms_norm,
    add_rms_norm_reference,
    rotate,
    rotate_and_store,
    rotate_and_store_reference,
    rotate_reference,
)

DEVICE = live().torch_device()
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("deltas", [0, 1, 2])
@pytest.mark.parametrize("shape", [(1, 128), (3, 80), (5, 1280)])
def test_add_rms_norm(dtype: torch.dtype, deltas: int, shape: tuple[int, int]) -> None:
    x, weight = rand(*shape, dtype=dtype), rand(shape[1], dtype=dtype, seed=9)
    added = [rand(*shape, dtype=dtype, seed=index + 1) for index in range(deltas)]
    total, normed = add_rms_norm(x, added, weight, 1e-6)
    want_total, want = add_rms_norm_reference(x, added, weight, 1e-6)
    assert torch.equal(total, want_total), "summed in float32 and rounded once"
    torch.testing.assert_close(normed, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    own = torch.nn.functional.rms_norm(want_total.float(), weight.shape, weight.float(), 1e-6)
    torch.testing.assert_close(want.float(), own, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_add_rms_norm_takes_strided_rows_and_refuses_what_does_not_fit() -> None:
    wide = rand(4, 300)
    ones = torch.ones(300, device=DEVICE)
    total, _ = add_rms_norm(wide[:, :100], (wide[:, 100:200], wide[:, 200:]), ones[:100], 1e-6)
    torch.testing.assert_close(total, wide[:, :100] + wide[:, 100:200] + wide[:, 200:])
    for x, deltas, weight in ((wide, (), ones[:3]), (wide, (wide[:2],), ones), (wide, (wide, wide, wide), ones),
                              (wide.t(), (), ones[:4])):  # fmt: skip
        with pytest.raises(ValueError, match=r"must be|at most"):
            add_rms_norm(x, deltas, weight, 1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (3, 20), (8, 64)])
def test_rotate(dtype: torch.dtype, heads: int, dim: int) -> None:
    x = rand(5, heads + 2, dim, dtype=dtype)[:, :heads]
    angles = rand(5, dim // 2, seed=3)
    cos, sin = (torch.cat([f(angles)] * 2, -1).to(dtype) for f in (torch.cos, torch.sin))
    got, want = rotate(x, cos, sin), rotate_reference(x, cos, sin)
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(got.float().norm(), x.float().norm(), rtol=2e-2, atol=0)
    with pytest.raises(ValueError, match="must be"):
        rotate(x, cos[:, :1], sin)


def test_a_decoder_over_fused_operators_gives_the_same_logits() -> None:
    spec = read_spec(Path("examples/models/tiny-moe"))

    def make(glue: object) -> Decoder:
        cache = KvCache(spec.layers, 3, 64, spec.kv_heads * spec.head_dim, torch.float32, DEVICE)
        experts = Experts(spec, torch.float32, live(), "torch", None)
        decoder = Decoder(spec, build(spec, Random(1, torch.float32, DEVICE)), cache, experts)
        decoder.glue, decoder.few = glue, None  # a few rows have kernels of their own
        return decoder

    plain, fused = make(TorchGlue()), make(TritonGlue())
    prompts = [Prompt([5, 6, 7, 8], 2), Prompt([9], 0)]
    with torch.inference_mode():
        torch.testing.assert_close(fused.prefill(prompts), plain.prefill(prompts), rtol=1e-4, atol=1e-4)
        # Rows of the cache that sequences use agree; the padded row writes nowhere.
        step = [torch.tensor(values, device=DEVICE) for values in ([3, 4, 0], [4, 1, -1], [2, 0, 0])]
        got, want = fused.decode(*step, 64), plain.decode(*step, 64)
        torch.testing.assert_close(got[:2], want[:2], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(fused.cache.keys[:, 1:], plain.cache.keys[:, 1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (10, 10, 12)])
def test_rotate_and_store(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    qkv = rand(5, heads + 2 * kv_heads, dim, dtype=dtype)
    qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
    angles = rand(5, dim // 2, seed=1).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    caches = [torch.full((9, kv_heads * dim), 7.0, dtype=dtype, device=DEVICE) for _ in range(2)]
    twins = [cache.clone() for cache in caches]
    places = torch.tensor([3, 0, 8, -1, 12], device=DEVICE)
    got = rotate_and_store(qk, v, cos, sin, *caches, places)
    want = rotate_and_store_reference(qk, v, cos, sin, *twins, places)
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(caches[0], twins[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(caches[1], twins[1])
    assert all((cache[0] == 7).all() and (cache[1] == 7).all() for cache in caches), "row 0 belongs to no sequence"
    two = rotate(qk.contiguous(), cos, sin)[:, :heads]  # a compiler may contract the two kernels' products differently
    torch.testing.assert_close(got, two, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    with pytest.raises(ValueError, match="do not fit"):
        rotate_and_store(qk, v[:, :1], cos, sin, *caches, places)
