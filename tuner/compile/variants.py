"""Every kernel variant, as a call of the public operator on tensors without memory (torch's meta device)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tuner.compile.targets import SimulatedDevice, Target
from xkernels.ops.activation import SILU, Activation, silu_and_mul
from xkernels.ops.align import moe_align_block_size
from xkernels.ops.attention import decode_attention
from xkernels.ops.decoder import add_rms_norm, rotate, rotate_and_store
from xkernels.ops.expert_layout import EpLayout, Mode, Wire
from xkernels.ops.expert_parallel import Dispatched, _permute, _route, _unpermute
from xkernels.ops.few_rows import add_linear, choose_experts, norm_gate, norm_linear, norm_rows, row_logits
from xkernels.ops.fused_experts import PreparedExperts, fused_experts, prepare_experts
from xkernels.ops.kv_cache import store_kv_cache
from xkernels.ops.linear import block_fp8_linear, fp8_linear, prepare_block_fp8, prepare_fp8
from xkernels.ops.new_token import HeadRules, NewTokens, new_token_attention
from xkernels.ops.quant import per_token_group_quant_fp8, scaled_fp8_quant
from xkernels.ops.reduce import moe_sum_reduce
from xkernels.ops.scheme import Scheme
from xkernels.ops.topk import Router, router_logits, topk

__all__ = ["VARIANTS", "Variant", "experts_call", "linear_call"]

_TOKENS, _EXPERTS, _TOPK, _HIDDEN, _INTER = 64, 8, 2, 512, 256


@dataclass(frozen=True)
class Variant:
    """One call. `basic` variants together reach every kernel once; the others are its further specialisations.

    `descriptors`: it asks for descriptor loads of weights.
    """

    name: str
    call: Callable[[Target], Any]
    basic: bool = False
    descriptors: bool = False


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of a shape and no memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def prepared(target: Target, scheme: Scheme, dtype: torch.dtype, sizes: tuple[int, int, int],
             biases: bool = False, activation: Activation = SILU) -> PreparedExperts:  # fmt: skip
    """Expert weights of (experts, hidden, intermediate) under a scheme."""
    e, h, n = sizes
    kw: dict[str, Any] = {"scheme": scheme, "activation": activation}
    if biases:
        kw |= {"b1": meta(e, 2 * n), "b2": meta(e, h)}
    if scheme.kind == "none":
        return prepare_experts(meta(e, 2 * n, h, dtype=dtype), meta(e, h, n, dtype=dtype), **kw)
    if scheme.kind == "mxfp4":
        byte = torch.uint8
        kw |= {"w1_scale": meta(e, 2 * n, h // 32, dtype=byte), "w2_scale": meta(e, h, n // 32, dtype=byte)}
        return prepare_experts(meta(e, 2 * n, h // 2, dtype=byte), meta(e, h, n // 2, dtype=byte), **kw)
    fp8 = getattr(torch, target.fp8)
    f32 = torch.float32
    if scheme.kind == "fp8_block":
        blocks = [(e, -(-2 * n // 128), -(-h // 128)), (e, -(-h // 128), -(-n // 128))]
        kw |= {"w1_scale": meta(*blocks[0], dtype=f32), "w2_scale": meta(*blocks[1], dtype=f32)}
    else:
        kw |= {"w1_scale": meta(e, 2 * n, dtype=f32), "w2_scale": meta(e, h, dtype=f32)}
    return prepare_experts(meta(e, 2 * n, h, dtype=fp8), meta(e, h, n, dtype=fp8), **kw)


def experts_call(target: Target, *, kind: str = "none", tile: tuple[int, int, int] = (64, 64, 64), warps: int = 4,
                 stages: int = 2, dtype: torch.dtype = torch.bfloat16, extra: dict[str, Any] | None = None,
                 sizes: tuple[int, int, int] = (_EXPERTS, _HIDDEN, _INTER), topk_: int = _TOPK, biases: bool = False,
                 activation: Activation = SILU, **kw: Any) -> Any:  # fmt: skip
    """`fused_experts` with one tile for both projections."""
    scheme = Scheme(kind, (128, 128) if kind == "fp8_block" else None)  # type: ignore[arg-type]
    config = {"BLOCK_SIZE_M": tile[0], "BLOCK_SIZE_N": tile[1], "BLOCK_SIZE_K": tile[2], "GROUP_SIZE_M": 8,
              "num_warps": warps, "num_stages": stages, **(extra or {})}  # fmt: skip
    experts = prepared(target, scheme, dtype, sizes, biases, activation)
    weights, ids = meta(_TOKENS, topk_, dtype=torch.float32), meta(_TOKENS, topk_, dtype=torch.int32)
    x = meta(_TOKENS, sizes[1], dtype=dtype)
    return fused_experts(x, experts, weights, ids, backend="triton", up=config, down=config, **kw)


def _streamed(target: Target, stages: int, **kw: Any) -> Any:
    """Experts with a tile that streams weights where the target can; fewer stages, which fit anywhere, elsewhere."""
    return experts_call(
        target, tile=(16, 128, 128), stages=stages if "wgmma" in target.features else 2, extra={"USE_TMA": True}, **kw
    )


def _many_rows(target: Target, depth: int, **kw: Any) -> Any:
    """Experts with the tile of the kernel for many rows where the target has it, else with one that fits anywhere."""
    has_it = "wgmma" in SimulatedDevice(target).features()
    tile, warps, stages = ((128, 256, depth), 8, 4) if has_it else ((64, 64, depth), 4, 2)
    return experts_call(target, tile=tile, warps=warps, stages=stages, extra={"USE_TMA": True}, **kw)


def _topk(target: Target, router: Router) -> Any:
    del target
    bias = meta(64, dtype=torch.float32) if router.groups > 1 else None
    return topk(meta(_TOKENS, 64, dtype=torch.float32), router, bias)


def _align(target: Target, tokens: int) -> Any:
    del target
    return moe_align_block_size(meta(tokens, 8, dtype=torch.int32), 64, 64)


def _quant(target: Target, k: int = 512, group: int = 128, **kw: Any) -> Any:
    return per_token_group_quant_fp8(meta(_TOKENS, k), group, dtype=getattr(torch, target.fp8), **kw)


def _static(target: Target) -> Any:
    return scaled_fp8_quant(meta(_TOKENS, 512), meta(1, dtype=torch.float32), dtype=getattr(torch, target.fp8))


def linear_call(target: Target, *, shape: tuple[int, int], block: tuple[int, int], config: dict[str, Any],
                rows: int = _TOKENS) -> Any:  # fmt: skip
    """`block_fp8_linear` of weights of `shape` (N, K) with one tile, of rows that are quantised already."""
    n, k = shape
    fp8, f32 = getattr(torch, target.fp8), torch.float32
    scale = meta(-(-n // block[0]), -(-k // block[1]), dtype=f32)
    p = prepare_block_fp8(meta(n, k, dtype=fp8), scale, block)
    x, x_scale = meta(rows, k, dtype=fp8), meta(rows, -(-k // block[1]), dtype=f32)
    return block_fp8_linear(x, p, backend="triton", x_scale=x_scale, out_dtype=torch.bfloat16, config=config)


def _linear(target: Target, block: tuple[int, int] | None, rows: int = 64, **extra: Any) -> Any:
    config = {"BLOCK_SIZE_M": 64 if rows > 16 else 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "num_warps": 4,
              "num_stages": 2, **extra}  # fmt: skip
    if block is not None:
        return linear_call(target, shape=(512, 512), block=block, config=config, rows=rows)
    p = prepare_fp8(meta(512, 512, dtype=getattr(torch, target.fp8)), meta(512, dtype=torch.float32))
    return fp8_linear(meta(rows, 512), p, backend="triton", config=config)


def _store(target: Target) -> Any:
    del target
    kv, cache = meta(_TOKENS, 1024), meta(4096, 1024)
    return store_kv_cache(kv, kv, cache, cache, meta(_TOKENS, dtype=torch.int32))


def _decode(target: Target) -> Any:
    del target
    cache, ints = meta(4096, 2, 128), torch.int32
    return decode_attention(meta(4, 8, 128), cache, cache, meta(4, 512, dtype=ints), meta(4, dtype=ints))


def _between(target: Target) -> Any:
    """What lies between a decoder's big operators."""
    del target
    x, turn, cache = meta(2, 1280), meta(2, 128), meta(4096, 1280)
    rotate_and_store(meta(2, 20, 128), meta(2, 10, 128), turn, turn, cache, cache, meta(2, dtype=torch.int64))
    rotate(meta(2, 20, 128), turn, turn)
    add_rms_norm(x, (x,), meta(1280), 1e-6, overlap=True)
    return router_logits(x, meta(64, 1280, dtype=torch.float32))


