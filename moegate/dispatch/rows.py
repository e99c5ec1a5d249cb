"""The dispatch table: every backend of every op, in the order in which `auto` tries them.

Names are the ones that sglang users type after `--moe-runner-backend` and `--fp8-gemm-backend`, plus `torch` and
`reference`. A row of another package has its real condition and no kernel here (`here=False`). `reason` says why a row
stands before the next: a measured result in docs/results, or `unmeasured`.
"""

from __future__ import annotations

from moegate.dispatch import conditions as c
from moegate.dispatch import guards
from moegate.dispatch.model import Condition, Row
from moegate.dispatch.platforms import BLACKWELL, CDNA3_4, CUDA, EVERY, GPUS, ROCM, XPU

_CPU = frozenset({"cpu"})
_NPU = frozenset({"npu"})
_SM90 = frozenset({"cuda-sm90"})
_SM100 = frozenset({"cuda-sm100"})
_SM110 = frozenset({"cuda-sm110"})
_SM120 = frozenset({"cuda-sm120"})
_DEEP_GEMM = _SM90 | _SM100
_RUNS_TORCH = GPUS | _CPU
_NONE: frozenset[str] = frozenset()

_FALLBACK = "the definition of the op: right everywhere, fast nowhere"
# On the CPU that is always so: Triton has only its interpreter there, which is for tests.
_H200 = "docs/results/kernels.md; elsewhere unmeasured"
_PLAIN = "plain torch, where auto may take no kernel before it"


def _foreign(
    op: str,
    backend: str,
    platforms: frozenset[str],
    *when: Condition,
    auto: frozenset[str] | None = None,
    auto_when: tuple[Condition, ...] = (),
    asks: tuple[Condition, ...] = (),
) -> Row:
    """A row whose kernel is another package's: its conditions are real, and it cannot run here."""
    return Row(op, backend, platforms, when, "another package's kernel", False, auto, auto_when, asks)


_FLASHINFER = c.needs_package("flashinfer")
_SGL_KERNEL = c.needs_package("sgl_kernel")
_SGLANG = c.needs_package("sglang")
_FP8 = c.quant_in("fp8_w8a8")
_FP8_OR_MXFP8 = c.quant_in("fp8_w8a8", "mxfp8")
_FP4 = c.quant_in("nvfp4_w4a16")
_MXFP4 = c.quant_in("mxfp4_w4a16")
# What SM100 has matrix units for: more is not known of some rows there, and integers are refused.
_SM100_QUANTS = c.quant_in(None, "fp8_w8a8", "mxfp8", "nvfp4_w4a16", "mxfp4_w4a16", "mxfp4_w4a8")
_BLOCK128 = c.block_in((128, 128))
_A2A = c.a2a_in("deepep", "mooncake", "nixl")
_AITER = (c.needs_env("SGLANG_USE_AITER"), c.needs_package("aiter"))

# What our own kernels take, as `prepare_experts`, `prepare_block_fp8` and `prepare_fp8` do.
_OUR_EXPERTS = c.serves({None: (None,), "fp8_w8a8": (None, (128, 128)), "mxfp4_w4a16": (None, (1, 32))})
_OUR_BLOCKS = (_FP8, c.block_in((1, 128), (128, 128)))
_OUR_FP8 = c.serves({"fp8_w8a8": (None,)})
_GATED = c.activation_in("silu", "swiglu", "clamped")

_EXPERTS = "fused_experts"


def _experts(
    backend: str,
    platforms: frozenset[str],
    *when: Condition,
    auto: frozenset[str] | None = None,
    auto_when: tuple[Condition, ...] = (),
) -> Row:
    """Another package's experts: what goes for all of them stands before a row's own conditions."""
    return _foreign(_EXPERTS, backend, platforms, _GATED, guards.mxfp8_payload, *when, auto=auto, auto_when=auto_when)


