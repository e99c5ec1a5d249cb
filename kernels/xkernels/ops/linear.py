"""FP8 linear layers: block scales (`block_fp8_linear`), and scales per tensor or channel (`fp8_linear`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from xkernels.ops._details import dense_gemm as _k
from xkernels.ops._details.common import cdiv
from xkernels.ops.prepared import Descriptors, can_describe
from xkernels.ops.quant import (
    FP8_DTYPES,
    per_token_group_quant_fp8,
    per_token_group_quant_fp8_reference,
    scaled_fp8_quant,
)
from xkernels.ops.scheme import BLOCK_K, block_shape

_SCALED_MM_ROWS = 16  # torch's block recipes refuse other numbers of rows (seen on an H200 for 1 and 17)

Layout = Literal["row_major", "scaled_mm"]
_LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_ACTIVATIONS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class PreparedLinear:
    """FP8 weights [N, K] with their scales in the layout that a backend wants; the checkpoint is never changed.

    `scale` float32: block scales [cdiv(N, bn), cdiv(K, 128)], or one per row [N]. `layout` `row_major`: contiguous;
    `scaled_mm`: the same values where torch's scaled_mm wants them (the column stride is 1 row).
    `block` is None for scales per row.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int] | None
    layout: Layout
    descriptors: Descriptors = field(default_factory=Descriptors, repr=False)


def prepare_block_fp8(
    weight: torch.Tensor, scale: torch.Tensor, block: Sequence[int], layout: Layout = "row_major"
) -> PreparedLinear:
    """Weights of `block_fp8_linear`, once at load time.

    weight: FP8 [N, K]; scale: float [cdiv(N, block[0]), cdiv(K, block[1])], kept as float32; block: [1, 128] or
    [128, 128], list or tuple. The scales' values are copied bit for bit. Raises ValueError naming what does not fit.
    """
    if not isinstance(block, Sequence) or any(type(n) is not int for n in block):
        raise ValueError(f"block must be two whole numbers, not {block!r}")
    shape = block_shape(block)
    if layout not in _LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(_LAYOUTS)}, not {layout!r}")
    _check_prepared(weight, scale)
    if weight.ndim != 2 or scale.ndim != 2:
        raise ValueError(f"weight and scale must be 2-D, not {list(weight.shape)} and {list(scale.shape)}")
    wanted = (cdiv(weight.shape[0], shape[0]), cdiv(weight.shape[1], shape[1]))
    if tuple(scale.shape) != wanted:
        raise ValueError(f"scale must be {list(wanted)} for weight {list(weight.shape)}, not {list(scale.shape)}")
    if layout == "scaled_mm":
        moved = torch.empty(scale.shape[1], scale.shape[0], dtype=torch.float32, device=scale.device).t()
        if _stride_of_scales(weight.device) == "padded" and shape[0] != 1:
            padded = torch.zeros(scale.shape[0], cdiv(scale.shape[1], 4) * 4, device=scale.device)
            padded[:, : scale.shape[1]] = scale
            return PreparedLinear(weight.contiguous(), padded, shape, layout)
        return PreparedLinear(weight.contiguous(), moved.copy_(scale), shape, layout)
    return PreparedLinear(weight.contiguous(), scale.float().contiguous(), shape, layout)