def _few_rows(
    target: Target, rows: int, normed_heads: bool = False, router: Router | None = None, shared: bool = True
) -> Any:
    """A layer of a decode step of a few rows, at DeepSeek-OCR-2's dimensions; without a router a dense one.

    Without shared experts its linear layers have biases, and the experts align their entries themselves.
    """
    del target
    f32, int64 = torch.float32, torch.int64
    x, gain, turn, cache = meta(rows, 1280), meta(1280), meta(4096, 128), meta(8193, 1280)
    norm = meta(128) if normed_heads else None
    rules = HeadRules(10, 10, turn, turn, 1e-6, norm, norm)
    at = NewTokens(meta(rows, dtype=int64), meta(rows, dtype=int64), 4096, 4096)
    qkv_bias, out_bias = (None, None) if shared else (meta(3840), meta(1280))
    x, qkv = norm_linear(x, None if router is None else meta(rows, 6, 1280), gain, 1e-6, meta(3840, 1280), qkv_bias)
    x = new_token_attention(qkv, rules, at, cache, cache, meta(1280, 1280), out_bias, x)
    if router is None:
        _, _, gated = norm_gate(x, gain, 1e-6, None, meta(13696, 1280))
        return add_linear(gated, meta(1280, 6848), x)
    _, logits, gated = norm_gate(x, gain, 1e-6, meta(64, 1280, dtype=f32), meta(3584, 1280) if shared else None)
    correction = meta(64, dtype=f32) if router.groups > 1 else None
    beside = (gated, meta(1280, 1792)) if shared else None
    _, x = choose_experts(logits, router, correction, 16 if shared else None, beside, x)
    return row_logits(norm_rows(x, meta(rows, 6, 1280), gain, 1e-6), meta(129280, 1280))