_AITER_EXPERTS = c.serves(
    {None: (None,), "fp8_w8a8": (None, (128, 128)), "mxfp4_w4a16": (None, (1, 32)), "mxfp8": (None, (1, 32))}
)
_AITER_A2A = c.a2a_in("none", "deepep", "mooncake", "nixl", "mori")
FUSED_EXPERTS: tuple[Row, ...] = (
    _experts("deep_gemm", _DEEP_GEMM, _FP8, _BLOCK128, _A2A, c.needs_package("deep_gemm")),
    _experts(
        "aiter",
        CDNA3_4,
        _AITER_EXPERTS,
        guards.no_tensor_scales,
        c.quant_only_on("mxfp8", "rocm-gfx950"),
        _AITER_A2A,
        *_AITER,
        auto_when=(c.meant_for(None, "fp8_w8a8", "mxfp4_w4a16"),),
    ),
    # On XPU the engines' own library wins until Triton is asked for by name: auto never looks a config up there.
    _experts("intel_xpu", XPU, c.quant_in(None, "fp8_w8a8", "mxfp4_w4a16"), _SGL_KERNEL),
    _experts("flashinfer_mxfp4", _SM90 | BLACKWELL, _MXFP4, _FLASHINFER, auto=_SM100 | _SM120),
    _experts(
        "triton_kernel",
        CUDA | ROCM,
        _MXFP4,
        c.needs_package("triton_kernels"),
        auto_when=(c.driver_below(595, *BLACKWELL),),
    ),
    _experts("flashinfer_trtllm", _SM100, _SM100_QUANTS, _FLASHINFER, auto_when=(c.meant_for("mxfp8"),)),
    _experts("flashinfer_trtllm_routed", _SM100, _SM100_QUANTS, _FLASHINFER, auto=_NONE),
    _experts("flashinfer_cutlass", BLACKWELL, _FP4, _FLASHINFER, auto=_SM110 | _SM120),
    _experts("flashinfer_cutedsl", _SM100, _FP4, _FLASHINFER, auto=_NONE),
    _experts("flashinfer_megamoe", _SM100, _SM100_QUANTS, _FLASHINFER, auto=_NONE),
    _experts("cutlass", _SM90 | BLACKWELL, _FP8_OR_MXFP8, _SGL_KERNEL, auto=_NONE),
    _experts("marlin", CUDA, c.quant_in("int4_w4a16", "int8_w8a16", "mxfp4_w4a16"), _SGL_KERNEL, auto=_NONE),
    _experts("hpc_ops", CUDA, _FP8, c.needs_package("hpc"), auto=_NONE),
    _experts("megamoe", _SM100, _SM100_QUANTS, c.needs_package("deep_gemm"), auto=_NONE),
    _experts("ascend", _NPU, c.quant_in(None), c.needs_package("torch_npu")),
    # Adapters beside the experts: the engine's own code around another backend's kernels, only on request.
    _experts("experimental_sgl_trtllm", _SM100, _SM100_QUANTS, _SGLANG, _FLASHINFER, auto=_NONE),
    _experts("experimental_sgl_marlin", CUDA, c.quant_in("int4_w4a16"), _SGLANG, _SGL_KERNEL, auto=_NONE),
    _experts("lora_cutedsl", _SM100, _SGLANG, _FLASHINFER, auto=_NONE),
    _experts("lora_triton", CUDA | ROCM, _SGLANG, auto=_NONE),
    _experts("lora_marlin", CUDA, _SGLANG, _SGL_KERNEL, auto=_NONE),
    _experts("humming", CUDA, c.quant_in("int4_w4a16", "mxfp4_w4a16"), c.needs_package("humming"), auto=_NONE),
    Row(
        _EXPERTS,
        "triton",
        _RUNS_TORCH,
        (_OUR_EXPERTS, _GATED, c.needs_torch(), c.needs_triton, c.triton_fp8),
        f"H200: 1.11 (bf16) and 1.20 (fp8) times as fast as SGLang's Triton kernels, {_H200}",
        auto=CUDA | ROCM,
    ),
    Row(_EXPERTS, "torch", _RUNS_TORCH, (_OUR_EXPERTS, _GATED, c.needs_torch()), _PLAIN),
    Row(_EXPERTS, "reference", EVERY, (_OUR_EXPERTS, _GATED, c.needs_torch()), _FALLBACK),
)

