"""The dispatch table: every backend of every op, in the order in which `auto` tries them.

Names are the ones that sglang users type after `--moe-runner-backend` and `--fp8-gemm-backend`, plus `torch` and
`reference`. A row of another package has its real condition and no kernel here (`here=False`). `reason` says why a row
stands before the next: a measured result in docs/results, or `unmeasured`.
"""

from __future__ import annotations

from moegate.dispatch import conditions as c
from moegate.dispatch.model import Row
from moegate.dispatch.platforms import BLACKWELL, CUDA, EVERY, GPUS, ROCM, XPU

_CPU = frozenset({"cpu"})
_NPU = frozenset({"npu"})
_SM90 = frozenset({"cuda-sm90"})
_SM100 = frozenset({"cuda-sm100"})
_SM120 = frozenset({"cuda-sm120"})
_DEEP_GEMM = _SM90 | _SM100
_RUNS_TORCH = GPUS | _CPU
_NONE: frozenset[str] = frozenset()

_FALLBACK = "the definition of the op: right everywhere, fast nowhere"
_CPU_CONTROL = "the CPU has no Triton compiler: the interpreter is for tests, so auto takes torch there"

_SCALED = c.needs_probe("scaled_mm_block", "block recipes of scaled_mm")

FUSED_EXPERTS: tuple[Row, ...] = (
    Row(
        "fused_experts",
        "deep_gemm",
        _DEEP_GEMM,
        (
            c.quant_in("fp8_w8a8"),
            c.block_in((128, 128)),
            c.a2a_in("deepep", "mooncake", "nixl"),
            c.needs_package("deep_gemm"),
        ),
        "another package's kernel",
        here=False,
    ),
    Row(
        "fused_experts",
        "flashinfer_trtllm",
        _SM100,
        (c.needs_package("flashinfer"),),
        "another package's kernel",
        here=False,
        auto=_NONE,
    ),
    Row(
        "fused_experts",
        "flashinfer_cutlass",
        BLACKWELL,
        (c.needs_package("flashinfer"),),
        "another package's kernel",
        here=False,
        auto=_NONE,
    ),
    Row(
        "fused_experts",
        "aiter",
        ROCM,
        (c.needs_env("SGLANG_USE_AITER"), c.needs_package("aiter")),
        "another package's kernel",
        here=False,
    ),
    # On XPU the engines' own library wins until Triton is asked for by name: auto never looks a config up there.
    Row("fused_experts", "intel_xpu", XPU, (c.needs_package("sgl_kernel"),), "another package's kernel", here=False),
    Row("fused_experts", "triton", _RUNS_TORCH, (c.needs_torch(), c.needs_triton), "unmeasured", auto=CUDA | ROCM),
    Row("fused_experts", "torch", _RUNS_TORCH, (c.needs_torch(),), _CPU_CONTROL, auto=_RUNS_TORCH),
    Row("fused_experts", "reference", EVERY, (c.needs_torch(),), _FALLBACK),
)

BLOCK_FP8_LINEAR: tuple[Row, ...] = (
    Row(
        "block_fp8_linear",
        "deep_gemm",
        _DEEP_GEMM,
        (c.block_in((128, 128)), c.needs_env("SGLANG_ENABLE_JIT_DEEPGEMM", True), c.needs_package("deep_gemm")),
        "another package's kernel",
        here=False,
    ),
    Row(
        "block_fp8_linear",
        "flashinfer_trtllm",
        _SM100,
        (c.block_in((128, 128)), c.needs_package("flashinfer")),
        "another package's kernel",
        here=False,
    ),
    Row(
        "block_fp8_linear",
        "cutlass",
        _SM120,
        (c.block_in((128, 128)), c.needs_package("sgl_kernel")),
        "another package's kernel",
        here=False,
    ),
    Row(
        "block_fp8_linear",
        "aiter",
        ROCM,
        (c.block_in((128, 128)), c.needs_env("SGLANG_USE_AITER"), c.needs_package("aiter")),
        "another package's kernel",
        here=False,
    ),
    Row("block_fp8_linear", "npu", _NPU, (c.needs_package("torch_npu"),), "another package's kernel", here=False),
    Row(
        "block_fp8_linear",
        "scaled_mm",
        CUDA | XPU,
        (c.block_in((1, 128), (128, 128)), c.needs_torch(2, 11), c.fp8_matrix_unit, _SCALED),
        "unmeasured",
        auto=XPU,
    ),
    Row("block_fp8_linear", "triton", _RUNS_TORCH, (c.needs_torch(), c.needs_triton), "unmeasured", auto=GPUS),
    Row("block_fp8_linear", "torch", _RUNS_TORCH, (c.needs_torch(),), _CPU_CONTROL),
    Row("block_fp8_linear", "reference", EVERY, (c.needs_torch(),), _FALLBACK),
)

FP8_LINEAR: tuple[Row, ...] = (
    Row("fp8_linear", "scaled_mm", _RUNS_TORCH, (c.needs_torch(2, 11), c.fp8_matrix_unit), "unmeasured"),
    Row("fp8_linear", "triton", _RUNS_TORCH, (c.needs_torch(), c.needs_triton), "unmeasured", auto=GPUS),
    Row("fp8_linear", "torch", _RUNS_TORCH, (c.needs_torch(),), "plain multiplication of the dequantised operands"),
    Row("fp8_linear", "reference", EVERY, (c.needs_torch(),), _FALLBACK),
)


def _triton_then_torch(op: str) -> tuple[Row, ...]:
    return (
        Row(op, "triton", _RUNS_TORCH, (c.needs_torch(), c.needs_triton), "unmeasured", auto=GPUS),
        Row(op, "torch", _RUNS_TORCH, (c.needs_torch(),), _CPU_CONTROL),
        Row(op, "reference", EVERY, (c.needs_torch(),), _FALLBACK),
    )


TOPK: tuple[Row, ...] = (
    Row(
        "topk",
        "intel_xpu",
        XPU,
        (c.power_of_two_experts, c.needs_package("sgl_kernel")),
        "another package's kernel",
        here=False,
    ),
    *_triton_then_torch("topk"),
)

ROWS: tuple[Row, ...] = (
    *FUSED_EXPERTS,
    *BLOCK_FP8_LINEAR,
    *FP8_LINEAR,
    *TOPK,
    *_triton_then_torch("grouped_topk"),
    *_triton_then_torch("moe_align_block_size"),
    *_triton_then_torch("per_token_group_quant_fp8"),
    *_triton_then_torch("scaled_fp8_quant"),
    *_triton_then_torch("silu_and_mul"),
    *_triton_then_torch("moe_sum_reduce"),
    *_triton_then_torch("store_kv_cache"),
    *_triton_then_torch("decode_attention"),
)

OPS: tuple[str, ...] = tuple(dict.fromkeys(row.op for row in ROWS))


def rows_of(op: str) -> tuple[Row, ...]:
    """The rows of one op, in order; empty where there is no such op."""
    return tuple(row for row in ROWS if row.op == op)
