"""The kernels of a decode step of a few rows against their twins, and whole decoders over them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.server.decoder import Decoder, Prompt
from serving.server.experts import Experts
from serving.server.glue import TorchGlue
from serving.server.kvcache import KvCache
from serving.server.spec import spec_from
from serving.server.weights import Random, build
from xkernels.device import live
from xkernels.ops.align import moe_align_block_size
from xkernels.ops.few_rows import (
    add_linear,
    add_linear_reference,
    choose_experts,
    choose_experts_reference,
    norm_gate,
    norm_gate_reference,
    norm_linear,
    norm_linear_reference,
    norm_rows,
    norm_rows_reference,
    row_logits,
    row_logits_reference,
)
from xkernels.ops.fused_experts import expert_slots, expert_slots_reference, fused_experts, prepare_experts
from xkernels.ops.new_token import HeadRules, NewTokens, new_token_attention, new_token_attention_reference
from xkernels.ops.reduce import moe_sum_reduce
from xkernels.ops.topk import Router, topk

DEVICE = live().torch_device()
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
QUICK = settings(max_examples=10, deadline=None)
EPS = 1e-6


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def matrix(rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Weights whose products with unit rows are of unit size."""
    return (rand(rows, width, seed=seed) * width**-0.5).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("width", "cols"), [(200, 37), (64, 8), (7, 3), (1, 1)])
@pytest.mark.parametrize("whole", [False, True])
def test_norm_linear(dtype: torch.dtype, width: int, cols: int, whole: bool) -> None:
    x, gain, weight = rand(4, width, dtype=dtype), rand(width, dtype=dtype, seed=1), matrix(cols, width, dtype, 2)
    delta = rand(4, 2 * width, dtype=dtype, seed=3)[:, :width] if whole else None
    bias = rand(cols, dtype=dtype, seed=4) if whole else None
    total, out = norm_linear(x[:3], None if delta is None else delta[:3], gain, EPS, weight, bias)
    want_total, want = norm_linear_reference(x[:3], None if delta is None else delta[:3], gain, EPS, weight, bias)
    assert torch.equal(total, want_total), "summed in float32 and rounded once"
    close(out, want, dtype)
    for row in range(3):  # a row's bits do not depend on how many rows there are
        one = norm_linear(x[row : row + 1], None if delta is None else delta[row : row + 1], gain, EPS, weight, bias)
        assert torch.equal(one[1][0], out[row])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_norm_linear_sums_the_slots_of_a_layer_of_experts(dtype: torch.dtype) -> None:
    x, gain, weight = rand(3, 72, dtype=dtype), rand(72, dtype=dtype, seed=1), matrix(10, 72, dtype, 2)
    slots = rand(3, 7, 72, dtype=dtype, seed=3)[:, :6]
    total, out = norm_linear(x, slots, gain, EPS, weight)
    want_total, want = norm_linear(x, moe_sum_reduce(slots), gain, EPS, weight)
    assert torch.equal(total, want_total)
    assert torch.equal(out, want)
    close(out, norm_linear_reference(x, slots, gain, EPS, weight)[1], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("width", "cols"), [(200, 37), (64, 8), (1, 1)])
def test_the_end_of_a_step(dtype: torch.dtype, width: int, cols: int) -> None:
    x, gain, weight = rand(4, width, dtype=dtype), rand(width, dtype=dtype, seed=1), matrix(cols, width, dtype, 2)
    slots = rand(4, 7, width, dtype=dtype, seed=3)[:, :6]
    for delta in (None, slots[:, 0], slots):
        normed = norm_rows(x, delta, gain, EPS)
        close(normed, norm_rows_reference(x, delta, gain, EPS), dtype)
        assert torch.equal(norm_rows(x[1:2], None if delta is None else delta[1:2], gain, EPS)[0], normed[1])
    assert torch.equal(norm_rows(x, moe_sum_reduce(slots), gain, EPS), normed)
    logits = row_logits(normed, weight)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.to(dtype).float()), "rounded as a product of this dtype is"
    close(logits.to(dtype), row_logits_reference(normed, weight).to(dtype), dtype)
    assert torch.equal(row_logits(normed[2:3], weight)[0], logits[2]), "whatever other rows there are"


