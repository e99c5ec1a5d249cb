"""SGLang 0.5.23: what `--moe-runner-backend` comes to, and the functions whose branches decide dispatch."""

from __future__ import annotations

from moegate.configs.names import ConfigKey
from moegate.dispatch.engines.rule import BackendRule, Resolved, always, both, first_rule, on, quantised
from moegate.dispatch.engines.watch import Watched
from moegate.dispatch.model import Step
from moegate.families import Layout

REQUESTS: tuple[str, ...] = (
    "auto", "deep_gemm", "triton", "triton_kernel", "flashinfer_trtllm", "experimental_sgl_trtllm",
    "flashinfer_trtllm_routed", "flashinfer_cutlass", "flashinfer_mxfp4", "flashinfer_cutedsl", "flashinfer_megamoe",
    "cutlass", "aiter", "marlin", "humming", "experimental_sgl_marlin", "lora_cutedsl", "lora_triton", "lora_marlin",
    "hpc_ops", "megamoe", "intel_xpu",
)  # fmt: skip
"""What `--moe-runner-backend` takes."""

_DEEPSEEK = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV4ForCausalLM",
        "GlmMoeDsaForCausalLM",
        "KimiK25ForConditionalGeneration",
        "KimiVLForConditionalGeneration",
        "MistralLarge3ForCausalLM",
    }
)
_TRTLLM = frozenset(
    {"Llama4ForConditionalGeneration", "Glm4MoeForCausalLM", "Gemma4ForConditionalGeneration", "NemotronHForCausalLM"}
)


def _is(layout: Layout, names: frozenset[str]) -> bool:
    return layout.architecture in names


# First match wins. The command line's `auto` is resolved by model and platform first, then by the quantisation method.
MOE_AUTO: tuple[BackendRule, ...] = (
    BackendRule(
        "intel_xpu", on("xpu"), "on XPU every MoE method takes sgl_kernel.fused_experts unless triton is asked for"
    ),
    BackendRule("cpu", on("cpu"), "on the CPU sgl_kernel's own experts serve"),
    BackendRule("ascend", on("npu"), "on NPU the Ascend runner serves"),
    BackendRule("nvfp4", quantised("nvfp4_w4a16"), "NVFP4 weights are served by FlashInfer or CUTLASS"),
    BackendRule("mxfp4", quantised("mxfp4_w4a16"), "MXFP4 weights are served by triton_kernels, FlashInfer or AITER"),
    BackendRule(
        "flashinfer_trtllm",
        both(on("cuda-sm100"), lambda m, k, p: _is(m, _DEEPSEEK | _TRTLLM)),
        "on SM100 this family is set to flashinfer_trtllm",
    ),
    BackendRule(
        "marlin", quantised("int4_w4a16"), "grouped int4 weights are served by Marlin, unless --quantization moe_wna16"
    ),
    BackendRule("triton", always, "auto resolves to triton"),
)


def moe_backend(layout: Layout, key: ConfigKey, platform: str, request: str) -> Resolved:
    """What `--moe-runner-backend request` comes to for this model on this platform."""
    if request == "auto":
        return first_rule(MOE_AUTO, layout, key, platform)
    if request != "triton":
        return Resolved(request, f"{request} was asked for by name", (Step(request, True, "requested by name"),))
    if platform.startswith("xpu") and key.dtype == "mxfp4_w4a16":
        return Resolved("intel_xpu", "MXFP4 on XPU ignores the flag: sgl_kernel serves")
    if platform in ("cpu", "npu"):
        return Resolved(platform, f"SGLang has no Triton experts on {platform}")
    return Resolved("triton", "triton was asked for by name", (Step("triton", True, "requested by name"),))


_FP8_UTILS = "layers/quantization/fp8_utils.py"
_FP8 = "layers/quantization/fp8.py"
_UNQUANT = "layers/quantization/unquant.py"
_MXFP4 = "layers/quantization/mxfp4.py"
_CT_FP8 = "layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_fp8_moe.py"
_QUARK_FP8 = "layers/quantization/quark/schemes/quark_w8a8_fp8_moe.py"
_RUNNER = ("moe_runner_backend", "backend")
_REQUEST = ("moe_runner_backend", "get_moe_runner_backend", "runner_backend")
_GEMM_REQUEST = ("backend", "get_fp8_gemm_runner_backend", "fp8_gemm_runner_backend")

WATCHED: tuple[Watched, ...] = (
    Watched(_FP8_UTILS, "dispatch_w8a8_block_fp8_linear", ("linear",), request=_GEMM_REQUEST, explicit_first=True),
    Watched(_FP8_UTILS, "_dispatch_explicit_backend", request=_GEMM_REQUEST),
    Watched(_FP8_UTILS, "_dispatch_auto_backend"),
    Watched(_FP8_UTILS, "initialize_fp8_gemm_config", ("backend",), request=_GEMM_REQUEST),
    Watched(_FP8_UTILS, "resolve_mxfp8_dense_gemm_backend", request=_GEMM_REQUEST),
    Watched(_FP8, "Fp8MoEMethod.create_moe_runner", _RUNNER, ("MoeRunner",), _REQUEST),
    Watched(_FP8, "Fp8MoEMethod.apply", request=_REQUEST),
    Watched(_UNQUANT, "UnquantizedFusedMoEMethod.create_moe_runner", _RUNNER, ("MoeRunner",), _REQUEST),
    Watched(_UNQUANT, "UnquantizedFusedMoEMethod.apply", request=_REQUEST),
    Watched(_UNQUANT, "UnquantizedFusedMoEMethod.forward_cuda", request=_REQUEST),
    Watched(_UNQUANT, "UnquantizedFusedMoEMethod.forward_xpu", request=_REQUEST),
    Watched(_MXFP4, "Mxfp4MoEMethod.create_moe_runner", _RUNNER, ("MoeRunner",), _REQUEST),
    Watched(_MXFP4, "Mxfp4MoEMethod.apply", request=_REQUEST),
    Watched(_CT_FP8, "CompressedTensorsW8A8Fp8MoE.create_moe_runner", _RUNNER, ("MoeRunner",), _REQUEST),
    Watched(_QUARK_FP8, "QuarkW8A8FP8MoE.create_moe_runner", _RUNNER, ("MoeRunner",), _REQUEST),
)
