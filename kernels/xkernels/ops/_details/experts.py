"""The rows of `fused_experts` and the two projections they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xkernels.device import is_interpreted, of
from xkernels.ops._details import large_experts as _large
from xkernels.ops._details import moe_gemm as _k
from xkernels.ops._details import stream_experts as _stream
from xkernels.ops._details import vector_experts as _vector
from xkernels.ops._details.common import cdiv
from xkernels.ops.align import Alignment, moe_align_block_size
from xkernels.ops.mxfp4 import dequantize_mxfp4
from xkernels.ops.prepared import GROUP, PreparedExperts, can_describe, deinterleave, make_descriptor
from xkernels.ops.quant import per_token_group_quant_fp8, per_token_group_quant_fp8_reference
from xkernels.ops.reduce import moe_sum_reduce
from xkernels.ops.scheme import BLOCK_K

_INLINE_ROWS = 32  # up to this BLOCK_SIZE_M a tile's activation is quantised inside the GEMM


@dataclass(frozen=True)
class Call:
    """Arguments of one `fused_experts` call."""

    x: torch.Tensor
    experts: PreparedExperts
    weights: torch.Tensor
    ids: torch.Tensor
    up: Mapping[str, Any] | None
    down: Mapping[str, Any] | None
    weight_on_input: bool
    scale: float | None


@dataclass(frozen=True)
class Rows:
    """Sorted activations between the projections: values [used rows, padded N], and scales where they are FP8.

    `scale`: float32 [used rows, groups], by row whoever quantised: the down projection's binary depends on it.
    """

    values: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def scale_strides(self) -> tuple[int, int]:
        """From row to row and from group to group."""
        return (0, 0) if self.scale is None else (self.scale.stride(0), self.scale.stride(1))


def run_triton(c: Call) -> torch.Tensor:
    """Align, up, down, combine with Triton kernels."""
    if c.up is None or c.down is None:
        raise ValueError("backend triton needs the configs of both projections (up and down)")
    if c.up["BLOCK_SIZE_M"] != c.down["BLOCK_SIZE_M"]:
        raise ValueError(
            f"up and down must share BLOCK_SIZE_M, not {c.up['BLOCK_SIZE_M']} and {c.down['BLOCK_SIZE_M']}"
        )
    if c.x.shape[0] == 0:
        return torch.empty_like(c.x)
    alignment = moe_align_block_size(c.ids, int(c.up["BLOCK_SIZE_M"]), c.experts.num_experts)
    return run_aligned(c, alignment)


def run_aligned(c: Call, alignment: Alignment) -> torch.Tensor:
    """Up, down and combine for an alignment made before."""
    assert c.up is not None
    assert c.down is not None
    hidden = up_projection(c.x, c.experts, c.weights, alignment, c.up, c.weight_on_input, down=c.down)
    outs = down_projection(hidden, c.experts, c.weights, alignment, c.down, c.x.dtype, c.weight_on_input)
    return moe_sum_reduce(outs, c.scale, overlap=overlaps(c.down, c.x))


def blocks_of(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """BLOCK_SIZE_M, _N and _K of a config."""
    return int(config["BLOCK_SIZE_M"]), int(config["BLOCK_SIZE_N"]), int(config["BLOCK_SIZE_K"])


def options(config: Mapping[str, Any], device: torch.Tensor, num_warps: int = 4) -> dict[str, Any]:
    """Launch options of a config; absent fields keep Triton's defaults."""
    out = {name: config[name] for name in ("num_warps", "num_stages") if name in config}
    out.setdefault("num_warps", num_warps)
    if overlaps(config, device):
        out["launch_pdl"] = True
    return out


def overlaps(config: Mapping[str, Any], tensor: torch.Tensor) -> bool:
    """Whether kernels are launched so that they overlap with their predecessor."""
    return bool(config.get("PDL", True)) and "pdl" in of(tensor).features()


def used_blocks(alignment: Alignment, slots: int) -> int:
    """Upper bound of used blocks: each of `slots` routed entries opens at most one."""
    return min(alignment.expert_ids.numel(), slots)