def _expert_parallel(target: Target, mode: Mode) -> Any:
    """What a rank does with rows before it sends them and after they came home; sending itself is no kernel."""
    del target
    ranks, ints, f32 = 4, torch.int32, torch.float32
    layout = EpLayout(
        None, 0, ranks, 64, _HIDDEN, _TOPK, mode, "triton", Wire.of_checkpoint(None, torch.bfloat16), torch.bfloat16,
        None, meta(64, dtype=ints), meta(64, dtype=ints),
    )  # fmt: skip
    entries = _TOPK if mode == "deterministic" else ranks
    place, _ = _route(meta(_TOKENS * entries, dtype=ints), layout)
    rows = _permute(meta(_TOKENS, _HIDDEN), place, entries, _TOKENS)
    weights, ids = meta(_TOKENS, _TOPK, dtype=f32), meta(_TOKENS, _TOPK, dtype=ints)
    sent = Dispatched(rows, ids, weights, place.view(_TOKENS, entries), weights, (_TOKENS,), (_TOKENS,))
    return _unpermute(meta(_TOKENS, _HIDDEN), sent, layout, None)


def _plain(call: Callable[..., Any], *args: Any) -> Callable[[Target], Any]:
    return lambda target: call(*(a() for a in args))


_TMA: dict[str, Any] = {"USE_TMA": True}
_GPT_OSS = Activation("swiglu", alpha=1.702, limit=7.0)