CONFIG = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 32,
    "BLOCK_SIZE_K": 32,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 2,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_expert_slots(dtype: torch.dtype) -> None:
    experts = prepare_experts(
        (rand(4, 48, 32) * 32**-0.5).to(dtype), (rand(4, 32, 24, seed=1) * 24**-0.5).to(dtype)
    )  # fmt: skip
    x, logits = rand(3, 32, dtype=dtype, seed=2), rand(3, 4, seed=3)
    weights, ids = topk(logits, Router(2))
    alignment = moe_align_block_size(ids, 16, 4)
    got = expert_slots(x, experts, weights, alignment, CONFIG, CONFIG)
    close(got, expert_slots_reference(x, experts, weights, ids), dtype)
    whole = fused_experts(x, experts, weights, ids, backend="triton", up=CONFIG, down=CONFIG)
    assert torch.equal(moe_sum_reduce(got), whole), "the same kernels"
    with pytest.raises(ValueError, match="blocks of 16"):
        expert_slots(x, experts, weights, alignment, {**CONFIG, "BLOCK_SIZE_M": 32}, CONFIG)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("experts", "inner"), [(9, 21), (64, 0), (0, 10)])
@pytest.mark.parametrize("width", [200, 16])
def test_norm_gate(dtype: torch.dtype, experts: int, inner: int, width: int) -> None:
    x, gain = rand(4, width, dtype=dtype), rand(width, dtype=dtype, seed=1)
    router = matrix(experts, width, seed=2) if experts else None
    gate_up = matrix(2 * inner, width, dtype, 3) if inner else None
    got = norm_gate(x, gain, EPS, router, gate_up)
    want = norm_gate_reference(x, gain, EPS, router, gate_up)
    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs, dtype)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-4)  # a router decides: float32 throughout
    for one, all_rows in zip(norm_gate(x[2:3], gain, EPS, router, gate_up), got, strict=True):
        assert torch.equal(one[0], all_rows[2])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("width", "cols"), [(200, 37), (96, 16)])
def test_add_linear(dtype: torch.dtype, width: int, cols: int) -> None:
    x, weight, residual = rand(4, width, dtype=dtype), matrix(cols, width, dtype, 1), rand(4, cols, dtype=dtype, seed=2)
    got = add_linear(x, weight, residual)
    close(got, add_linear_reference(x, weight, residual), dtype)
    assert torch.equal(add_linear(x[3:], weight, residual[3:])[0], got[3])


ROUTERS = [
    Router(2),
    Router(6, renormalize=False),
    Router(3, "sigmoid", scale=2.5),
    Router(4, "sigmoid", groups=4, top_groups=2, scale=1.5),
    Router(1, "sqrtsoftplus"),
]


def same_choice(got: Any, want: Any) -> None:
    assert torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.weights, want.weights, rtol=1e-5, atol=1e-6)
    assert (got.alignment is None) == (want.alignment is None)
    if got.alignment is not None:
        assert torch.equal(got.alignment.num_post_padded, want.alignment.num_post_padded)
        assert torch.equal(got.alignment.sorted_ids, want.alignment.sorted_ids)
        assert torch.equal(got.alignment.expert_ids, want.alignment.expert_ids)


@pytest.mark.parametrize("router", ROUTERS, ids=lambda r: f"{r.scoring}-{r.topk}-{r.groups}")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_choose_experts(router: Router, biased: bool, tokens: int) -> None:
    logits = rand(tokens, 24, seed=tokens)
    correction = rand(24, seed=7) if biased else None
    residual, shared = rand(tokens, 20, seed=1), (rand(tokens, 50, seed=2), matrix(20, 50, seed=3))
    for block, beside in ((16, shared), (None, shared), (64, None)):
        chosen, total = choose_experts(logits, router, correction, block, beside, residual)
        want, want_total = choose_experts_reference(logits, router, correction, block, beside, residual)
        same_choice(chosen, want)
        close(total, want_total, torch.float32)
        assert beside is not None or total is residual
    weights, ids = topk(logits, router, correction)
    assert torch.equal(chosen.ids, ids)
    torch.testing.assert_close(chosen.weights, weights, rtol=1e-6, atol=1e-7)
    alone, _ = choose_experts(logits[-1:], router, correction, 16, None, residual[-1:])
    assert torch.equal(alone.weights[0], chosen.weights[-1])


@given(data=st.data())
@QUICK
def test_choice_properties(data: st.DataObject) -> None:
    experts, tokens = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 4))
    k = data.draw(st.integers(1, min(experts, 6)))
    block = data.draw(st.sampled_from([1, 16, 24]))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randint(-3, 4, (tokens, experts), generator=g).float().to(DEVICE)  # ties on purpose
    chosen, _ = choose_experts(logits, Router(k), None, block, None, logits)
    same_choice(chosen, choose_experts_reference(logits, Router(k), None, block, None, logits)[0])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("router", ROUTERS, ids=lambda r: f"{r.scoring}-{r.topk}-{r.groups}")
