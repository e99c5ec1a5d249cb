"""Launching `stream_gemm`: which layers and configs it takes, and its two projections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xkernels.device import of
from xkernels.ops._details import large_experts as _large
from xkernels.ops._details.common import cdiv
from xkernels.ops.align import Alignment
from xkernels.ops.prepared import PreparedExperts

_FIELDS: dict[str, object] = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_K": 128, "num_warps": 4, "USE_TMA": True}
# With fewer stages a config means the Triton kernels, which have to fit it too wherever this one is not to be had.
LEAST_STAGES = 6
_SHARED = 228 * 1024  # bytes of shared memory of a multiprocessor, 1024 of which each program loses
_RULES = ("INLINE", "PROGRAMS", "QUANT_OUT", "SWAP_AB")  # of the Triton kernels' launcher


@dataclass(frozen=True)
class _Form:
    """How weights of a scheme are streamed, as measured.

    columns: the values of BLOCK_SIZE_N. size: bytes of a weight. steps: of BLOCK_SIZE_K in a stage of the ring, so that
    it asks for 256 bytes of a weight row at once. scales: bytes beside a row's BLOCK_SIZE_K. shared: up to so many
    stages two programs of a multiprocessor share them, with more there is one.
    """

    columns: tuple[int, ...]
    size: int
    steps: int
    scales: int
    shared: int

    def programs(self, stages: int) -> int:
        """Of a multiprocessor."""
        return 2 if stages <= self.shared else 1

    def ring(self, stages: int) -> int:
        """Stages of a program's ring, each of `steps` steps."""
        return stages // (self.steps * self.programs(stages))

    def counts(self, columns: int) -> tuple[int, ...]:
        """The values of num_stages with BLOCK_SIZE_N `columns`: what divides evenly, and fits the shared memory."""
        step = (16 + columns) * (128 * self.size + self.scales)
        return tuple(
            n
            for n in range(LEAST_STAGES, _SHARED // step + 1)
            if n % (self.steps * self.programs(n)) == 0 and n * step <= _SHARED - 2048 * self.programs(n)
        )


_FORMS = {
    "none": _Form(columns=(64, 128), size=2, steps=1, scales=0, shared=0),
    "fp8_block": _Form(columns=(128,), size=1, steps=2, scales=4, shared=8),
}


def fits(e: PreparedExperts, config: Mapping[str, Any], dtype: torch.dtype, at: torch.Tensor) -> bool:
    """Whether a projection runs on `stream_gemm`; see `refusal`."""
    return refusal(e, config, dtype, at) is None


def refusal(e: PreparedExperts, config: Mapping[str, Any], dtype: torch.dtype, at: torch.Tensor) -> str | None:
    """Why a projection stays on the other kernels; None where `stream_gemm` takes it.

    dtype: of the layer's input and output. at: a tensor on the device.
    """
    why = other_config(e.scheme.kind, config) or _large.other_layer(e, dtype) or _large.other_device(at) or _NO_GLUON
    step = int(_FIELDS["BLOCK_SIZE_K"])  # type: ignore[call-overload]
    if why is None and (e.hidden % step or e.intermediate % step):
        why = f"sizes are no multiples of {step}"
    return why


def other_config(kind: str, config: Mapping[str, Any]) -> str | None:
    """What of a config is not this kernel's, for weights of a scheme; None where it asks for it."""
    form = _FORMS.get(kind)
    if form is None:
        return f"neither bfloat16 nor block scales: {kind}"
    for name, value in _FIELDS.items():
        if config.get(name) != value:
            return f"{name} is not {value}"
    if config["BLOCK_SIZE_N"] not in form.columns:
        return f"BLOCK_SIZE_N is not {' or '.join(map(str, form.columns))}"
    counts = form.counts(int(config["BLOCK_SIZE_N"]))
    if config.get("num_stages") not in counts:
        return f"num_stages is not {' or '.join(map(str, counts))}"
    return next((f"{name} is a rule of the other kernels" for name in _RULES if name in config), None)


def up(x: torch.Tensor, scale: torch.Tensor | None, e: PreparedExperts, topk: int, alignment: Alignment, rows: int,
       config: Mapping[str, Any], overlap: bool) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Activated rows [rows, N] in sorted order, bf16; for FP8 quantised, with scales [rows, N / 128].

    x: [tokens, H] bf16, or FP8 with `scale` [tokens, H / 128]; of any strides. overlap: start while the predecessor
    drains, which with FP8 is the pass over the input: it has waited for the alignment.
    """
    x, scales = _large.gatherable(x), None
    out = torch.empty(rows, e.padded, dtype=x.dtype, device=x.device)
    if scale is not None:
        scales = torch.empty(rows, e.padded // 128, dtype=torch.float32, device=x.device)
    _launch(config, e.scheme.kind, overlap, rows, alignment, x.shape[0] * topk, topk, x, scale,
            (0, 0) if scale is None else scale.stride(), e.w1, e.w1_scale, out, scales, None, UP=True,
            PARTS=1 if scale is None else 2, READY=overlap and scale is not None)  # fmt: skip
    return out, scales


def down(rows: torch.Tensor, scale: torch.Tensor | None, scale_strides: tuple[int, int], e: PreparedExperts,
         weights: torch.Tensor, alignment: Alignment, config: Mapping[str, Any], weighted: bool,
         dtype: torch.dtype, overlap: bool) -> torch.Tensor:  # fmt: skip
    """Sorted rows through the down projection, scattered to [tokens, topk, H], times the router weights.

    The alignment is older than the predecessor, which has waited: weights are asked for before the wait.
    """
    tokens, topk = weights.shape
    out = torch.empty(tokens, topk, e.hidden, dtype=dtype, device=rows.device)
    _launch(config, e.scheme.kind, overlap, rows.shape[0], alignment, tokens * topk, topk, rows, scale, scale_strides,
            e.w2, e.w2_scale, out.view(-1, e.hidden), None, weights if weighted else None, UP=False, PARTS=1,
            READY=overlap)  # fmt: skip
    return out


def _launch(config: Mapping[str, Any], kind: str, overlap: bool, rows: int, alignment: Alignment, slots: int, topk: int,
            a: torch.Tensor, a_scale: torch.Tensor | None, a_strides: tuple[int, ...], w: torch.Tensor,
            w_scale: torch.Tensor | None, out: torch.Tensor, out_scale: torch.Tensor | None,
            weight: torch.Tensor | None, **flags: int) -> None:  # fmt: skip
    """One projection by persistent programs. `rows`: of the blocks that may be used; `slots`: routed entries."""
    from xkernels.ops._details.stream_gemm import stream_gemm

    form, block_n, stages = _FORMS[kind], int(config["BLOCK_SIZE_N"]), int(config["num_stages"])
    block_k = int(config["BLOCK_SIZE_K"]) * form.steps
    tiles = cdiv(rows, 16) * (w.shape[1] // (block_n * flags["PARTS"]))
    programs = min(tiles, of(w).limits().units * form.programs(stages))
    stream_gemm[(programs,)](
        a, a_scale, _large.tiles_of(w.view(-1, w.shape[2]), block_n, 128 // form.size), w_scale, out, out_scale,
        weight, alignment.sorted_ids, alignment.expert_ids, alignment.num_post_padded, slots,
        alignment.sorted_ids.numel(), w.shape[1], w.shape[2], a.stride(0), *a_strides,
        *((0, 0, 0) if w_scale is None else w_scale.stride()), out.stride(0),
        0 if out_scale is None else out_scale.stride(0), TOPK=topk, BLOCK_N=block_n, BLOCK_K=block_k,
        STAGES=form.ring(stages), FP8=w_scale is not None,
        EVEN_K=w.shape[2] % block_k == 0, PDL=overlap, MUL_WEIGHT=weight is not None, num_warps=4, maxnreg=128,
        **({"launch_pdl": True} if overlap else {}), **flags,
    )  # fmt: skip


# Now: tuners settle the cache keys of kernels that are loaded when they begin.
_NO_GLUON = _large.no_gluon("stream_gemm")