def block_fp8_linear(
    x: torch.Tensor,
    prepared: PreparedLinear,
    *,
    backend: str,
    bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """x @ weight.T with block scales.

    x: [..., K]; float32, float16 or bfloat16 (quantised here per 128 columns), or FP8 of the weights' dtype with
    x_scale float32 [rows, K / 128] or [..., K / 128]. K is a multiple of 128. bias: float [N]. out_dtype: float32,
    float16 or bfloat16, x's dtype by default; needed for an FP8 x. backend: `scaled_mm` (needs layout `scaled_mm`),
    `triton`, `torch` or `reference`. config: tile of the Triton kernel, None for the default rule. Returns [..., N].
    Raises ValueError when shapes, dtypes, layout or backend do not fit.
    """
    row = _BLOCK_ROWS.get(backend)
    if row is None:
        raise ValueError(f"block_fp8_linear has no backend {backend!r}: {', '.join(_BLOCK_ROWS)}")
    if prepared.block is None:
        raise ValueError("block_fp8_linear takes weights with block scales (prepare_block_fp8), not scaled per row")
    _check_operands(x, prepared, bias)
    if x.shape[-1] % BLOCK_K:
        raise ValueError(f"K must be a multiple of {BLOCK_K}, not {x.shape[-1]}")
    dtype = _out_dtype(x, prepared, x_scale, out_dtype)
    x_scale = None if x_scale is None else _scale_rows(x, x_scale)
    x2 = x.reshape(-1, x.shape[-1]).contiguous()
    out = row(x2, x_scale, prepared, dtype, config)
    out = out if bias is None else out + bias.to(out.dtype)
    return out.view(*x.shape[:-1], prepared.weight.shape[0])


def block_fp8_linear_reference(
    x: torch.Tensor, prepared: PreparedLinear, *, bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """The twin of `block_fp8_linear`: float32 arithmetic on dequantised operands."""
    return block_fp8_linear(x, prepared, backend="reference", bias=bias, x_scale=x_scale, out_dtype=out_dtype)


def _check_prepared(weight: torch.Tensor, scale: torch.Tensor) -> None:
    if weight.dtype not in FP8_DTYPES:
        raise ValueError(f"weight must be float8_e4m3fn or float8_e4m3fnuz, not {weight.dtype}")
    if not scale.is_floating_point():
        raise ValueError(f"scale must be float32 (packed exponents are not taken), not {scale.dtype}")


def _check_operands(x: torch.Tensor, p: PreparedLinear, bias: torch.Tensor | None) -> None:
    n, k = p.weight.shape
    if x.ndim < 1 or x.shape[-1] != k:
        raise ValueError(f"x must be [..., {k}] for weights {[n, k]}, not {list(x.shape)}")
    if bias is not None and (bias.shape != (n,) or not bias.is_floating_point()):
        raise ValueError(f"bias must be float [{n}], not {bias.dtype} {list(bias.shape)}")


def _out_dtype(
    x: torch.Tensor, p: PreparedLinear, x_scale: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.dtype:
    """What x's dtype and `out_dtype` make the answer's, once they fit each other and the weights."""
    quantised = x.dtype in FP8_DTYPES
    if quantised != (x_scale is not None) or (quantised and out_dtype is None):
        raise ValueError("an FP8 x needs x_scale and out_dtype; any other x takes no x_scale")
    if quantised and x.dtype != p.weight.dtype:
        raise ValueError(f"an FP8 x must be of the weights' dtype {p.weight.dtype}, not {x.dtype}")
    if not quantised and x.dtype not in _ACTIVATIONS:
        raise ValueError(f"x must be float32, float16, bfloat16 or FP8 with x_scale, not {x.dtype}")
    dtype = out_dtype or x.dtype
    if dtype not in _ACTIVATIONS:
        raise ValueError(f"out_dtype must be float32, float16 or bfloat16, not {dtype}")
    return dtype


def _scale_rows(x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
    """The scales of x [..., K] as [rows, K / 128]; any strides."""
    groups = x.shape[-1] // BLOCK_K
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    if x_scale.dtype != torch.float32 or tuple(x_scale.shape) not in ((rows, groups), (*x.shape[:-1], groups)):
        raise ValueError(f"x_scale must be float32 {[rows, groups]} for x {list(x.shape)}, not {x_scale.dtype} "
                         f"{list(x_scale.shape)}")  # fmt: skip
    return x_scale.reshape(rows, groups)


_Row = Callable[
    [torch.Tensor, torch.Tensor | None, PreparedLinear, torch.dtype, Mapping[str, Any] | None], torch.Tensor
]


def _quantized(x: torch.Tensor, s: torch.Tensor | None, p: PreparedLinear, **kw: Any) -> tuple[Any, Any]:
    return (x, s) if s is not None else per_token_group_quant_fp8(x, BLOCK_K, dtype=p.weight.dtype, **kw)


def _block_triton(x: Any, s: Any, p: PreparedLinear, dtype: torch.dtype, config: Any) -> torch.Tensor:
    if p.layout != "row_major":
        raise ValueError(f"backend triton takes weights of layout row_major, not {p.layout}")
    assert p.block is not None
    x, s = _quantized(x, s, p)
    strides = (s.stride(0), s.stride(1), p.scale.stride(0), p.scale.stride(1))
    return _gemm(x, s, p, None, dtype, config, p.block[0], strides, block=True)


def _block_scaled_mm(x: Any, s: Any, p: PreparedLinear, dtype: torch.dtype, config: Any) -> torch.Tensor:
    del config
    if p.layout != "scaled_mm":
        raise ValueError(f"backend scaled_mm takes weights of layout scaled_mm, not {p.layout}")
    assert p.block is not None
    from torch.nn.functional import ScalingType, scaled_mm  # torch before 2.11 has neither

    rows = x.shape[0]
    if rows % _SCALED_MM_ROWS:
        fill = _SCALED_MM_ROWS - rows % _SCALED_MM_ROWS
        x = torch.cat([x, x.new_zeros(fill, x.shape[1])])
        s = None if s is None else torch.cat([s, s.new_ones(fill, s.shape[1])])
    x, s = _quantized(x, s, p, column_major=True)
    if s.stride(0) != 1 or s.stride(1) != max(1, s.shape[0]):
        s = s.t().contiguous().t()
    recipe, scale = ScalingType.BlockWise1x128, p.scale
    if p.block[0] != 1:
        recipe, scale = ScalingType.BlockWise128x128, p.scale.t()
    out = scaled_mm(x, p.weight.t(), s, ScalingType.BlockWise1x128, scale, recipe, output_dtype=dtype)
    return out[:rows]


def _dequantized(x: torch.Tensor, s: torch.Tensor | None, p: PreparedLinear) -> tuple[torch.Tensor, torch.Tensor]:
    assert p.block is not None
    if s is None:
        x, s = per_token_group_quant_fp8_reference(x, BLOCK_K, dtype=p.weight.dtype)
    rows, k = p.weight.shape
    scale = p.scale.repeat_interleave(p.block[0], 0).repeat_interleave(p.block[1], 1)[:rows, :k]
    return x.float() * s.repeat_interleave(BLOCK_K, 1), p.weight.float() * scale


def _block_torch(x: Any, s: Any, p: PreparedLinear, dtype: torch.dtype, config: Any) -> torch.Tensor:
    del config
    a, b = _dequantized(x, s, p)
    return (a.to(dtype) @ b.to(dtype).T).to(dtype)


def _block_reference(x: Any, s: Any, p: PreparedLinear, dtype: torch.dtype, config: Any) -> torch.Tensor:
    del config
    a, b = _dequantized(x, s, p)
    return (a @ b.T).to(dtype)


_BLOCK_ROWS: dict[str, _Row] = {
    "scaled_mm": _block_scaled_mm, "triton": _block_triton, "torch": _block_torch, "reference": _block_reference,
}  # fmt: skip


@functools.cache
def _stride_of_scales(device: torch.device) -> Literal["plain", "padded"]:
    """How this torch wants 128x128 scales of a weight whose K is no multiple of 512: asked with a small product."""
    return "padded" if _probe(device, padded=False) and not _probe(device, padded=True) else "plain"


def scaled_mm_refusal(device: torch.device) -> str | None:
    """Why torch's scaled_mm cannot serve block-FP8 weights on a device; None if it can. Asked once, at dispatch."""
    return None if _probe(device, _stride_of_scales(device) == "padded") is None else _probe(device, padded=False)


@functools.cache
def _probe(device: torch.device, padded: bool) -> str | None:
    try:
        from torch.nn.functional import ScalingType, scaled_mm
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    k = 5 * BLOCK_K
    a = torch.zeros(16, k, device=device).to(torch.float8_e4m3fn)
    b = torch.zeros(BLOCK_K, k, device=device).to(torch.float8_e4m3fn)
    sa = torch.ones(5, 16, device=device).t()
    sb = torch.ones(1, 8 if padded else 5, device=device).t()
    one, square = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    try:
        scaled_mm(a, b.t(), sa, one, sb, square, output_dtype=torch.bfloat16)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"scaled_mm refuses block scales on {device.type}: {str(error).splitlines()[0]}"
    return None


def prepare_fp8(weight: torch.Tensor, scale: torch.Tensor) -> PreparedLinear:
    """Weights of `fp8_linear`: FP8 [N, K] with one float scale ([], [1]) or one per row ([N] or [N, 1])."""
    _check_prepared(weight, scale)
    if weight.ndim != 2 or scale.numel() not in (1, weight.shape[0]) or scale.ndim > 2:
        raise ValueError(f"weight must be [N, K] with 1 or N scales, not {list(weight.shape)} and {list(scale.shape)}")
    rows = scale.float().reshape(-1).expand(weight.shape[0]).contiguous()
    return PreparedLinear(weight.contiguous(), rows, None, "row_major")


def fp8_linear(
    x: torch.Tensor,
    prepared: PreparedLinear,
    *,
    backend: str,
    bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    per_token: bool = True,
    config: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """x @ weight.T with FP8 operands and scales per tensor or channel.

    x: float32, float16 or bfloat16 [..., K], quantised here: with x_scale float [1] if given, else per token, or with
    per_token=False by one scale computed for all of x. bias: float [N]. backend: `scaled_mm`, `triton`, `torch` or
    `reference`. Returns [..., N] of x's dtype; `scaled_mm` rounds it to bfloat16 on the way (an error of 2^-9 of each
    value) where torch has no other result on that device, which is why dispatch takes it for bfloat16 only there.
    Raises ValueError when shapes, dtypes or backend do not fit.
    """
    row = _ROWS.get(backend)
    if row is None:
        raise ValueError(f"fp8_linear has no backend {backend!r}: {', '.join(_ROWS)}")
    if prepared.block is not None:
        raise ValueError("fp8_linear takes weights with scales per tensor or row (prepare_fp8), not with block scales")
    _check_operands(x, prepared, bias)
    if x.dtype not in _ACTIVATIONS:
        raise ValueError(f"x must be float32, float16 or bfloat16, not {x.dtype}")
    x2 = x.reshape(-1, x.shape[-1]).contiguous()
    q, s = scaled_fp8_quant(x2, x_scale, per_token=per_token and x_scale is None, dtype=prepared.weight.dtype)
    out = row(q, s.reshape(-1), prepared, x.dtype, config)
    out = out if bias is None else out + bias.to(out.dtype)
    return out.view(*x.shape[:-1], prepared.weight.shape[0])


def fp8_linear_reference(
    x: torch.Tensor, prepared: PreparedLinear, *, bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None, per_token: bool = True,
) -> torch.Tensor:  # fmt: skip
    """The twin of `fp8_linear`: float32 arithmetic on dequantised operands."""
    return fp8_linear(x, prepared, backend="reference", bias=bias, x_scale=x_scale, per_token=per_token)


def _row_scaled_mm(q: Any, s: Any, p: PreparedLinear, dtype: torch.dtype, config: Any) -> torch.Tensor:
    del config
    from torch.nn.functional import ScalingType, scaled_mm  # torch before 2.11 has neither

    rows = s.reshape(-1, 1).expand(q.shape[0], 1).contiguous()
    kind = ScalingType.RowWise
    given = _row_output(q.device, q.dtype, dtype)
    out = scaled_mm(q, p.weight.t(), rows, kind, p.scale[None, :], kind, output_dtype=given)
    return out.to(dtype)


@functools.cache
def _row_output(device: torch.device, operands: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """What this torch's scaled_mm can give for scales per row: `dtype`, or bfloat16 where it has no other here.

    bfloat16 it always has; whether it has another depends on device and libraries, and is asked with a small product.
    """
    if dtype != torch.bfloat16:
        from torch.nn.functional import ScalingType, scaled_mm

        a = torch.zeros(16, 16, device=device).to(operands)
        one, kind = torch.ones(16, 1, device=device), ScalingType.RowWise
        try:
            scaled_mm(a, a.t(), one, kind, one.t(), kind, output_dtype=dtype)
        except (RuntimeError, ValueError, NotImplementedError):
            return torch.bfloat16
    return dtype


def _row_triton(q: Any, s: Any, p: PreparedLinear, dtype: torch.dtype, config: Any) -> torch.Tensor:
    strides = (0 if s.numel() == 1 else 1, 0, 1, 0)
    return _gemm(q, s, p, None, dtype, config, 1, strides, block=False)


def _row_torch(q: Any, s: Any, p: PreparedLinear, dtype: torch.dtype, config: Any) -> torch.Tensor:
    del config
    return ((q.to(dtype) @ p.weight.to(dtype).T).float() * s[:, None] * p.scale[None, :]).to(dtype)


def _row_reference(q: Any, s: Any, p: PreparedLinear, dtype: torch.dtype, config: Any) -> torch.Tensor:
    del config
    return ((q.float() @ p.weight.float().T) * s[:, None] * p.scale[None, :]).to(dtype)


_ROWS: dict[str, _Row] = {
    "scaled_mm": _row_scaled_mm, "triton": _row_triton, "torch": _row_torch, "reference": _row_reference,
}  # fmt: skip


_TILES = ((64, (16, 64, 4, 5)), (256, (64, 64, 4, 4)), (1 << 31, (64, 128, 4, 3)))


def default_linear_config(m: int) -> dict[str, int]:
    """Tile of the Triton kernel by number of rows, as measured on an H200 (docs/results)."""
    block_m, block_n, warps, stages = next(tile for limit, tile in _TILES if m <= limit)
    return {"BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": block_n, "BLOCK_SIZE_K": BLOCK_K, "GROUP_SIZE_M": 8,
            "num_warps": warps, "num_stages": stages}  # fmt: skip


def _gemm(
    q: torch.Tensor, s: torch.Tensor, p: PreparedLinear, bias: torch.Tensor | None, dtype: torch.dtype,
    config: Mapping[str, Any] | None, group_n: int, strides: tuple[int, int, int, int], *, block: bool,
) -> torch.Tensor:  # fmt: skip
    m, k, n = q.shape[0], q.shape[1], p.weight.shape[0]
    out = torch.empty(m, n, dtype=dtype, device=q.device)
    if out.numel() == 0:
        return out
    c = dict(config or default_linear_config(m))
    absent = [name for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K") if name not in c]
    if absent:
        raise ValueError(f"config lacks {', '.join(absent)}: {c}")
    block_m, block_n, block_k = (int(c[f"BLOCK_SIZE_{axis}"]) for axis in "MNK")
    if block and BLOCK_K % block_k:
        raise ValueError(f"BLOCK_SIZE_K must divide the scale group of {BLOCK_K}, not be {block_k}")
    tma = bool(c.get("USE_TMA", False)) and can_describe(p.weight)
    _k.fp8_gemm[(cdiv(m, block_m) * cdiv(n, block_n),)](
        q, s, p.descriptors.get("w", p.weight, block_n, block_k) if tma else p.weight, p.scale, bias, out, m, n, k,
        q.stride(0), strides[0], strides[1], p.weight.stride(0), strides[2], strides[3], out.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=int(c.get("GROUP_SIZE_M", 1)), GROUP_N=group_n,
        GROUP_K=BLOCK_K, EVEN_K=k % block_k == 0, BLOCK_SCALES=block, B_TMA=tma, HAS_BIAS=bias is not None,
        SWAP=bool(c.get("SWAP_AB", block_m < 64 and block_n >= 64)),
        **{name: int(c[name]) for name in ("num_warps", "num_stages") if name in c},
    )  # fmt: skip
    return out
