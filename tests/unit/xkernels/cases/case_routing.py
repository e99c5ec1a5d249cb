"""Alignment, expert choice, gated activation and combine, each against its twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xkernels.device import live
from xkernels.ops.activation import Activation, silu_and_mul, silu_and_mul_reference
from xkernels.ops.align import capacity, moe_align_block_size, moe_align_block_size_reference
from xkernels.ops.few_rows import choose_experts
from xkernels.ops.reduce import moe_sum_reduce, moe_sum_reduce_reference
from xkernels.ops.topk import (
    Router,
    grouped_topk,
    grouped_topk_reference,
    router_logits,
    router_logits_reference,
    topk,
    topk_reference,
)

DEVICE = live().torch_device()
QUICK = settings(max_examples=12, deadline=None)


def same_alignment(ids: torch.Tensor, block: int, experts: int, **options: bool) -> None:
    got = moe_align_block_size(ids, block, experts, **options)
    want = moe_align_block_size_reference(ids, block, experts, **options)
    assert torch.equal(got.num_post_padded, want.num_post_padded)
    assert torch.equal(got.sorted_ids, want.sorted_ids)
    assert torch.equal(got.expert_ids, want.expert_ids)


@given(data=st.data())
@QUICK
def test_align_properties(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 9))
    block = data.draw(st.sampled_from([1, 16, 24, 64]))
    tokens, slots = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    flat = data.draw(st.lists(st.integers(-1, experts - 1), min_size=tokens * slots, max_size=tokens * slots))
    ids = torch.tensor(flat, dtype=torch.int32, device=DEVICE).view(tokens, slots)
    same_alignment(ids, block, experts)
    made = moe_align_block_size(ids, block, experts)
    used, inactive = made.num_post_padded.tolist()
    entries = made.sorted_ids[:used]
    real = entries[entries < ids.numel()]
    assert sorted(real.tolist()) == list(range(ids.numel()))  # every entry once
    assert used <= capacity(ids.numel(), block, experts)
    for place, expert in enumerate(made.expert_ids[: used // block].tolist()):
        mine = entries[place * block : (place + 1) * block]
        assert (ids.flatten()[mine[mine < ids.numel()].long()] == expert).all()
        assert (expert < 0) == (place < inactive)


@pytest.mark.parametrize("tokens", [3, 300])
def test_align_leaves_invalid_experts_out_on_request(tokens: int) -> None:
    ids = torch.randint(-1, 6, (tokens, 4), dtype=torch.int32, device=DEVICE)
    same_alignment(ids, 16, 6, ignore_invalid_expert=True)
    made = moe_align_block_size(ids, 16, 6, ignore_invalid_expert=True)
    used, inactive = made.num_post_padded.tolist()
    assert inactive == 0
    assert (made.expert_ids[: used // 16] >= 0).all()
    assert int((made.sorted_ids < ids.numel()).sum()) == int((ids >= 0).sum())


@pytest.mark.parametrize("tokens", [3, 90, 300])
@pytest.mark.parametrize("leave_out", [False, True])
def test_align_counts_every_id_that_no_expert_has_as_none(tokens: int, leave_out: bool) -> None:
    ids = torch.randint(-1, 6, (tokens, 4), device=DEVICE)
    others = torch.tensor([6, -2, 1 << 20, -(1 << 31), (1 << 32) + 2, -(1 << 32)], device=DEVICE)
    strange = torch.where(ids < 0, others[torch.randint(0, 6, ids.shape, device=DEVICE)], ids)
    same_alignment(strange, 16, 6, ignore_invalid_expert=leave_out)
    got = moe_align_block_size(strange, 16, 6, ignore_invalid_expert=leave_out)
    want = moe_align_block_size(ids, 16, 6, ignore_invalid_expert=leave_out)
    assert torch.equal(got.sorted_ids, want.sorted_ids)
    assert torch.equal(got.expert_ids, want.expert_ids)


@pytest.mark.parametrize("tokens", [0, 1, 17, 300])
def test_align_many_chunks_and_one_expert(tokens: int) -> None:
    ids = torch.randint(-1, 64, (tokens, 6), dtype=torch.int32, device=DEVICE)
    if tokens:
        same_alignment(ids, 16, 64)
        same_alignment(torch.full_like(ids, 5), 64, 64)
    else:
        assert moe_align_block_size(ids, 16, 64).num_post_padded.tolist() == [0, 0]


def test_align_takes_strided_ids_and_refuses_others() -> None:
    wide = torch.randint(0, 4, (9, 8), device=DEVICE)
    same_alignment(wide[:, ::2], 16, 4)
    with pytest.raises(ValueError, match="int32 or int64"):
        moe_align_block_size(torch.zeros(3, 2, device=DEVICE), 16, 4)
    with pytest.raises(ValueError, match="positive"):
        moe_align_block_size(wide, 0, 4)


ROUTERS = [
    Router(2),
    Router(3, "sigmoid", renormalize=False, scale=2.5),
    Router(3, "sqrtsoftplus"),
    Router(4, "sigmoid", groups=4, top_groups=2, scale=1.5),
    Router(2, "softmax", groups=3, top_groups=1, shared_slots=2, shared_scale=2.5),
]


@pytest.mark.parametrize("router", ROUTERS, ids=lambda r: f"{r.scoring}-{r.groups}")
@pytest.mark.parametrize("biased", [False, True])
def test_topk_against_twin(router: Router, biased: bool) -> None:
    logits = torch.randn(19, 48, device=DEVICE)[:, ::2]
    bias = torch.randn(24, device=DEVICE) if biased else None
    op, twin = (grouped_topk, grouped_topk_reference) if router.groups > 1 else (topk, topk_reference)
    weights, ids = op(logits, router, bias)
    want_weights, want_ids = twin(logits, router, bias)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-6)


@given(data=st.data())
@QUICK
def test_topk_properties(data: st.DataObject) -> None:
    experts = data.draw(st.integers(2, 20))
    k = data.draw(st.integers(1, min(experts, 6)))
    seed = data.draw(st.integers(0, 1000))
    g = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (5, experts), generator=g).float().to(DEVICE)  # ties on purpose
    bias = torch.randn(experts, generator=g).to(DEVICE)
    weights, ids = topk(logits, Router(k), bias)
    assert all(len(set(row)) == k for row in ids.tolist())
    torch.testing.assert_close(weights.sum(1), torch.ones(5, device=DEVICE), rtol=1e-5, atol=1e-6)
    # the bias changes the choice only: the weights are the unbiased scores of what was chosen
    scores = torch.softmax(logits, -1).gather(1, ids.long())
    torch.testing.assert_close(weights, scores / scores.sum(1, keepdim=True), rtol=1e-4, atol=1e-6)
    assert torch.equal(ids, topk_reference(logits, Router(k), bias)[1])


@given(seed=st.integers(0, 1000), middle=st.integers(-80, 80), spread=st.sampled_from([0.5, 3.0]))
@QUICK
def test_scores_of_softplus_keep_their_precision_however_far_the_logits_are_from_zero(
    seed: int, middle: int, spread: float
) -> None:
    logits = torch.randn(16, 24, generator=torch.Generator().manual_seed(seed)) * spread + middle
    router = Router(4, "sqrtsoftplus", renormalize=False)
    weights, ids = topk(logits.to(DEVICE), router)
    exact = logits.double().clamp(min=0) + torch.log1p(torch.exp(-logits.double().abs()))
    torch.testing.assert_close(weights.cpu().double(), exact.sqrt().gather(1, ids.cpu().long()), rtol=2e-5, atol=0)
    torch.testing.assert_close(weights, topk_reference(logits.to(DEVICE), router)[0], rtol=2e-5, atol=0)
    best = logits.topk(4).values  # logits closer than this may share a score, and then the first of them wins
    torch.testing.assert_close(logits.gather(1, ids.cpu().long()), best, rtol=0, atol=1e-3)


def test_scores_of_softplus_at_the_ends_of_float32() -> None:
    logits = torch.tensor([[float("inf")], [float("-inf")], [float("nan")], [-200.0], [200.0], [0.0]], device=DEVICE)
    router = Router(1, "sqrtsoftplus", renormalize=False)
    torch.testing.assert_close(topk(logits, router)[0], topk_reference(logits, router)[0], equal_nan=True)


def test_topk_of_nothing_and_refusals() -> None:
    weights, ids = topk(torch.randn(0, 8, device=DEVICE), Router(2))
    assert weights.shape == ids.shape == (0, 2)
    with pytest.raises(ValueError, match="do not divide"):
        topk(torch.randn(2, 9, device=DEVICE), Router(2, groups=2))
    with pytest.raises(ValueError, match="exceeds the experts"):
        topk(torch.randn(2, 8, device=DEVICE), Router(3, groups=4, top_groups=1))
    for op in (grouped_topk, grouped_topk_reference):
        with pytest.raises(ValueError, match="groups > 1"):
            op(torch.randn(2, 8, device=DEVICE), Router(2))
    wrong = ({"scale": float("nan")}, {"shared_scale": 0.0}, {"topk": 2.0}, {"topk": True}, {"scoring": "tanh"})
    for fields in wrong:
        with pytest.raises(ValueError, match=f"{next(iter(fields))}.* must be"):
            Router(**{"topk": 2, **fields})


def test_a_routed_scale_of_zero_is_zero() -> None:
    logits = torch.randn(3, 8, device=DEVICE)
    router = Router(2, scale=0.0, shared_slots=1)
    want = torch.tensor([[0.0, 0.0, 1.0]] * 3, device=DEVICE)
    assert torch.equal(topk(logits, router)[0], want)
    assert torch.equal(topk_reference(logits, router)[0], want)
    chosen, _ = choose_experts(logits, Router(2, scale=0.0), None, None, None, logits)
    assert (chosen.weights == 0).all()


ACTIVATIONS = [
    Activation(),
    Activation("silu", limit=0.5),
    Activation("swiglu", alpha=1.702, limit=7.0),
    Activation("clamped", limit=1.0),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: f"{a.kind}-{a.limit}")
@pytest.mark.parametrize("shape", [(3, 34), (2, 5, 258), (0, 8), (1, 2)])
def test_silu_and_mul(activation: Activation, shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, device=DEVICE) * 3
    got = silu_and_mul(x, activation)
    torch.testing.assert_close(got, silu_and_mul_reference(x, activation), rtol=1e-5, atol=1e-5)
    half = x.to(torch.bfloat16).transpose(0, -1).contiguous().transpose(0, -1)  # strided
    want = silu_and_mul_reference(half, activation).float()
    torch.testing.assert_close(silu_and_mul(half, activation).float(), want, rtol=1e-2, atol=1e-2)


def test_activation_refuses_half_given_rules() -> None:
    with pytest.raises(ValueError, match="needs alpha and limit"):
        Activation("swiglu", alpha=1.7)
    with pytest.raises(ValueError, match="activation must be one of silu, swiglu, clamped, not 'gelu'"):
        Activation("gelu")  # type: ignore[arg-type]
    for limit in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"activation limit must be a number above zero, .* not {limit}"):
            Activation("silu", limit=limit)
    with pytest.raises(ValueError, match="activation alpha must be a finite number, not nan"):
        Activation("swiglu", alpha=float("nan"), limit=7.0)
    with pytest.raises(ValueError, match="even"):
        silu_and_mul(torch.zeros(2, 3, device=DEVICE))


@pytest.mark.parametrize("shape", [(5, 3, 70), (1, 1, 1), (0, 2, 8), (4, 6, 1030)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_reduce_is_bit_exact_and_batch_invariant(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = torch.randn(*shape, device=DEVICE).to(dtype)
    out = torch.full((shape[0], shape[2]), float("nan"), dtype=dtype, device=DEVICE)
    moe_sum_reduce(x, 2.0, out=out)
    assert torch.equal(out, moe_sum_reduce_reference(x, 2.0))
    if shape[0] > 1:
        assert torch.equal(moe_sum_reduce(x[1:2]), moe_sum_reduce(x)[1:2])
        strided = x.transpose(0, 1).contiguous().transpose(0, 1)
        assert torch.equal(moe_sum_reduce(strided), moe_sum_reduce(x))


@pytest.mark.parametrize("tokens", [0, 1, 5, 16, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_router_logits(tokens: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 72, generator=g).to(dtype).to(DEVICE)[:, :70]
    weight = torch.randn(6, 70, generator=g).to(DEVICE)
    got = router_logits(x, weight)
    torch.testing.assert_close(got, router_logits_reference(x, weight), rtol=1e-5, atol=1e-4)
    if 1 < tokens <= 16:
        assert torch.equal(router_logits(x[1:2], weight)[0], got[1])  # a row's bits do not depend on its neighbours
    with pytest.raises(ValueError, match="are wanted"):
        router_logits(x, weight.half())