VARIANTS: tuple[Variant, ...] = (
    Variant("experts bf16", partial(experts_call, extra={"PROGRAMS": 0}), basic=True),
    Variant("experts bf16 descriptors", partial(experts_call, extra=_TMA), basic=True, descriptors=True),
    Variant(
        "experts bf16 swapped",
        partial(experts_call, tile=(16, 64, 64), extra={**_TMA, "SWAP_AB": True}),
        descriptors=True,
    ),
    Variant("experts bf16 no overlap", partial(experts_call, extra={"PDL": False})),
    Variant("experts fp16", partial(experts_call, dtype=torch.float16)),
    Variant("experts fp32", partial(experts_call, dtype=torch.float32, tile=(16, 64, 32))),
    Variant("experts bf16 swiglu biases", partial(experts_call, biases=True, activation=_GPT_OSS)),
    Variant("experts bf16 weight on input", partial(experts_call, apply_router_weight_on_input=True)),
    Variant("experts fp8 tensor or channel", partial(experts_call, kind="fp8_channel")),
    Variant("experts fp8 channel descriptors", partial(experts_call, kind="fp8_channel", extra=_TMA), descriptors=True),
    Variant("experts fp8 block", partial(experts_call, kind="fp8_block", tile=(64, 64, 128)), basic=True),
    Variant(
        "experts fp8 block descriptors",
        partial(experts_call, kind="fp8_block", tile=(64, 64, 128), extra=_TMA),
        descriptors=True,
    ),
    Variant("experts fp8 block quantising", partial(experts_call, kind="fp8_block", tile=(64, 256, 128), warps=8)),
    Variant(
        "experts fp8 block few rows",
        partial(experts_call, kind="fp8_block", tile=(16, 64, 128), extra=_TMA),
        descriptors=True,
    ),
    Variant("experts bf16 streamed", partial(_streamed, stages=6), basic=True, descriptors=True),
    Variant("experts fp8 block streamed", partial(_streamed, stages=12, kind="fp8_block"), descriptors=True),
    Variant("experts bf16 many rows", partial(_many_rows, depth=64), basic=True, descriptors=True),
    Variant("experts fp8 block many rows", partial(_many_rows, depth=128, kind="fp8_block"), descriptors=True),
    Variant("experts bf16 single rows", partial(experts_call, tile=(1, 32, 256)), basic=True),
    Variant("experts fp8 block single rows", partial(experts_call, kind="fp8_block", tile=(1, 32, 256), stages=4)),
    Variant("experts fp8 channel single rows", partial(experts_call, kind="fp8_channel", tile=(1, 32, 256))),
    Variant("experts mxfp4 single rows", partial(experts_call, kind="mxfp4", tile=(1, 32, 256))),
    Variant("experts mxfp4", partial(experts_call, kind="mxfp4")),
    Variant("experts mxfp4 descriptors", partial(experts_call, kind="mxfp4", extra=_TMA), descriptors=True),
    Variant("align one chunk", partial(_align, tokens=16), basic=True),
    Variant("align chunks", partial(_align, tokens=512), basic=True),
    Variant("topk softmax", partial(_topk, router=Router(6)), basic=True),
    Variant("topk grouped", partial(_topk, router=Router(6, "sigmoid", groups=8, top_groups=4, shared_slots=1))),
    Variant("topk sqrtsoftplus", partial(_topk, router=Router(6, "sqrtsoftplus"))),
    Variant("silu_and_mul", _plain(silu_and_mul, partial(meta, _TOKENS, 512)), basic=True),
    Variant("moe_sum_reduce", _plain(moe_sum_reduce, partial(meta, _TOKENS, 6, 512)), basic=True),
    Variant("group quant", _quant, basic=True),
    Variant("group quant many rows", partial(_quant, k=8192)),
    Variant("group quant packed", partial(_quant, column_major=True, tma_aligned=True, ue8m0=True)),
    Variant("group quant powers of two", partial(_quant, ue8m0=True)),
    Variant("token quant", partial(_quant, k=2048, group=2048), basic=True),
    Variant("static quant", _static, basic=True),
    Variant("block linear", partial(_linear, block=(128, 128)), basic=True),
    Variant(
        "block linear descriptors few rows", partial(_linear, block=(128, 128), rows=16, USE_TMA=True), descriptors=True
    ),
    Variant("block linear rows", partial(_linear, block=(1, 128))),
    Variant("fp8 linear", partial(_linear, block=None)),
    Variant("expert parallel", partial(_expert_parallel, mode="fast"), basic=True),
    Variant("expert parallel deterministic", partial(_expert_parallel, mode="deterministic")),
    Variant("store_kv_cache", _store, basic=True),
    Variant("decode_attention", _decode, basic=True),
    Variant("between a decoder's operators", _between, basic=True),
    Variant("few rows", partial(_few_rows, rows=1, router=Router(6, renormalize=False)), basic=True),
    Variant("few rows dense", partial(_few_rows, rows=1)),
    Variant("few rows no shared experts", partial(_few_rows, rows=2, router=Router(6), shared=False)),
    Variant(
        "few rows grouped",
        partial(_few_rows, rows=4, normed_heads=True, router=Router(6, "sigmoid", groups=8, top_groups=4)),
    ),
)