def test_whatever_a_router_says_the_experts_exist(router: Router, sign: float) -> None:
    """Weights that became NaN are nobody's right answer; reading beyond the experts would be everybody's crash."""
    logits = torch.stack([torch.full((12,), value) for value in (float("nan"), float("inf"), 0.0)]).to(DEVICE)
    correction = torch.full((12,), sign * float("inf"), device=DEVICE)
    for bias in (None, correction, (correction - correction).copysign(correction)):
        chosen, _ = choose_experts(logits, router, bias, 16, None, logits)
        for ids in (chosen.ids, topk(logits, router, bias)[1]):
            assert 0 <= int(ids.min()) <= int(ids.max()) < 12


def attention_problem(heads: int, kv_heads: int, d: int, positions: list[int], dtype: torch.dtype, norms: bool
                      ) -> dict[str, Any]:  # fmt: skip
    rows, room, hidden = len(positions), 1200 if max(positions) > 100 else 40, 24
    angles = rand(room, d // 2, seed=1).repeat(1, 2)
    gains = {"q_norm": rand(d, dtype=dtype, seed=2), "k_norm": rand(d, dtype=dtype, seed=3)} if norms else {}
    rules = HeadRules(heads, kv_heads, angles.cos().to(dtype), angles.sin().to(dtype), EPS, **gains)
    slots = torch.arange(rows, device=DEVICE).flip(0)
    return {
        "qkv": rand(rows, (heads + 2 * kv_heads) * d, dtype=dtype, seed=4), "rules": rules,
        "tokens": NewTokens(torch.tensor(positions, device=DEVICE), slots, room, max(positions) + 1),
        "k_cache": rand(1 + rows * room, kv_heads * d, dtype=dtype, seed=5),
        "v_cache": rand(1 + rows * room, kv_heads * d, dtype=dtype, seed=6),
        "weight": matrix(hidden, heads * d, dtype, 7), "bias": rand(hidden, dtype=dtype, seed=8) if norms else None,
        "residual": rand(rows, hidden, dtype=dtype, seed=9),
    }  # fmt: skip


def copied(problem: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {**problem, "k_cache": problem["k_cache"].clone(), "v_cache": problem["v_cache"].clone(), **changed}


def row_of(problem: dict[str, Any], row: int, span: int) -> dict[str, Any]:
    """The same problem for one of its rows."""
    at = slice(row, row + 1)
    t = problem["tokens"]
    return copied(problem, qkv=problem["qkv"][at], residual=problem["residual"][at],
                  tokens=NewTokens(t.positions[at], t.slots[at], t.room, span))  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "positions", "norms"),
    [(4, 2, 16, [0, 3, -1, 38], False), (3, 3, 12, [17, 1], True), (2, 1, 8, [1150, 0, 127, 128], False),
     (10, 5, 256, [5, 9], True)],
)  # fmt: skip
def test_new_token_attention(
    dtype: torch.dtype, heads: int, kv_heads: int, d: int, positions: list[int], norms: bool
) -> None:
    problem = attention_problem(heads, kv_heads, d, positions, dtype, norms)
    mine, theirs = copied(problem), copied(problem)
    got, want = new_token_attention(**mine), new_token_attention_reference(**theirs)
    real = [row for row, position in enumerate(positions) if position >= 0]
    close(got[real], want[real], dtype)
    assert got.isfinite().all(), "a row of padding means nothing, and harms nothing"
    close(mine["k_cache"], theirs["k_cache"], dtype)
    assert torch.equal(mine["v_cache"], theirs["v_cache"])
    assert torch.equal(mine["k_cache"][0], problem["k_cache"][0]), "row 0 belongs to no sequence"
    for row in real:  # a sequence's bits depend neither on its neighbours nor on how far others may reach
        one = new_token_attention(**row_of(problem, row, 1200 if row % 2 else positions[row] + 1))
        assert torch.equal(one[0], got[row])


