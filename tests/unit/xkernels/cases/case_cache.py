"""KV store and decode attention against their twins."""

from __future__ import annotations

import pytest
import torch

from xkernels.device import live
from xkernels.ops.attention import decode_attention, decode_attention_reference
from xkernels.ops.kv_cache import store_kv_cache, store_kv_cache_reference

DEVICE = live().torch_device()


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("split", [0, 2])
def test_store(tokens: int, dtype: torch.dtype, split: int) -> None:
    g = torch.Generator().manual_seed(tokens)
    caches = [
        torch.full((9, 4, 8), 7.0, dtype=dtype, device=DEVICE),
        torch.full((9, 2, 6), 7.0, dtype=dtype, device=DEVICE),
    ]
    twins = [c.clone() for c in caches]
    k = torch.randn(tokens, 4, 16, generator=g).to(dtype).to(DEVICE)[:, :, :8].contiguous()
    v = torch.randn(tokens, 2, 6, generator=g).to(dtype).to(DEVICE)
    indices = torch.tensor([3, 0, 8, -1, 5, 9, 1][:tokens], dtype=torch.int32, device=DEVICE)
    store_kv_cache(k, v, caches[0], caches[1], indices, num_split=split)
    store_kv_cache_reference(k, v, twins[0], twins[1], indices)
    assert torch.equal(caches[0], twins[0])
    assert torch.equal(caches[1], twins[1])
    assert (caches[0][0] == 7).all()  # the reserved slot
    store_kv_cache(k, v, caches[0], caches[1], indices, skip_index=-1)
    assert tokens < 2 or torch.equal(caches[0][0], k[1])


def test_store_takes_strided_rows_and_refuses_others() -> None:
    wide = torch.randn(4, 3, 8, device=DEVICE)
    kc, vc = torch.zeros(5, 8, device=DEVICE), torch.zeros(5, 8, device=DEVICE)
    indices = torch.tensor([1, 2, 3, 4], device=DEVICE)
    store_kv_cache(wide[:, 0], wide[:, 1], kc, vc, indices)
    assert torch.equal(kc[1:], wide[:, 0])
    assert torch.equal(vc[1:], wide[:, 1])
    with pytest.raises(ValueError, match="row sizes"):
        store_kv_cache(wide[:, 0, :4], wide[:, 1], kc, vc, indices)
    with pytest.raises(ValueError, match="dtypes"):
        store_kv_cache(wide[:, 0].half(), wide[:, 1], kc, vc, indices)
    with pytest.raises(ValueError, match="contiguous rows"):
        store_kv_cache(wide[:, 0, ::2].transpose(0, 1)[:4].t(), wide[:, 1], kc, vc, indices)
    with pytest.raises(ValueError, match=r"num_split .* -1"):
        store_kv_cache(wide[:, 0], wide[:, 1], kc, vc, indices, num_split=-1)
    with pytest.raises(ValueError, match="int32 or int64"):
        store_kv_cache(wide[:, 0], wide[:, 1], kc, vc, indices.float())
    with pytest.raises(ValueError, match="one number"):
        store_kv_cache(wide[0, 0, 0], wide[:, 1], kc, vc, indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_decode_attention(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 24, generator=g).to(dtype).to(DEVICE)
    kc = torch.randn(150, 2, 24, generator=g).to(dtype).to(DEVICE)
    vc = torch.randn(150, 2, 16, generator=g).to(dtype).to(DEVICE)
    slots = torch.stack([torch.randperm(150, generator=g)[:130] for _ in range(3)]).int().to(DEVICE)
    lengths = torch.tensor([130, 0, 7], dtype=torch.int32, device=DEVICE)
    got = decode_attention(q, kc, vc, slots, lengths)
    want = decode_attention_reference(q.float(), kc.float(), vc.float(), slots, lengths)
    torch.testing.assert_close(got.float(), want, rtol=2e-3, atol=2e-3 if dtype == torch.float16 else 1e-5)
    assert (got[1] == 0).all()
    beyond = torch.tensor([1000, -3, 7], dtype=torch.int32, device=DEVICE)
    assert torch.equal(decode_attention(q, kc, vc, slots, beyond), got)  # a table of slots has no more than its width
    alone = decode_attention(q[2:], kc, vc, slots[2:], lengths[2:])
    assert torch.equal(alone[0], got[2])  # a sequence's bits do not depend on its neighbours
    with pytest.raises(ValueError, match="multiple"):
        decode_attention(q[:, :3], kc, vc, slots, lengths)
    with pytest.raises(ValueError, match="multiple of 0"):
        decode_attention(q, kc[:, :0], vc[:, :0], slots, lengths)
    with pytest.raises(ValueError, match="int32 or int64"):
        decode_attention(q, kc, vc, slots.float(), lengths)


@pytest.mark.parametrize("length", [64, 65, 512, 513, 700])
def test_a_sequence_has_the_same_bits_however_long_others_may_be(length: int) -> None:
    """Eager steps look up as many tokens as the longest sequence has, graphs as many as any may have."""
    g = torch.Generator().manual_seed(length)
    q = torch.randn(1, 2, 16, generator=g).to(DEVICE)
    kc, vc = (torch.randn(800, 1, 16, generator=g).to(DEVICE) for _ in range(2))
    slots = torch.randperm(800, generator=g)[None].int().to(DEVICE)
    lengths = torch.tensor([length], dtype=torch.int32, device=DEVICE)
    whole = decode_attention(q, kc, vc, slots, lengths)
    assert torch.equal(whole, decode_attention(q, kc, vc, slots[:, :length].contiguous(), lengths))
    torch.testing.assert_close(whole, decode_attention_reference(q, kc, vc, slots, lengths), rtol=2e-3, atol=1e-5)
