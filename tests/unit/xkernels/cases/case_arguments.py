"""Arguments that are not as a kernel reads them: taken for what they are, or refused with their name."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from xkernels import ops
from xkernels.device import live
from xkernels.ops import expert_parallel as ep
from xkernels.ops.activation import silu_and_mul, silu_and_mul_reference
from xkernels.ops.align import Alignment, moe_align_block_size, moe_align_block_size_reference
from xkernels.ops.attention import decode_attention, decode_attention_reference
from xkernels.ops.decoder import (
    add_rms_norm,
    add_rms_norm_reference,
    rotate,
    rotate_and_store,
    rotate_and_store_reference,
    rotate_reference,
)
from xkernels.ops.few_rows import (
    Chosen,
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
from xkernels.ops.fused_experts import (
    expert_slots,
    expert_slots_reference,
    fused_experts,
    fused_experts_reference,
    prepare_experts,
)
from xkernels.ops.kv_cache import store_kv_cache, store_kv_cache_reference
from xkernels.ops.linear import (
    block_fp8_linear,
    block_fp8_linear_reference,
    fp8_linear,
    fp8_linear_reference,
    prepare_block_fp8,
    prepare_fp8,
)
from xkernels.ops.new_token import HeadRules, NewTokens, new_token_attention, new_token_attention_reference
from xkernels.ops.quant import (
    per_token_group_quant_fp8,
    per_token_group_quant_fp8_reference,
    scaled_fp8_quant,
    scaled_fp8_quant_reference,
)
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
TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 2}


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
@pytest.mark.parametrize("mapped", [False, True])
def test_an_id_that_no_expert_has_adds_nothing(backend: str, mapped: bool) -> None:
    experts = prepare_experts(rand(4, 48, 32, seed=1) / 8, rand(4, 32, 24, seed=2) / 8)
    x, weights = rand(5, 32), rand(5, 2, seed=3).abs()
    ids = torch.tensor([[0, 9], [1, -5], [9, -(1 << 31)], [3, 1 << 20], [2, 1]], device=DEVICE)
    none = torch.where((ids < 0) | (ids > 3), -1, ids)
    here = torch.tensor([2, 0, 1, 3], dtype=torch.int32, device=DEVICE) if mapped else None
    got = fused_experts(x, experts, weights, ids, backend=backend, up=TILE, down=TILE, expert_map=here)
    want = fused_experts(x, experts, weights, none, backend="reference", expert_map=here)
    assert (got[2] == 0).all()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="gloo moves the rows of a CPU alone")
@pytest.mark.parametrize("mode", ["fast", "deterministic"])
def test_expert_parallel_ids_that_no_expert_has_and_strided_weights(alone: dist.ProcessGroup, mode: ep.Mode) -> None:
    layout = ep.ep_layout(
        alone, num_experts=4, hidden=32, topk=2, mode=mode, backend="triton", activations=torch.float32
    )
    x, weights = rand(3, 32), rand(3, 4, seed=7).abs()[:, ::2]
    ids = ints(0, 9, 3, 2, -7, 4).view(3, 2)
    got = ep.ep_fused_experts(x, EXPERTS, weights, ids, layout, configs=lambda _: (TILE, TILE))
    want = fused_experts_reference(x, EXPERTS, weights.contiguous(), torch.where((ids < 0) | (ids > 3), -1, ids))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class Op:
    """How an op and its twin are called with one small problem: `tensors` by name, of which `written` in place."""

    run: Callable[..., Any]
    twin: Callable[..., Any]
    tensors: dict[str, torch.Tensor]
    written: tuple[str, ...] = ()


def op(function: Callable[..., Any], twin: Callable[..., Any], options: dict[str, Any] | None = None,
       only: dict[str, Any] | None = None, written: tuple[str, ...] = (), **tensors: torch.Tensor) -> Op:  # fmt: skip
    """An op whose twin takes the same arguments; `only`: options that the twin does not take."""
    both = options or {}
    return Op(partial(function, **both, **(only or {})), partial(twin, **both), tensors, written)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def fp8(*shape: int, seed: int) -> torch.Tensor:
    return rand(*shape, seed=seed).to(torch.float8_e4m3fn)


def rules_and_tokens(
    call: Callable[..., Any], *, cos: torch.Tensor, sin: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor,
    positions: torch.Tensor, slots: torch.Tensor, **others: torch.Tensor,
) -> Any:  # fmt: skip
    """`new_token_attention` with the tensors of its records as arguments."""
    rules = HeadRules(4, 2, cos, sin, 1e-6, q_norm, k_norm)
    return call(rules=rules, tokens=NewTokens(positions, slots, 8, 5), **others)


def slots_of_aligned(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    return expert_slots(x, EXPERTS, topk_weights, moe_align_block_size(topk_ids, 16, 4), TILE, TILE)


def aligned(call: Callable[..., Alignment], topk_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = call(topk_ids, 16, 4)
    return made.sorted_ids, made.expert_ids, made.num_post_padded


def chosen(call: Callable[..., tuple[Chosen, torch.Tensor]], **tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    shared = (tensors.pop("gated"), tensors.pop("down"))
    made, total = call(router=Router(2, "sigmoid"), block=None, shared=shared, **tensors)
    return made.weights, made.ids, total


EXPERTS = prepare_experts(rand(4, 48, 32, seed=1) / 8, rand(4, 32, 24, seed=2) / 8)
LINEAR = prepare_block_fp8(fp8(40, 256, seed=3), rand(1, 2, seed=4).abs(), (128, 128))
ROWS = prepare_fp8(fp8(40, 64, seed=5), rand(40, seed=6).abs())
IDS = ints(*range(4), 2, 1).view(3, 2)
ROUTED = {"x": rand(3, 32), "topk_weights": rand(3, 2, seed=7).abs(), "topk_ids": IDS}
TURN = {"cos": rand(3, 4, seed=8).cos().repeat(1, 2), "sin": rand(3, 4, seed=8).sin().repeat(1, 2)}
LOGITS = {"logits": rand(3, 8, seed=9), "bias": rand(8, seed=10)}
FEW = {"x": rand(2, 16), "gain": rand(16, seed=11)}
NORM = {"options": {"eps": 1e-6}}

OPS = {
    "silu_and_mul": op(silu_and_mul, silu_and_mul_reference, x=rand(3, 8)),
    "moe_align_block_size": Op(
        partial(aligned, moe_align_block_size), partial(aligned, moe_align_block_size_reference), {"topk_ids": IDS}
    ),
    "decode_attention": op(
        decode_attention, decode_attention_reference, q=rand(3, 2, 8), k_cache=rand(20, 1, 8, seed=1),
        v_cache=rand(20, 1, 4, seed=2), slots=ints(*range(3, 18)).view(3, 5), lengths=ints(3, 5, 1),
    ),
    "add_rms_norm": Op(
        lambda x, delta, weight: add_rms_norm(x, (delta,), weight, 1e-6),
        lambda x, delta, weight: add_rms_norm_reference(x, (delta,), weight, 1e-6),
        {"x": rand(3, 8), "delta": rand(3, 8, seed=1), "weight": rand(8, seed=2)},
    ),
    "rotate": op(rotate, rotate_reference, x=rand(3, 2, 8), **TURN),
    "rotate_and_store": op(
        rotate_and_store, rotate_and_store_reference, written=("k_cache", "v_cache"), qk=rand(3, 3, 8),
        v=rand(3, 1, 8, seed=1), k_cache=rand(9, 8, seed=2), v_cache=rand(9, 8, seed=3), places=ints(4, 2, 7), **TURN,
    ),
    "norm_linear": op(
        norm_linear, norm_linear_reference, **NORM, delta=rand(2, 3, 16, seed=1), weight=rand(5, 16, seed=2),
        bias=rand(5, seed=3), **FEW,
    ),
    "norm_rows": op(norm_rows, norm_rows_reference, **NORM, delta=rand(2, 16, seed=1), **FEW),
    "row_logits": op(row_logits, row_logits_reference, x=rand(2, 16), weight=rand(5, 16, seed=1)),
    "norm_gate": op(
        norm_gate, norm_gate_reference, **NORM, router=rand(8, 16, seed=1), gate_up=rand(6, 16, seed=2), **FEW
    ),
    "add_linear": op(
        add_linear, add_linear_reference, x=rand(2, 16), weight=rand(5, 16, seed=1), residual=rand(2, 5, seed=2)
    ),
    "choose_experts": Op(
        partial(chosen, choose_experts), partial(chosen, choose_experts_reference),
        {"logits": rand(3, 8, seed=9), "correction": rand(8, seed=10), "gated": rand(3, 6), "down": rand(5, 6, seed=1),
         "residual": rand(3, 5, seed=2)},
    ),
    "fused_experts": op(
        fused_experts, fused_experts_reference, {"experts": EXPERTS}, {"backend": "triton", "up": TILE, "down": TILE},
        **ROUTED, expert_map=ints(2, -1, 0, 1),
    ),
    "expert_slots": Op(slots_of_aligned, partial(expert_slots_reference, experts=EXPERTS), ROUTED),
    "store_kv_cache": op(
        store_kv_cache, store_kv_cache_reference, written=("k_cache", "v_cache"), k=rand(3, 8), v=rand(3, 6, seed=1),
        k_cache=rand(9, 8, seed=2), v_cache=rand(9, 6, seed=3), indices=ints(4, 2, 7, dtype=torch.int64),
    ),
    "block_fp8_linear": op(
        block_fp8_linear, block_fp8_linear_reference, {"prepared": LINEAR, "out_dtype": torch.float32},
        {"backend": "triton"}, x=fp8(3, 256, seed=7), x_scale=rand(3, 2, seed=8).abs(), bias=rand(40, seed=9),
    ),
    "fp8_linear": op(
        fp8_linear, fp8_linear_reference, {"prepared": ROWS}, {"backend": "triton"}, x=rand(3, 64),
        bias=rand(40, seed=9),
    ),
    "new_token_attention": Op(
        partial(rules_and_tokens, new_token_attention), partial(rules_and_tokens, new_token_attention_reference),
        {"cos": rand(5, 4).cos().repeat(1, 2), "sin": rand(5, 4).sin().repeat(1, 2), "q_norm": rand(8, seed=1),
         "k_norm": rand(8, seed=2), "positions": ints(4, 2, dtype=torch.int64), "slots": ints(1, 0, dtype=torch.int64),
         "qkv": rand(2, 64), "k_cache": rand(17, 16, seed=3), "v_cache": rand(17, 16, seed=4),
         "weight": rand(5, 32, seed=5), "bias": rand(5, seed=6), "residual": rand(2, 5, seed=7)},
        ("k_cache", "v_cache"),
    ),
    "per_token_group_quant_fp8": op(
        per_token_group_quant_fp8, per_token_group_quant_fp8_reference, {"group": 32}, x=rand(3, 64)
    ),
    "scaled_fp8_quant": op(scaled_fp8_quant, scaled_fp8_quant_reference, x=rand(3, 64), scale=rand(1, seed=1).abs()),
    "moe_sum_reduce": op(moe_sum_reduce, moe_sum_reduce_reference, written=("out",), x=rand(3, 2, 8), out=rand(3, 8)),
    "topk": op(topk, topk_reference, {"router": Router(2, "sigmoid")}, **LOGITS),
    "grouped_topk": op(
        grouped_topk, grouped_topk_reference, {"router": Router(2, "sigmoid", groups=4, top_groups=2)}, **LOGITS
    ),
    "router_logits": op(router_logits, router_logits_reference, x=rand(3, 16), weight=rand(8, 16, seed=1)),
}  # fmt: skip


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with others between them, which nothing may read or write."""
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 3.0, device=DEVICE).to(tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    """The first row in the place of each."""
    return tensor[:1].expand(tensor.shape)


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [t for t in value or () if t is not None]


def test_every_op_with_a_twin_is_here() -> None:
    public = {
        name.removesuffix("_reference")
        for module in pkgutil.iter_modules(ops.__path__)
        for name in vars(importlib.import_module(f"{ops.__name__}.{module.name}"))
        if name.endswith("_reference") and not name.startswith("_")
    }
    assert public - {"run"} == set(OPS)


VIEWS = [
    (name, argument, view) for name, one in OPS.items() for argument in one.tensors for view in (strided, expanded)
    if view is strided or argument not in one.written  # which would be one place of memory for several rows
]  # fmt: skip


@pytest.mark.parametrize(("name", "argument", "view"), VIEWS)
def test_strides_of_an_argument_are_followed_or_refused(
    name: str, argument: str, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    one = OPS[name]
    given = {key: value.clone() for key, value in one.tensors.items()}
    given[argument] = view(given[argument])
    plain = {key: value.contiguous().clone() for key, value in given.items()}
    got, refusal = None, ""
    try:
        got = tensors_of(one.run(**given))
    except ValueError as error:
        refusal = str(error)
    if got is None:
        assert argument in refusal
        assert re.search("contiguous|stride", refusal), refusal
        return
    want = tensors_of(one.twin(**plain))
    for mine, twin in zip([*got, *(given[key] for key in one.written)], [*want, *(plain[key] for key in one.written)],
                          strict=True):  # fmt: skip
        assert mine.dtype == twin.dtype
        # sums of FP8 products lose digits on a device; what another element's value would change is far more
        largest = float(twin.float().abs().max()) if twin.numel() else 0.0
        torch.testing.assert_close(mine.float(), twin.float(), rtol=2e-3, atol=2e-3 * largest)