_LINEAR = "block_fp8_linear"
BLOCK_FP8_LINEAR: tuple[Row, ...] = (
    _foreign(
        _LINEAR,
        "deep_gemm",
        _DEEP_GEMM,
        _FP8,
        c.deep_gemm_blocks,
        c.needs_env("SGLANG_ENABLE_JIT_DEEPGEMM", True),
        c.needs_package("deep_gemm"),
        auto_when=(c.block_on("cuda-sm100", (128, 128)),),
    ),
    _foreign(_LINEAR, "flashinfer_trtllm", _SM100, _FP8, _BLOCK128, _FLASHINFER),
    _foreign(_LINEAR, "flashinfer_cutlass", BLACKWELL, _FP8, _BLOCK128, _FLASHINFER, auto=_NONE),
    _foreign(_LINEAR, "flashinfer_deepgemm", _SM90, _FP8, _BLOCK128, _FLASHINFER, auto=_NONE),
    _foreign(
        _LINEAR,
        "flashinfer_cutedsl",
        BLACKWELL,
        _FP8_OR_MXFP8,
        c.block_in((1, 32)),
        c.needs_ue8m0,
        _FLASHINFER,
        auto=_NONE,
    ),
    _foreign(_LINEAR, "cutlass", _SM120, _FP8, _BLOCK128, _SGL_KERNEL),
    _foreign(_LINEAR, "aiter", CDNA3_4, _FP8, _BLOCK128, *_AITER),
    _foreign(
        _LINEAR,
        "npu",
        _NPU,
        *_OUR_BLOCKS,
        c.npu_scales,
        c.needs_package("torch_npu"),
        asks=(c.needs_fact("npu_arch35", "an NPU of architecture 35"),),
    ),
    Row(
        _LINEAR,
        "scaled_mm",
        CUDA | XPU,
        (*_OUR_BLOCKS, c.needs_scaled_mm, c.fp8_here),
        "unmeasured",
        auto=XPU,
        asks=(c.needs_probe("scaled_mm_block", "block recipes of scaled_mm"),),
    ),
    Row(
        _LINEAR,
        "triton",
        _RUNS_TORCH,
        (*_OUR_BLOCKS, c.needs_torch(), c.needs_triton, c.triton_fp8),
        f"H200: faster than scaled_mm up to M=64, slower from M=512, {_H200}",
        auto=GPUS,
    ),
    Row(_LINEAR, "torch", _RUNS_TORCH, (*_OUR_BLOCKS, c.needs_torch()), _PLAIN),
    Row(_LINEAR, "reference", EVERY, (*_OUR_BLOCKS, c.needs_torch()), _FALLBACK),
)

FP8_LINEAR: tuple[Row, ...] = (
    Row(
        "fp8_linear",
        "scaled_mm",
        _RUNS_TORCH,
        (_OUR_FP8, c.needs_torch(2, 11), c.fp8_here),
        "unmeasured",
        auto_when=(c.bfloat16_or_cpu,),
    ),
    Row(
        "fp8_linear",
        "triton",
        _RUNS_TORCH,
        (_OUR_FP8, c.needs_torch(), c.needs_triton, c.triton_fp8),
        "unmeasured",
        auto=GPUS,
    ),
    Row(
        "fp8_linear",
        "torch",
        _RUNS_TORCH,
        (_OUR_FP8, c.needs_torch()),
        "plain multiplication of the dequantised operands",
    ),
    Row("fp8_linear", "reference", EVERY, (_OUR_FP8, c.needs_torch()), _FALLBACK),
)


def _triton_then_torch(op: str, reason: str = "unmeasured", *, triton: tuple[Condition, ...] = ()) -> tuple[Row, ...]:
    return (
        Row(op, "triton", _RUNS_TORCH, (c.needs_torch(), c.needs_triton, *triton), reason, auto=GPUS),
        Row(op, "torch", _RUNS_TORCH, (c.needs_torch(),), _PLAIN),
        Row(op, "reference", EVERY, (c.needs_torch(),), _FALLBACK),
    )


def _choice(op: str) -> tuple[Row, ...]:
    """Choosing experts: on XPU the engines' library has a gate for some numbers of them."""
    gate = (c.power_of_two_experts, c.needs_package("sgl_kernel"))
    return (_foreign(op, "intel_xpu", XPU, *gate), *_triton_then_torch(op))


ROWS: tuple[Row, ...] = (
    *FUSED_EXPERTS,
    *BLOCK_FP8_LINEAR,
    *FP8_LINEAR,
    *_choice("topk"),
    *_choice("grouped_topk"),
    *_triton_then_torch("moe_align_block_size", f"H200: 1.9 to 17 times as fast as torch's operations, {_H200}"),
    *_triton_then_torch("per_token_group_quant_fp8", triton=(c.triton_e4m3,)),
    *_triton_then_torch("scaled_fp8_quant", triton=(c.triton_e4m3,)),
    *_triton_then_torch("silu_and_mul"),
    *_triton_then_torch("moe_sum_reduce"),
    *_triton_then_torch("store_kv_cache"),
    *_triton_then_torch("decode_attention"),
)

OPS: tuple[str, ...] = tuple(dict.fromkeys(row.op for row in ROWS))


def rows_of(op: str) -> tuple[Row, ...]:
    """The rows of one op, in order; empty where there is no such op."""
    return tuple(row for row in ROWS if row.op == op)