def up_projection(
    x: torch.Tensor,
    e: PreparedExperts,
    weights: torch.Tensor,
    alignment: Alignment,
    config: Mapping[str, Any],
    weight_on_input: bool = False,
    down: Mapping[str, Any] | None = None,
) -> Rows:
    """Up GEMM and gated activation in sorted order, quantised as the down projection (config `down`) wants it."""
    if _vector.fits(config):
        xq, xs, _ = _quantize_input(x, e, e.scheme.kind == "fp8_block", overlaps(config, x))
        launch = {"PDL": overlaps(config, x), **options(config, x)}
        return Rows(_vector.up(xq, xs, e, weights, alignment, config, weight_on_input, x.dtype, launch))
    block_m, block_n, block_k = blocks_of(config)
    _check_tile(e, block_n, block_k)
    topk = weights.shape[1]
    slots = x.shape[0] * topk
    rows = used_blocks(alignment, slots) * block_m
    n2, k, entries = e.w1.shape[1], e.hidden, alignment.sorted_ids.numel()
    block = e.scheme.kind == "fp8_block"
    inline = block and _inline_up(config, block_k, x)
    tiles = _quant_tiles(e, config, down or config)
    overlap = overlaps(config, x)
    xq, xs, xs_m = _quantize_input(x, e, inline, overlap)
    if _large.fits(e, config, x.dtype, x) and not weight_on_input:
        values, scales = _large.up(xq, xs, e, topk, alignment, rows, config, overlap)
        return Rows(values, scales)
    if _stream.fits(e, config, x.dtype, x) and not weight_on_input:
        return Rows(*_stream.up(xq, xs, e, topk, alignment, rows, config, overlap))
    out = torch.empty(rows, n2 // 2, dtype=e.w1.dtype if tiles else x.dtype, device=x.device)
    scale = torch.empty(rows, e.padded // BLOCK_K, dtype=torch.float32, device=x.device) if tiles else None
    tma = _tma(config, e.w1)
    w1 = e.descriptors.get("w1", e.w1, block_n, block_k // _pack(e)) if tma else e.w1
    paired = block and e.scheme.block is not None and e.scheme.block[0] % (block_n // 2) == 0
    paired = paired and e.intermediate % BLOCK_K == 0
    per_unit = 0 if block else _programs(config, _SCHEMES[e.scheme.kind], e.w1.element_size(), x)
    per_unit = 0 if tiles == 2 else int(config.get("PROGRAMS", per_unit))
    # A pass over the input has waited for the alignment, which nothing else here has.
    ready = overlap and per_unit == 0 and xs is not None
    _k.up_gemm[_grid(per_unit, cdiv(rows, block_m) * cdiv(n2, block_n * max(1, tiles)), x)](
        xq, xs, w1, e.w1_scale, e.b1, out, scale, weights, alignment.sorted_ids, alignment.expert_ids,
        alignment.num_post_padded, slots, entries, n2, k, xq.stride(0), xq.stride(1), xs_m, e.w1.stride(0),
        e.w1.stride(1), *_scale_strides(e.w1_scale), out.stride(0), e.padded // BLOCK_K, TOPK=topk, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_K=block_k, GROUP=int(config.get("GROUP_SIZE_M", 1)), GROUP_N=GROUP, GROUP_K=BLOCK_K,
        W_TMA=tma, EVEN_N=n2 % block_n == 0, EVEN_K=k % block_k == 0, SCHEME=_SCHEMES[e.scheme.kind],
        SCALES="two" if paired else "each", INLINE=inline, QUANT_OUT=tiles, SWAP=_swap(config),
        HAS_BIAS=e.b1 is not None, MUL_WEIGHT=weight_on_input, PDL=overlap, READY=ready,
        FLATTEN=per_unit > 0,
        **e.activation.constexprs(), **options(config, x),
    )  # fmt: skip
    return Rows(out, scale)


def down_projection(
    hidden: Rows,
    e: PreparedExperts,
    weights: torch.Tensor,
    alignment: Alignment,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    weight_on_input: bool = False,
) -> torch.Tensor:
    """Down GEMM of sorted rows, times the router weight unless the input had it: [tokens, topk, H] of `dtype`."""
    if _vector.fits(config):
        hidden = _quantize_rows(hidden, e, alignment, e.scheme.kind == "fp8_block", overlaps(config, weights))
        launch = {"PDL": overlaps(config, weights), **options(config, weights)}
        return _vector.down(hidden.values, hidden.scale, e, weights, alignment, config, not weight_on_input, dtype,
                            launch)  # fmt: skip
    block_m, block_n, block_k = blocks_of(config)
    _check_tile(e, block_n, block_k)
    tokens, topk = weights.shape
    n, k, entries = e.w2.shape[1], e.down_k, alignment.sorted_ids.numel()
    block = e.scheme.kind == "fp8_block"
    inline = block and hidden.scale is None and _inline(config, block_k)
    overlap = overlaps(config, weights)
    hidden = _quantize_rows(hidden, e, alignment, inline, overlap)
    if _large.fits(e, config, dtype, weights):
        return _large.down(hidden.values, hidden.scale, hidden.scale_strides, e, weights, alignment, config,
                           not weight_on_input, dtype, overlap)  # fmt: skip
    if _stream.fits(e, config, dtype, weights):
        return _stream.down(hidden.values, hidden.scale, hidden.scale_strides, e, weights, alignment, config,
                            not weight_on_input, dtype, overlap)  # fmt: skip
    out = torch.empty(tokens, topk, n, dtype=dtype, device=weights.device)
    rows = hidden.values.shape[0]
    tma = _tma(config, e.w2)
    w2 = e.descriptors.get("w2", e.w2, block_n, block_k // _pack(e)) if tma else e.w2
    a_tma = tma and not inline and can_describe(hidden.values) and k == hidden.values.shape[1]
    h = make_descriptor(hidden.values, block_m, block_k) if a_tma else hidden.values
    one = block and e.scheme.block is not None and e.scheme.block[0] % block_n == 0
    per_unit = _programs(config, _SCHEMES[e.scheme.kind], e.w2.element_size(), weights)
    _k.down_gemm[_grid(per_unit, cdiv(rows, block_m) * cdiv(n, block_n), weights)](
        h, hidden.scale, w2, e.w2_scale, e.b2, out, weights, alignment.sorted_ids, alignment.expert_ids,
        alignment.num_post_padded, tokens * topk, entries, n, k, hidden.values.stride(0),
        *hidden.scale_strides, e.w2.stride(0), e.w2.stride(1), *_scale_strides(e.w2_scale), out.stride(1),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=int(config.get("GROUP_SIZE_M", 1)),
        GROUP_N=BLOCK_K, GROUP_K=BLOCK_K, A_TMA=a_tma, W_TMA=tma, EVEN_N=n % block_n == 0,
        EVEN_K=k % block_k == 0, SCHEME=_SCHEMES[e.scheme.kind], SCALES="one" if one else "each", INLINE=inline,
        SWAP=_swap(config), HAS_BIAS=e.b2 is not None, MUL_WEIGHT=not weight_on_input,
        PDL=overlap, FLATTEN=per_unit > 0,
        **options(config, weights),
    )  # fmt: skip
    return out


_SCHEMES = {"none": "none", "fp8_tensor": "row", "fp8_channel": "row", "fp8_block": "block", "mxfp4": "mxfp4"}


def _programs(config: Mapping[str, Any], scheme: str, size: int, tensor: torch.Tensor) -> int:
    """Persistent programs per multiprocessor, 0 for one program per tile; a config's PROGRAMS overrides the rule.

    Walking tiles pays where a tile is large and its loop short (measured on an H200, docs/results); block scales cost
    so many registers in the flattened loop that the up projection is better off without.
    """
    if "PROGRAMS" in config:
        return int(config["PROGRAMS"])
    block_m, block_n, block_k = blocks_of(config)
    if block_m < 64 or scheme not in ("none", "block"):
        return 0
    warps, stages = int(config.get("num_warps", 4)), int(config.get("num_stages", 3))
    limits = of(tensor).limits()
    shared = stages * (block_m + block_n) * block_k * size + block_m * block_n * 2 + 1024
    registers = block_m * block_n // (32 * warps) * (2 if scheme == "block" else 1) + 72
    return max(1, min(limits.shared_bytes // shared, _REGISTERS // (32 * warps * registers)))


_REGISTERS = 65536  # 32-bit registers of a multiprocessor


def _grid(per_unit: int, tiles: int, tensor: torch.Tensor) -> tuple[int]:
    units = of(tensor).limits().units
    return (min(tiles, per_unit * units) if per_unit else tiles,)


def _quant_tiles(e: PreparedExperts, up: Mapping[str, Any], down: Mapping[str, Any]) -> int:
    """Tiles of the up projection that one program computes to quantise their result for the down projection.

    0: it leaves the result unquantised. A group of the result is 128 columns: one tile of BLOCK_SIZE_N 256 or two of
    128; two are for many rows, where a pass over the intermediate costs more than the longer program.
    """
    if e.scheme.kind != "fp8_block" or e.padded % BLOCK_K or _inline(down, BLOCK_K):
        return 0
    tiles = {2 * BLOCK_K: 1, BLOCK_K: 2}.get(int(up["BLOCK_SIZE_N"]), 0)
    return tiles if bool(up.get("QUANT_OUT", tiles == 1 or int(up["BLOCK_SIZE_M"]) > _INLINE_ROWS)) else 0


def _pack(e: PreparedExperts) -> int:
    return 2 if e.scheme.kind == "mxfp4" else 1


def _swap(config: Mapping[str, Any]) -> bool:
    """Weights as the left operand: for few rows, where the matrix unit has 64 of them at least."""
    block_m, block_n, _ = blocks_of(config)
    return bool(config.get("SWAP_AB", block_m <= 32 and block_n >= 64 and not is_interpreted()))


def _inline(config: Mapping[str, Any], block_k: int) -> bool:
    streamed = _stream.other_config("fp8_block", config) is None  # by a kernel that takes rows quantised
    inline = int(config["BLOCK_SIZE_M"]) <= _INLINE_ROWS and not streamed
    return bool(config.get("INLINE", inline)) and block_k == BLOCK_K


def _inline_up(config: Mapping[str, Any], block_k: int, x: torch.Tensor) -> bool:
    """As `_inline`, for the up projection: a pass of its own over the input costs nothing where kernels overlap."""
    return _inline(config, block_k) and ("INLINE" in config or not overlaps(config, x))


def _tma(config: Mapping[str, Any], weight: torch.Tensor) -> bool:
    return bool(config.get("USE_TMA", False)) and can_describe(weight)


def _scale_strides(scale: torch.Tensor | None) -> tuple[int, int, int]:
    if scale is None:
        return 0, 0, 0
    return scale.stride(0), scale.stride(1), scale.stride(2) if scale.ndim == 3 else 0


def _check_tile(e: PreparedExperts, block_n: int, block_k: int) -> None:
    if block_n < 2 * GROUP:
        raise ValueError(f"BLOCK_SIZE_N must be at least {2 * GROUP}, not {block_n}")
    if e.scheme.kind == "fp8_block" and BLOCK_K % block_k:
        raise ValueError(f"BLOCK_SIZE_K must divide the scale group of {BLOCK_K}, not be {block_k}")
    if e.scheme.kind == "mxfp4" and block_k % 32:
        raise ValueError(f"BLOCK_SIZE_K must be a multiple of the scale group of 32, not {block_k}")


def _quantize_input(
    x: torch.Tensor, e: PreparedExperts, inline: bool, overlap: bool
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Activations as the up GEMM takes them, their scales, and the scales' stride from token to token."""
    if not e.scheme.fp8 or inline:
        return x, None, 0
    x = x.contiguous()
    group = BLOCK_K if e.scheme.kind == "fp8_block" else x.shape[1]
    if x.shape[1] % group:
        raise ValueError(f"hidden size must be a multiple of {group} for {e.scheme.kind}, not {x.shape[1]}")
    q, s = per_token_group_quant_fp8(x, group, dtype=e.w1.dtype, overlap=overlap)
    return q, s, s.stride(0)


def _quantize_rows(hidden: Rows, e: PreparedExperts, alignment: Alignment, inline: bool, overlap: bool) -> Rows:
    if not e.scheme.fp8 or inline or hidden.scale is not None:
        return hidden
    h = hidden.values
    group = BLOCK_K if e.scheme.kind == "fp8_block" else h.shape[1]
    if h.shape[1] % group:
        raise ValueError(f"intermediate size must be a multiple of {group} for {e.scheme.kind}, not {h.shape[1]}")
    q, s = per_token_group_quant_fp8(h, group, dtype=e.w2.dtype, limit=alignment.num_post_padded, overlap=overlap)
    return Rows(q, s)


def run_torch(c: Call) -> torch.Tensor:
    """Per-expert matmuls over the tokens that chose the expert, in x's dtype; fast on the CPU."""
    x, e = c.x, c.experts
    topk = c.ids.shape[1]
    flat = c.ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat + 1, minlength=e.num_experts + 1).tolist()
    out = torch.zeros(x.shape[0], x.shape[1], dtype=torch.float32, device=x.device)
    weights = c.weights.reshape(-1).float()
    at = counts[0]
    for expert, count in enumerate(counts[1:]):
        if not count:
            continue
        slots = order[at : at + count]
        at += count
        tokens = slots // topk
        weight = weights[slots][:, None]
        w1, w2 = expert_weights(e, expert, x.dtype)
        y = torch.mm(_as_quantized(x[tokens], e), w1.t()).float()
        y = y * weight if c.weight_on_input else y
        if e.b1 is not None:
            y = y + e.b1[expert].float()
        pairs = y.view(count, -1, 2, GROUP)
        gate, up = pairs[:, :, 0].reshape(count, -1), pairs[:, :, 1].reshape(count, -1)
        act = e.activation.apply(gate, up)[:, : e.intermediate].to(x.dtype)
        y = torch.mm(_as_quantized(act, e), w2.t()).float()
        if e.b2 is not None:
            y = y + e.b2[expert].float()
        out.index_add_(0, tokens, y if c.weight_on_input else y * weight)
    return (out if c.scale is None else out * c.scale).to(x.dtype)


def expert_weights(e: PreparedExperts, expert: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert's weights as `dtype`: w1 [2 * padded, H] in the prepared order, w2 [H, N]."""
    w1, w2, n = e.w1[expert], e.w2[expert], e.intermediate
    if e.scheme.kind == "none":
        return w1.to(dtype), w2.to(dtype)
    assert e.w1_scale is not None
    assert e.w2_scale is not None
    s1, s2 = e.w1_scale[expert], e.w2_scale[expert]
    if e.scheme.kind == "mxfp4":
        return dequantize_mxfp4(w1, s1).to(dtype), dequantize_mxfp4(w2, s2)[:, :n].to(dtype)
    if e.scheme.kind != "fp8_block":
        return (w1.float() * s1[:, None]).to(dtype), (w2.float() * s2[:, None]).to(dtype)
    assert e.scheme.block is not None
    bn, bk = e.scheme.block
    s1 = s1.repeat_interleave(GROUP, 0).repeat_interleave(bk, 1)[:, : w1.shape[1]]
    s2 = s2.repeat_interleave(bn, 0).repeat_interleave(bk, 1)[: w2.shape[0], : w2.shape[1]]
    return (w1.float() * s1).to(dtype), (w2.float() * s2).to(dtype)


def _as_quantized(x: torch.Tensor, e: PreparedExperts) -> torch.Tensor:
    """Activations [rows, K] with the rounding of their FP8 quantisation, in x's dtype; unchanged for other schemes."""
    if not e.scheme.fp8:
        return x
    group = BLOCK_K if e.scheme.kind == "fp8_block" else x.shape[1]
    q, s = per_token_group_quant_fp8_reference(x.contiguous(), group, dtype=e.w1.dtype)
    return (q.float().unflatten(1, (-1, group)) * s[:, :, None]).flatten(1).to(x.dtype)


def run_reference(c: Call) -> torch.Tensor:
    """float32 arithmetic on dequantised weights and, for FP8, on activations rounded to FP8; expert by expert."""
    e = c.experts
    x = c.x.float()
    b1 = None if e.b1 is None else deinterleave(e.b1.float(), e.intermediate)
    out = torch.zeros_like(x)
    for expert in range(e.num_experts):
        tokens, slots = torch.nonzero(c.ids == expert, as_tuple=True)
        if not tokens.numel():
            continue
        weight = c.weights[tokens, slots].float()[:, None]
        w1, w2 = expert_weights(e, expert, torch.float32)
        y = _as_quantized(x[tokens], e) @ deinterleave(w1[None], e.intermediate)[0].T
        y = y * weight if c.weight_on_input else y
        y = y if b1 is None else y + b1[expert]
        y = _as_quantized(e.activation.apply(y[:, : e.intermediate], y[:, e.intermediate :]), e) @ w2.T
        y = y if e.b2 is None else y + e.b2[expert].float()
        out.index_add_(0, tokens, y if c.weight_on_input else y * weight)
    return (out if c.scale is None else out * c.scale).to(c.x.dtype)