def test_what_does_not_fit_is_refused() -> None:
    x, gain, weight = rand(2, 16), rand(16), rand(8, 16)
    problem = attention_problem(4, 2, 16, [1, 2], torch.float32, True)
    router = rand(8, 16)
    refused = [
        (lambda: norm_linear(rand(5, 16), None, gain, EPS, weight), "1 to 4"),
        (lambda: norm_linear(x, x[:1], gain, EPS, weight), "delta"),
        (lambda: norm_linear(x, rand(2, 3, 8), gain, EPS, weight), "delta"),
        (lambda: norm_linear(x, rand(2, 0, 16), gain, EPS, weight), "delta"),
        (lambda: norm_linear(rand(2, 2), rand(2), gain[:2], EPS, weight[:, :2]), "delta"),
        (lambda: norm_linear(x, None, gain[:3], EPS, weight), "gain"),
        (lambda: norm_linear(x, None, gain, EPS, weight, gain), "bias"),
        (lambda: norm_linear(x, None, gain, EPS, rand(16, 8).t()), "contiguous"),
        (lambda: norm_rows(rand(5, 16), None, gain, EPS), "1 to 4"),
        (lambda: norm_rows(x, x[:1], gain, EPS), "delta"),
        (lambda: norm_rows(x, None, gain[:3], EPS), "gain"),
        (lambda: row_logits(x, rand(8, 15)), "weight"),
        (lambda: norm_gate(x, gain, EPS, None, None), "wanted"),
        (lambda: norm_gate(x, gain, EPS, router.double(), weight), "float32"),
        (lambda: norm_gate(x, gain, EPS, router, weight[:7]), "as many gate rows"),
        (lambda: add_linear(x, weight, rand(2, 9)), "residual"),
        (lambda: choose_experts(rand(5, 8), Router(2), None, 16, None, x), "1 to 4"),
        (lambda: choose_experts(rand(2, 8), Router(2), None, 16, None, rand(3, 16)), "residual"),
        (lambda: choose_experts(rand(2, 8), Router(2), None, 16, (rand(3, 16), weight), rand(3, 8)), "residual"),
        (lambda: choose_experts(rand(2, 8), Router(2, shared_slots=1), None, 16, None, x), "shared slots"),
        (lambda: choose_experts(rand(2, 8), Router(9), None, 16, None, x), "exceeds"),
        (lambda: choose_experts(rand(2, 8), Router(2), None, 0, None, x), "positive"),
        (lambda: new_token_attention(**copied(problem, weight=rand(24, 8))), "weight"),
        (lambda: new_token_attention(**copied(problem, rules=replace(problem["rules"], q_norm=gain[:3]))), "gains"),
        (lambda: new_token_attention(**copied(problem, k_cache=rand(9, 8))), "caches"),
        (lambda: new_token_attention(**copied(problem, qkv=rand(2, 100))), "heads"),
    ]  # fmt: skip
    for call, words in refused:
        with pytest.raises(ValueError, match=words):
            call()


BASE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "torch_dtype": "float32", "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}  # fmt: skip
FAMILIES = {
    "deepseek-v3": {
        **BASE, "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 8, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "use_mla": False, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "attention_bias": True,
    },
    "qwen3": {
        **BASE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "head_dim": 16, "num_key_value_heads": 1,
        "norm_topk_prob": True,
    },
}  # fmt: skip


class Uneven(Random):
    """Random weights whose biases are not zero and whose norms are not one."""

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = super().get(name, shape)
        return tensor if len(shape) > 1 else tensor + 0.3 * rand(*shape, seed=sum(map(ord, name)))


@pytest.mark.parametrize(("family", "backend"), [("deepseek-v3", "triton"), ("qwen3", "torch")])
def test_a_decoder_gives_the_same_logits(family: str, backend: str) -> None:
    spec = spec_from(FAMILIES[family])

    def make(few: bool) -> Decoder:
        cache = KvCache(spec.layers, 4, 40, spec.kv_heads * spec.head_dim, torch.float32, DEVICE)
        experts = Experts(spec, torch.float32, live(), backend if few else "torch", None)
        experts.fused = True  # on a CPU dispatch chooses torch's operators, interpreter or not
        decoder = Decoder(spec, build(spec, Uneven(1, torch.float32, DEVICE)), cache, experts)
        assert (experts.block(3) is None) == (experts.selection.resolved == "torch")
        if not few:
            decoder.few, decoder.glue = None, TorchGlue()
        return decoder

    mine, plain = make(True), make(False)
    prompts = [Prompt([5, 6, 7, 8], 2), Prompt([9], 0)]
    with torch.inference_mode():
        for decoder in (mine, plain):
            decoder.prefill(prompts)
        for rows in ([[3, 4, 0], [4, 1, -1], [2, 0, 0]], [[7, 8, 1], [5, 2, 0], [2, 0, 3]]):
            step = [torch.tensor(values, device=DEVICE) for values in rows]
            got, want = mine.decode(*step, 40), plain.decode(*step, 40)
            real = 2 if -1 in rows[1] else 3
            torch.testing.assert_close(got[:real], want[:real], rtol=2e-4, atol=2e-4)
            torch.testing.assert_close(mine.cache.keys[:, 1:], plain.cache.keys[:, 1:], rtol=2e-4, atol=2e-4)
            torch.testing.assert_close(mine.cache.values[:, 1:], plain.cache.values[:, 1:], rtol=2e-4, atol=2e-4)
        assert mine.experts.rows[3] == 2 * len(spec.moe_layers)
